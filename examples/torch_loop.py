"""A PyTorch training loop with gradsync: Synchronised(model) averages the gradients.

Run it with `gradsync run -n 2 examples/torch_loop.py`; it needs `pip install 'gradsync[torch]'`.
"""

import torch
from torch import nn

import gradsync as gs
from gradsync.adapters.torch import Synchronised

with gs.init_process_group() as comm:
    torch.manual_seed(comm.rank)  # each rank has its own data; all begin with rank 0's parameters
    model = Synchronised(nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for step in range(201):
        points = 2 * torch.rand(64, 2) - 1
        inside = (points.square().sum(dim=1, keepdim=True) < 0.6).float()
        optimizer.zero_grad()
        logits = model(points)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, inside)
        loss.backward()  # then .grad has the mean over all ranks
        optimizer.step()
        if comm.rank == 0 and step % 50 == 0:
            right = ((logits > 0) == (inside > 0)).float().mean()
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right")

    gs.check_consistency({name: value.numpy() for name, value in model.state_dict().items()})  # the same on all ranks

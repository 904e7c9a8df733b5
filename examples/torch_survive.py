"""A PyTorch training loop that goes on when a rank dies, and takes in the rank that is started in its place.

Run it with `gradsync run -n 3 --respawn 1 examples/torch_survive.py`, and `kill -9` one of the processes whose numbers
it prints; it needs `pip install torch`.
"""

import os

import torch
from torch import nn

import gradsync as gs
from torch_loop import copy_results, make_model, synchronise

STEPS = 3000


def main():
    comm = gs.init_process_group()  # a rank that was started again waits here until the others rebuild
    print(f"process {os.getpid()}")
    torch.manual_seed(comm.member)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    sync, step = synchronise(model, broadcast=False), 0  # the others would not take part in its broadcast
    while True:
        try:
            state = model.state_dict(), optimizer.state_dict(), step
            state = comm.objects.broadcast(state, root=comm.most_advanced)
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            step = state[2]
            if comm.rank == 0:
                print(f"step {step}: {comm.world_size} ranks")
            if step == STEPS:
                break
            while step < STEPS:
                points = torch.randn(64, 2)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
                with sync.backward():
                    loss.backward()
                copy_results(model, sync)
                optimizer.step()
                step += 1
        except (gs.RankFailed, gs.CollectiveTimeout):
            comm = gs.rebuild()
    gs.check_consistency({name: value.numpy() for name, value in model.state_dict().items()})
    if comm.rank == 0:
        points = torch.randn(1000, 2)  # a rank that came for the last broadcast has had no batch yet
        loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
        print(f"step {step}: loss {loss:.2f}")
    gs.destroy_process_group()


if __name__ == "__main__":
    main()

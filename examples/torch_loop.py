"""A PyTorch training loop with gradsync: each gradient is handed over as soon as autograd has accumulated it.

Run it with `gradsync run -n 2 examples/torch_loop.py`; it needs `pip install torch`.
"""

import torch
from torch import nn

import gradsync as gs


def synchronise(model, *, broadcast=True, **options):
    """Gives the model rank 0's parameters and buffers; returns the callback that averages its gradients."""
    if broadcast:
        gs.broadcast_tree({name: value.numpy() for name, value in model.state_dict().items()})  # written in place
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    arrays = {name: parameter.detach().numpy() for name, parameter in trained.items()}
    sync = gs.AllreduceCallback("mean", parameters=arrays, **options)
    for name, parameter in trained.items():

        def hand_over(parameter, name=name):
            sync(name, parameter.grad.numpy())  # PyTorch wants None from a hook, so do not return the future

        parameter.register_post_accumulate_grad_hook(hand_over)
    return sync


def copy_results(model, sync, *, find_unused=False):
    """Gives each .grad the mean over all ranks; also where this rank had none, and the optimiser would skip it.

    With find_unused=True, .grad stays None where no rank had one: one more collective finds out.
    """
    means = sync.results()
    if find_unused:
        names = sorted(means)  # the order of hand-over may differ between ranks
        used = torch.tensor([model.get_parameter(name).grad is not None for name in names])
        gs.get_communicator().all_reduce(used, "max")
        means = {name: means[name] for name, is_used in zip(names, used, strict=True) if is_used}
    for name, mean in means.items():
        model.get_parameter(name).grad = torch.as_tensor(mean)  # shares the memory


def make_model():
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def train(model, sync, steps, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        points = 2 * torch.rand(64, 2) - 1  # each rank has its own data
        inside = (points.square().sum(dim=1, keepdim=True) < 0.6).float()
        optimizer.zero_grad()
        logits = model(points)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, inside)
        with sync.backward():  # at the end of the block, all gradients are averaged
            loss.backward()
        copy_results(model, sync)
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            right = ((logits > 0) == (inside > 0)).float().mean()
            print(f"step {step}: loss {loss:.2f}, {right:.0%} right")


if __name__ == "__main__":
    with gs.init_process_group() as comm:
        torch.manual_seed(comm.rank)
        model = make_model()
        train(model, synchronise(model), 201, comm.rank)
        gs.check_consistency({name: value.numpy() for name, value in model.state_dict().items()})

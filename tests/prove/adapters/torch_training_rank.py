"""A rank that trains a small model with PyTorch's DistributedDataParallel or with ours, and leaves what it has learnt.

    torch_training_rank.py ddp FOLDER
    torch_training_rank.py gradsync FOLDER

Nothing but the wrapper differs. It is started with the Python that has torch: no pytest, nothing else of tests/.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

SCENES = ("every parameter", "unused parameters")
ACCUMULATION = "accumulation"
STEPS = 12
ACCUMULATING_STEPS = 20
BATCH = 6


class Model(nn.Module):
    """All that a wrapper has to cope with: BatchNorm, a shared layer, a frozen one, two dtypes, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(4 * 36, 32).requires_grad_(False)
        self.shared = nn.Linear(32, 32)
        self.branch = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5).double()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor, takes_branch: bool) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.convolution(images))).flatten(1)
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(self.frozen(hidden)))))
        if takes_branch:
            hidden = hidden + torch.tanh(self.branch(hidden))
        return self.head(hidden.double()) * self.scale


def with_ddp() -> tuple[int, dict[str, Any]]:
    """Returns this rank's number, and what wraps a model, by name."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=size)
    return rank, {"": nn.parallel.DistributedDataParallel}


def with_gradsync() -> tuple[int, dict[str, Any]]:
    """Likewise."""
    import gradsync as gs
    from gradsync.adapters.torch import Synchronised

    small_buckets = partial(Synchronised, threshold_bytes=8192)
    without_views = partial(Synchronised, gradient_as_bucket_view=False)
    return gs.init_process_group().rank, {"": small_buckets, ", without views": without_views}


def takes_branch(scene: str, step: int, rank: int) -> bool:
    """Whether the branch is used: always; or by no rank, by the first alone, by all, in turns."""
    return scene == SCENES[0] or step % 3 == 2 or (step % 3 == 1 and rank == 0)


def train(model: nn.Module, rank: int, scene: str) -> list[float]:
    """Trains with an optimiser that tells a gradient of zeros from none; every third step accumulates two batches."""
    rng = np.random.default_rng([1, rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for is_last in (False, True) if step % 3 == 0 else (True,):
            images = torch.from_numpy(rng.normal(size=(BATCH, 1, 8, 8)).astype(np.float32))
            labels = torch.from_numpy(rng.integers(0, 5, BATCH))
            with nullcontext() if is_last else model.no_sync():
                loss = nn.functional.cross_entropy(model(images, takes_branch(scene, step, rank)), labels)
                loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def accumulate(wrapper: Any, rank: int) -> torch.Tensor:
    """Trains with steps of two and of three small batches; returns the parameters after each step, as rows."""
    torch.manual_seed(rank)
    layers = [nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 5)]
    model = wrapper(nn.Sequential(*layers))
    rng = np.random.default_rng([2, rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rows = []
    for step in range(ACCUMULATING_STEPS):
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        batches = 2 + step % 2
        for number in range(batches):
            inputs = torch.from_numpy(rng.normal(size=(BATCH, 7)).astype(np.float32))
            labels = torch.from_numpy(rng.integers(0, 5, BATCH))
            with nullcontext() if number == batches - 1 else model.no_sync():
                (nn.functional.cross_entropy(model(inputs), labels) / batches).backward()
        optimizer.step()
        rows.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return torch.stack(rows)


def main(system: str, folder: str) -> None:
    torch.set_num_threads(1)
    rank, wrappers = with_ddp() if system == "ddp" else with_gradsync()
    learnt = {}
    for name, wrapper in wrappers.items():
        for scene in SCENES:
            torch.manual_seed(rank)  # all begin with what rank 0 has
            model = Model()
            losses = train(wrapper(model, find_unused_parameters=scene == SCENES[1]), rank, scene)
            gradients = {f"{name} (gradient)": p.grad for name, p in model.named_parameters() if p.grad is not None}
            state = {"losses": torch.tensor(losses), **model.state_dict(), **gradients}
            learnt |= {f"{scene}{name}: {key}": value.numpy().copy() for key, value in state.items()}
        learnt[f"{ACCUMULATION}{name}"] = accumulate(wrapper, rank).numpy()
    np.savez(Path(folder, f"{rank}.npz"), **learnt)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A rank of torch_adapter.py: times backward passes that compute nothing, and prints its samples as JSON on rank 0.

It runs in the Python that has PyTorch. A backward pass hands out gradients that exist already, as in
peers/over_gloo.py: the time is that of the reduction, and of autograd's walk over the parameters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.adapters.torch import Synchronised
from gradsync.bench.models import resnet50
from peers.over_gloo import HandedOut

MODELS = {"small": lambda: [(64, 64)] * 4, "ResNet-50": resnet50}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "not synchronised": lambda module: module,
    "DistributedDataParallel on gloo": DistributedDataParallel,
    "DistributedDataParallel on gloo, views": lambda module: DistributedDataParallel(
        module, gradient_as_bucket_view=True
    ),
    "Synchronised": Synchronised,
    "Synchronised, without views": lambda module: Synchronised(module, gradient_as_bucket_view=False),
}
WARM_UP = 2


def seconds_of_backward(model: nn.Module, comm: gs.Communicator) -> float:
    """Times one backward pass."""
    model.zero_grad()
    loss = model()
    comm.barrier()
    began = time.perf_counter()
    loss.backward()
    return time.perf_counter() - began


def measure(name: str, rounds: int, comm: gs.Communicator) -> dict[str, list[float]]:
    """Returns each wrapper's samples on a model's shapes, those of the slower rank; wrappers take turns."""
    rng = np.random.default_rng(comm.rank)
    gradients = [torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for shape in reversed(MODELS[name]())]
    models = {what: wrap(HandedOut(gradients)) for what, wrap in WRAPPERS.items()}
    samples: dict[str, list[float]] = {what: [] for what in models}
    for round_ in range(WARM_UP + rounds):
        for what in models if round_ % 2 else reversed(models):
            seconds = comm.all_reduce(np.array([seconds_of_backward(models[what], comm)]), "max")
            if round_ >= WARM_UP:
                samples[what].append(float(seconds[0]))
    return samples


def main(rounds: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    with gs.init_process_group() as comm:
        meeting = Path(gettempdir(), "meeting")  # a folder of this run
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=comm.world_size)
        found = {name: measure(name, rounds, comm) for name in names}
        dist.destroy_process_group()
        if comm.rank == 0:
            print(json.dumps({"torch": torch.__version__, "samples": found}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

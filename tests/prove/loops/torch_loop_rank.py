"""A rank that trains the example's model in the example's loop, and leaves the weights.

    torch_loop_rank.py ddp FOLDER          # DistributedDataParallel averages the gradients
    torch_loop_rank.py gradsync FOLDER     # examples/torch_loop.py does

It is started with the Python that has torch: no pytest, nothing else of tests/.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "torch_loop.py"))
STEPS = 30


def train_over_ddp() -> tuple[int, nn.Module]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=size)
    torch.manual_seed(rank)  # all begin with what rank 0 has
    model = EXAMPLE["make_model"]()
    wrapped = nn.parallel.DistributedDataParallel(model)
    EXAMPLE["train"](wrapped, SimpleNamespace(backward=nullcontext), STEPS, rank)
    dist.destroy_process_group()
    return rank, model


def train_over_gradsync() -> tuple[int, nn.Module]:
    with gs.init_process_group() as comm:
        torch.manual_seed(comm.rank)
        model = EXAMPLE["make_model"]()
        EXAMPLE["train"](model, EXAMPLE["synchronise"](model), STEPS, comm.rank)
        return comm.rank, model


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, model = train_over_ddp() if sys.argv[1] == "ddp" else train_over_gradsync()
    np.savez(Path(sys.argv[2], f"{rank}.npz"), **{name: value.numpy() for name, value in model.state_dict().items()})

"""A rank of gpt2_training.py: trains GPT-2 once with each wrapper, and prints its samples as JSON on rank 0.

It runs in the Python that has PyTorch and transformers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import gradsync as gs
from gradsync.adapters.torch import Synchronised

# The configuration's own defaults are those of GPT-2 small: 12 layers, 768 wide, 50,257 tokens.
MODELS = {
    "tiny": GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64),
    "GPT-2 small": GPT2Config(),
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel on gloo": DistributedDataParallel,
    "DistributedDataParallel on gloo, views": lambda model: DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
    "Synchronised": Synchronised,
}
BATCH, TOKENS, LEARNING_RATE = 1, 64, 3e-4


@dataclass
class Contender:
    """A model in its wrapper, with its optimiser and the samples of its steps."""

    wrapped: nn.Module
    optimiser: torch.optim.Optimizer
    steps: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def made(config: GPT2Config, wrap: Callable[[nn.Module], nn.Module]) -> Contender:
    """Returns a contender; all begin with the same weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    wrapped = wrap(model)
    return Contender(wrapped, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def train(contender: Contender, batch: torch.Tensor, seed: int, comm: gs.Communicator) -> None:
    """Makes one step, timed with the slower rank."""
    torch.manual_seed(seed)  # for dropout
    comm.barrier()
    began = time.perf_counter()
    contender.optimiser.zero_grad()
    loss = contender.wrapped(input_ids=batch, labels=batch).loss
    before = time.perf_counter()
    loss.backward()
    after = time.perf_counter()
    contender.optimiser.step()
    seconds = np.array([time.perf_counter() - began, after - before])
    step, backward = comm.all_reduce(seconds, "max").tolist()
    contender.steps.append(step)
    contender.backwards.append(backward)
    contender.losses.append(loss.item())


def are_equal(first: nn.Module, second: nn.Module) -> bool:
    """Returns whether two models have the same weights, bit by bit."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs)


def are_equal_on_ranks(model: nn.Module, comm: gs.Communicator) -> bool:
    """Returns whether a model has the same weights on all ranks, bit by bit."""
    same = True
    for parameter in model.parameters():
        bits = parameter.detach().numpy().view(np.int32)
        theirs = bits.copy()
        comm.broadcast(theirs)
        same = same and bool(np.array_equal(bits, theirs))
    return bool(comm.all_reduce(np.array([same], np.int32), "min")[0])


def measure(name: str, steps: int, comm: gs.Communicator) -> dict[str, Any]:
    """Trains with each wrapper; returns the samples."""
    config = MODELS[name]
    contenders = {what: made(config, wrap) for what, wrap in WRAPPERS.items()}
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + comm.rank)
        batch = torch.randint(config.vocab_size, (BATCH, TOKENS), generator=generator)
        for what in contenders if step % 2 else reversed(contenders):
            train(contenders[what], batch, 1000 * step + comm.rank, comm)
    reference = next(iter(contenders.values())).wrapped
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in reference.parameters()),
        "samples": {
            what: {"step": each.steps, "backward": each.backwards, "losses": each.losses}
            for what, each in contenders.items()
        },
        "are_equal": {what: are_equal(reference, each.wrapped) for what, each in contenders.items()},
        "ranks_are_equal": {what: are_equal_on_ranks(each.wrapped, comm) for what, each in contenders.items()},
        "settings": {
            "steps": steps,
            "batch": BATCH,
            "tokens": TOKENS,
            "optimiser": "AdamW",
            "dropout": config.resid_pdrop,
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main(name: str, steps: int) -> None:
    torch.set_num_threads(1)
    with gs.init_process_group() as comm:
        meeting = Path(gettempdir(), "meeting")  # a folder of this run
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=comm.world_size)
        found = measure(name, steps, comm)
        dist.destroy_process_group()
        if comm.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

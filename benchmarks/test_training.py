"""What ranks gain: the same training in one process, and on ranks that share its cores.

pytest benchmarks/test_training.py --script train.py  # your own script, as a whole, on 1, 2, 4 ... ranks
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import pytest

import gradsync as gs
import systems
from compare import Compare, contenders
from gradsync.machine import BLAS_VARIABLES, usable_cores
from systems import Step

CORES = usable_cores()
# The number of ranks, and of threads of each.
ALONE = {"1 process, 1 thread": (1, 1)} | ({f"1 process, {CORES} threads": (1, CORES)} if CORES > 1 else {})
ONE_RANK = {"1 rank": (1, CORES)}
SHARING = {f"{ranks} ranks": (ranks, max(1, CORES // ranks)) for ranks in (2, 4, 8) if ranks <= max(2, CORES)}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Channels of the two layers of examples/train_digits.py, and the images of a step over all ranks: all train alike.
NETWORKS = {"digits, 38,282 parameters": ((16, 32), 48), "a larger network, 206,282 parameters": ((64, 128), 240)}

PROGRAM = """\
import json, sys
from functools import partial

import gradsync as gs
import train_digits
from digits_network import Network

channels, batch, epochs = json.loads(sys.argv[1])
train_digits.Network = partial(Network, channels=channels)
settings = partial(train_digits.Settings, global_batch=batch, quiet=True)
with gs.init_process_group() as comm:
    train_digits.train(comm, settings(epochs=1))  # warms up
    result = train_digits.train(comm, settings(epochs=epochs))
    if comm.rank == 0:
        print(result.seconds / result.steps)
"""


def run(contender: str, *command: str | Path) -> tuple[float, str]:
    """Runs a program on a contender's ranks; returns the seconds it takes, and what it prints."""
    ranks, threads = (ALONE | ONE_RANK | SHARING)[contender]
    launcher = [sys.executable, "-m", "gradsync", "run", "--no-prefix", "-n", str(ranks)]
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | dict.fromkeys(BLAS_VARIABLES, str(threads)) | {"PYTHONPATH": paths}
    began = time.perf_counter()
    done = subprocess.run([*launcher, *command], env=variables, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, f"{contender}: {done.stderr[-3000:]}"
    return time.perf_counter() - began, done.stdout


def step_of_training(contender: str, program: Path, arguments: str) -> Step:
    return lambda: float(run(contender, program, arguments)[1].split()[-1])


def whole_script(contender: str, script: str) -> Step:
    return lambda: run(contender, script)[0]


@pytest.mark.parametrize("network", NETWORKS)
@contenders(*ALONE, *SHARING)
def test_step_of_training(compare: Compare, tmp_path: Path, network: str) -> None:
    if compare.disabled and network.startswith("a larger"):
        pytest.skip("takes long, and shows no more than the small network does")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    channels, images = NETWORKS[network]
    arguments = json.dumps([channels, images, 1 if compare.disabled else 8])
    row = f"a step of training: {network}"
    compare(row, step_of_training, program, arguments, ranks=0, rounds=5, warm_up=1, closing=speed_up(network))


def speed_up(name: str) -> Callable[[dict[str, list[float]]], str]:
    """Returns what the output says at its end: the fastest with one rank beside the fastest that share the cores."""

    def closing(seconds: dict[str, list[float]]) -> str:
        fastest_first = sorted(seconds, key=lambda contender: median(seconds[contender]))
        alone = next((each for each in fastest_first if each not in SHARING), None)
        ranks = next((each for each in fastest_first if each in SHARING), None)
        if alone is None or ranks is None:
            return f"{name}: one process and ranks were not both measured."
        return f"{name}: {ranks} are {median(seconds[alone]) / median(seconds[ranks]):.2f} times as fast as {alone}."

    return closing


@contenders(*ONE_RANK, *SHARING)
def test_script(compare: Compare, request: pytest.FixtureRequest) -> None:
    script = request.config.option.script
    if script is None:
        pytest.skip("times a script of yours: --script train.py")
    row = f"whole script: {Path(script).name}"
    compare(row, whole_script, script, ranks=0, rounds=3, warm_up=1, closing=speed_up(script))


def step_of_gpt2(contender: str, *, few: bool) -> Step:
    """Returns a step of GPT-2 small, with random weights, in the loop of examples/torch_loop.py or under DDP."""
    try:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise systems.Absent(f"{systems.NO_TORCH}; then pip install transformers") from None
    from torch_loop import copy_results, synchronise

    torch.set_num_threads(1)
    torch.manual_seed(systems.comm().rank)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=12, vocab_size=100) if few else GPT2Config())
    tokens = torch.randint(model.config.vocab_size, (1, 64))  # each rank has its own
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if contender == "DDP":
        systems.gloo()
        called, sync = torch.nn.parallel.DistributedDataParallel(model), None
    else:
        called, sync = model, synchronise(model)

    def step() -> None:
        optimizer.zero_grad()
        loss = called(tokens, labels=tokens).loss
        with nullcontext() if sync is None else sync.backward():
            loss.backward()
        if sync is not None:
            copy_results(model, sync)
        optimizer.step()

    step()
    gs.check_consistency({name: value.numpy() for name, value in model.state_dict().items()})
    return step


@contenders("gradsync", "DDP")
def test_step_of_gpt2(compare: Compare) -> None:
    compare("a step in PyTorch: GPT-2 small", partial(step_of_gpt2, few=compare.disabled), rounds=8, warm_up=2)

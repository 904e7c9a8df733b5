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
from pathlib import Path
from statistics import median

import pytest

from compare import Compare, contenders
from gradsync.machine import BLAS_VARIABLES, usable_cores
from systems import Step

CORES = usable_cores()
RANKS = [ranks for ranks in (2, 4, 8) if ranks <= CORES] or [2]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Channels of the two layers of examples/train_digits.py, and the images of a step over all ranks: all train alike.
NETWORKS = {"digits, 38,282 parameters": ((16, 32), 48), "a larger network, 206,282 parameters": ((64, 128), 240)}
ALONE = ("1 process, 1 thread", f"1 process, {CORES} threads")[: 2 if CORES > 1 else 1]
SHARING = tuple(f"{ranks} ranks" for ranks in RANKS)

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
    """Runs a program on so many ranks with so many threads each; returns the seconds it takes, and what it prints."""
    count, what, *threads = contender.replace(",", "").split()
    ranks = int(count) if what.startswith("rank") else 1
    each = threads[0] if threads else str(max(1, CORES // ranks))
    launcher = [sys.executable, "-m", "gradsync", "run", "--no-prefix", "-n", str(ranks)]
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | dict.fromkeys(BLAS_VARIABLES, each) | {"PYTHONPATH": paths}
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
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    channels, images = NETWORKS["digits, 38,282 parameters" if compare.disabled else network]
    arguments = json.dumps([channels, images, 1 if compare.disabled else 8])
    row = f"a step of training: {network}"
    compare(row, step_of_training, program, arguments, ranks=0, rounds=5, warm_up=1, closing=speed_up(network))


def speed_up(name: str) -> Callable[[dict[str, list[float]]], str]:
    """Returns what the output says at its end."""

    def closing(seconds: dict[str, list[float]]) -> str:
        best = {who: median(samples) for who, samples in seconds.items()}
        alone = min((who for who in best if who in (*ALONE, "1 rank")), key=best.__getitem__, default=None)
        ranks = min((who for who in best if who in SHARING), key=best.__getitem__, default=None)
        if alone is None or ranks is None:
            return f"{name}: one process and ranks were not both measured."
        return f"{name}: {ranks} are {best[alone] / best[ranks]:.2f} times as fast as {alone}."

    return closing


@contenders("1 rank", *SHARING)
def test_script(compare: Compare, request: pytest.FixtureRequest) -> None:
    script = request.config.option.script
    if script is None:
        pytest.skip("times a script of yours: --script train.py")
    row = f"whole script: {Path(script).name}"
    compare(row, whole_script, script, ranks=0, rounds=3, warm_up=1, closing=speed_up(script))

"""How long a run takes from its command until the last rank has ended its first all-reduce.

The clock starts before the launcher's process exists. All processes of a machine share Linux's monotonic clock, so each
rank prints the time at which its all-reduce returned.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import systems
from compare import Compare, contenders
from systems import Step, started

PROGRAMS = {
    "gradsync run": """
import sys, time, numpy as np, gradsync as gs
with gs.init_process_group() as comm:
    comm.all_reduce(np.ones(1, np.float32))
    sys.stdout.write(f"{time.monotonic()}\\n")  # one write, so that the ranks' lines do not mix
""",
    "torchrun, gloo": """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
sys.stdout.write(f"{time.monotonic()}\\n")
sys.stdout.flush()
dist.destroy_process_group()
""",
    "mpiexec, mpi4py": """
import sys, time, numpy as np
from mpi4py import MPI
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, np.ones(1, np.float32))
sys.stdout.write(f"{time.monotonic()}\\n")
""",
}
SYSTEMS = {"gradsync run": "gradsync", "torchrun, gloo": "torch", "mpiexec, mpi4py": "mpi"}
# What is installed is compiled already, and sources are compiled once: in the warm-up.
UNWANTED = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}


def start(contender: str, ranks: int, folder: Path) -> Step:
    program = folder / f"{contender}.py"
    program.write_text(PROGRAMS[contender])
    command = [*systems.launcher_of(SYSTEMS[contender], ranks), str(program)]
    if SYSTEMS[contender] == "torch":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(program)]
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    variables = kept | systems.VARIABLES | {"TMPDIR": str(folder)}  # some leave files behind

    def step() -> float:
        began = time.monotonic()
        with started(command, env=variables) as run:
            ends = [float(line.split()[-1]) for line in run.stdout]  # a launcher may put the rank before it
            assert run.wait(60) == 0
        assert len(ends) == ranks
        return max(ends) - began

    return step


@pytest.mark.parametrize("ranks", [2, 8])
@contenders(*PROGRAMS)
def test_start_up(compare: Compare, ranks: int, tmp_path: Path) -> None:
    if compare.disabled and ranks > 2:
        pytest.skip("takes long, and shows no more than 2 ranks do")
    compare(f"start {ranks} ranks", start, ranks, tmp_path, ranks=0, rounds=10, warm_up=1)

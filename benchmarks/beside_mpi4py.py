"""Times the communicator over MPI beside mpi4py's own calls, in the same two ranks of MPICH, round by round.

    python benchmarks/beside_mpi4py.py                # prints a table, and writes benchmarks/results/beside_mpi4py.json
    python benchmarks/beside_mpi4py.py --rounds 3     # writes nothing

gradsync's figures include its agreement before each collective. "mean of all gradients": its callback with default
settings, beside one Allreduce and one division for each tensor, as in a loop written by hand. A figure is
the median over rounds of the slower rank's time; contenders take turns within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradsync as gs
from measurement import add_output, provenance, write_result
from models import Shape, gpt2_small, resnet50

FOLDER = Path(__file__).parent
ROUNDS = 30
RANKS = 2
SIZES = {"4 KB": 4_096, "64 KB": 65_536, "1 MB": 2**20, "10 MB": 10 * 2**20, "100 MB": 100 * 2**20}
LISTS = {"ResNet-50": resnet50(), "GPT-2 small": gpt2_small()}
_ENOUGH_BYTES = 20 * 2**20  # of a measurement: small arrays are reduced many times in it
_MOST_REPEATS = 200


def contenders(comm: Any, mpi: Any, elements: int) -> tuple[int, dict[str, Callable[[], None]]]:
    """Returns how often each call is repeated in a measurement, and the calls that reduce an array."""
    world, ours, theirs = mpi.COMM_WORLD, np.ones(elements, np.float32), np.ones(elements, np.float32)
    our_result, their_result = np.empty_like(ours), np.empty_like(theirs)
    repeats = max(1, min(_MOST_REPEATS, _ENOUGH_BYTES // ours.nbytes))
    return repeats, {
        "gradsync": lambda: comm.all_reduce(ours, out=our_result),
        "mpi4py": lambda: world.Allreduce(theirs, their_result),
    }


def list_contenders(comm: Any, mpi: Any, shapes: list[Shape]) -> dict[str, Callable[[], None]]:
    """Returns the calls that average a list of gradients."""
    world = mpi.COMM_WORLD
    ours = [np.ones(shape, np.float32) for shape in shapes]
    theirs = [np.ones(shape, np.float32) for shape in shapes]
    sync = gs.AllreduceCallback("mean", comm)

    def by_gradsync() -> None:
        with sync.backward():
            for number, gradient in enumerate(ours):
                sync(number, gradient)

    def by_hand() -> None:
        for gradient in theirs:
            world.Allreduce(mpi.IN_PLACE, gradient, mpi.SUM)
            gradient /= RANKS

    return {"gradsync": by_gradsync, "mpi4py": by_hand}


def measure(mpi: Any, calls: dict[str, Callable[[], None]], repeats: int, rounds: int) -> dict[str, float]:
    """Returns the median seconds of each call; after a round of warming up."""
    world = mpi.COMM_WORLD
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in sorted(calls, reverse=bool(number % 2)):
            world.Barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            seconds = world.allreduce((time.perf_counter() - began) / repeats, mpi.MAX)
            if number:
                samples[name].append(seconds)
    return {name: statistics.median(of_call) for name, of_call in samples.items()}


def rank_main(path: Path, rounds: int) -> None:
    """Measures on each rank; rank 0 writes the result."""
    from mpi4py import MPI  # here, as the import initialises MPI, and the process that starts the ranks is not a rank

    rows = []
    with gs.init_process_group("mpi") as comm:
        for name, size in SIZES.items():
            repeats, calls = contenders(comm, MPI, size // 4)
            rows.append({"work": f"all_reduce {name}", "seconds": measure(MPI, calls, repeats, rounds)})
        for name, shapes in LISTS.items():
            calls = list_contenders(comm, MPI, shapes[::-1])  # as a backward pass gives them
            rows.append({"work": f"mean of all gradients, {name}", "seconds": measure(MPI, calls, 1, rounds)})
        if comm.rank == 0:
            path.write_text(json.dumps({"library": MPI.Get_library_version().split("\n")[0].strip(), "rows": rows}))


def main() -> int:
    """Starts the ranks, prints their result, and writes it unless the rounds are shortened."""
    parser = argparse.ArgumentParser(description="Times gradsync over MPI beside mpi4py.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_output(parser, "beside_mpi4py")
    options = parser.parse_args()
    rounds: int = options.rounds
    results = provenance("benchmarks/beside_mpi4py.py")
    mpiexec = str(Path(sysconfig.get_path("scripts")) / "mpiexec")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [mpiexec, "-n", str(RANKS), sys.executable, __file__, "--rank", str(path), str(rounds)]
        subprocess.run(command, check=True)
        found = json.loads(path.read_text())
    results["versions"]["mpi"] = found["library"]
    results["results"] = found["rows"]
    write_result("beside_mpi4py", options.output, results, is_whole=rounds >= ROUNDS)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())

"""Which collective was right on which communicator for which dtype: made of what the contract's checks note.

    python tests/prove/pages/coverage_table.py             # runs the contract, writes benchmarks/results/contract.json
    python tests/prove/pages/coverage_table.py groups ...   # runs these parts only, and leaves the others

docs/collectives.md shows it as a table. The tests compare their own runs with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

ROOT = Path(__file__).parents[3]
MPI_RANK = str(Path(__file__).parents[1] / "mpi" / "mpi_contract_rank.py")
RESULTS = ROOT / "benchmarks" / "results" / "contract.json"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "prove" / "tools"), str(ROOT / "benchmarks")]

from cross_check_launch import PEERS, Mpi

import measurement
from contract_suite import PARTS, run_part_anew
from places import why_no_gpu
from rank_pool import RankPool

Note = tuple[str, str, str]
#: collective -> dtype -> operators; none for what does not compute.
Covered = dict[str, dict[str, list[str]]]


STAND_IN = "nccl (stand-in)"


class Runs(NamedTuple):
    """How the contract runs on one communicator.

    Attributes:
        world_sizes: numbers of ranks.
        kits: where the arrays live.
        options: for the ranks.
    """

    world_sizes: tuple[int, ...]
    kits: tuple[str, ...]
    options: dict[str, Any]


COMMUNICATORS = {
    "local": Runs((1,), ("numpy",), {"backend": "local"}),
    "shm": Runs((1, 2, 3, 4), ("numpy",), {"backend": "shm"}),
    STAND_IN: Runs((1, 2, 3, 4), ("cupy", "numpy"), {"backend": "nccl", "stand_in": True}),
    "mpi": Runs((1, 2, 3, 4), ("numpy",), {"backend": "mpi"}),
}
ON_GPU = Runs((1, 2, 4), ("cupy", "numpy"), {"backend": "nccl", "allow_shared_gpu": True, "timeout": 300.0})


def communicators() -> dict[str, Runs]:
    """Returns the runs that this machine is able to make, by the name that the table gives the communicator."""
    return COMMUNICATORS if why_no_gpu() else {**COMMUNICATORS, "nccl": ON_GPU}


def covered(notes: Iterable[Note]) -> Covered:
    """Returns the notes in order, as JSON holds them."""
    found: Covered = {}
    for collective, dtype, op in sorted(notes):
        found.setdefault(collective, {}).setdefault(dtype, []).extend([op] if op else [])
    return found


def committed(communicator: str, part: str, world_size: int, kit: str) -> Covered | None:
    """Returns what the committed results say of one run; None where they do not have it."""
    for row in json.loads(RESULTS.read_text())["results"]:
        if (row["communicator"], row["part"]) == (communicator, part) and [world_size, kit] in row["runs"]:
            return cast("Covered", row["covered"])
    return None


class Ranks:
    """Ranks on which one part of the contract runs after the other, each in a process group of its own.

    Args:
        world_size: number of ranks.
        options: of a Runs.
    """

    def __init__(self, world_size: int, *, stand_in: bool = False, timeout: float = 60.0, **options: Any) -> None:
        self._pool = RankPool(world_size, stand_in=stand_in, **options)
        self._options = options
        self._timeout = timeout

    def run(self, part: str, kit: str) -> Covered:
        """Returns what the checks of a part have covered.

        Raises:
            AssertionError: a check failed; the next run has new ranks.
        """
        by_rank = self._pool.run(run_part_anew, part, kit, self._options, timeout=self._timeout)
        return covered({note for notes in by_rank for note in notes})

    def close(self) -> None:
        """Ends the ranks."""
        self._pool.close()


class MpiRanks:
    """The same on ranks that mpiexec starts, for each part anew.

    Args:
        world_size: number of ranks.
        mpi: which MPI; by default MPICH.
    """

    def __init__(self, world_size: int, mpi: Mpi | None = None) -> None:
        self._world_size = world_size
        self._mpi = mpi or cast("Mpi", PEERS["mpich"])

    def run(self, part: str, kit: str) -> Covered:
        """Returns what the checks of a part have covered.

        Raises:
            RunFailed: a check failed.
        """
        assert kit == "numpy"
        return self.run_parts([part])[part]

    def run_parts(self, parts: Sequence[str], **options: Any) -> dict[str, Covered]:
        """Returns the same for several parts, which run one after the other on the same ranks."""
        with tempfile.TemporaryDirectory(prefix="gradsync-mpi-") as folder:
            self._mpi.run_script(self._world_size, Path(folder), MPI_RANK, folder, *parts, **options)
            by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(self._world_size)]
        return {part: covered({tuple(note) for found in by_rank for note in found[part]}) for part in parts}

    def close(self) -> None:
        """There is nothing to end."""


def ranks_for(world_size: int, options: dict[str, Any]) -> Ranks | MpiRanks:
    """Returns ranks that can run parts of the contract over a backend."""
    return MpiRanks(world_size) if options["backend"] == "mpi" else Ranks(world_size, **options)


def rows_of(communicator: str, planned: Runs, parts: Sequence[str]) -> list[dict[str, Any]]:
    """Runs parts on one communicator, and returns a row for each way in which one was covered."""
    rows: list[dict[str, Any]] = []
    for world_size in planned.world_sizes:
        print(f"{communicator}: world size {world_size} ...", flush=True)
        with closing(ranks_for(world_size, planned.options)) as ranks:
            for part, kit in product(parts, planned.kits):
                found = ranks.run(part, kit)
                row = next((row for row in rows if (row["part"], row["covered"]) == (part, found)), None)
                if row is None:
                    row = {"communicator": communicator, "part": part, "runs": [], "covered": found}
                    rows.append(row)
                row["runs"].append([world_size, kit])
    return rows


def main() -> int:
    """Writes the results."""
    parts = sys.argv[1:] or list(PARTS)
    kept = json.loads(RESULTS.read_text())["results"] if sys.argv[1:] else []
    rows = [row for row in kept if row["part"] not in parts]
    for communicator, planned in communicators().items():
        rows += rows_of(communicator, planned, parts)
    order = list(PARTS), list(communicators())
    rows.sort(key=lambda row: (order[1].index(row["communicator"]), order[0].index(row["part"])))
    results = measurement.provenance("tests/prove/pages/coverage_table.py")
    results["results"] = rows
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

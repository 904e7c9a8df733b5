"""The contract suite on ranks of every backend: which numbers of ranks, and how their ranks start."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from cross_check_launch import PEERS, Mpi

from contract_suite import run_part_anew
from rank_pool import RankPool

MPI_RANK = str(Path(__file__).parents[1] / "mpi" / "mpi_contract_rank.py")

Note = tuple[str, str, str]
#: collective -> dtype -> operators; none for what does not compute.
Covered = dict[str, dict[str, list[str]]]


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
    "nccl (stand-in)": Runs((1, 2, 3, 4), ("cupy", "numpy"), {"backend": "nccl", "stand_in": True}),
}


def covered(notes: Iterable[Note]) -> Covered:
    """Returns the notes of what was checked, in order."""
    found: Covered = {}
    for collective, dtype, op in sorted(notes):
        found.setdefault(collective, {}).setdefault(dtype, []).extend([op] if op else [])
    return found


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

    def run_parts(self, parts: Sequence[str], **options: Any) -> dict[str, Covered]:
        """Returns what the checks of parts have covered, which run one after the other on the same ranks.

        Raises:
            RunFailed: a check failed.
        """
        with tempfile.TemporaryDirectory(prefix="gradsync-mpi-") as folder:
            self._mpi.run_script(self._world_size, Path(folder), MPI_RANK, folder, *parts, **options)
            by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(self._world_size)]
        return {part: covered({tuple(note) for found in by_rank for note in found[part]}) for part in parts}

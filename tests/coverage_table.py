"""Which collective was right on which communicator for which dtype: made of what the contract's checks note.

    python tests/coverage_table.py              # runs the contract, writes benchmarks/results/contract.json

The README shows it as a table. NCCL is its stand-in as long as there is no GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "contract.json"
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks")]

import measurement  # noqa: E402
from conftest import why_no_gpu  # noqa: E402
from contract_suite import PARTS, run_part  # noqa: E402
from rank_processes import run_ranks  # noqa: E402

Note = tuple[str, str, str]
#: collective -> dtype -> operators; none for what does not compute.
Covered = dict[str, dict[str, list[str]]]


class Runs(NamedTuple):
    """How the contract runs on one communicator.

    Attributes:
        world_sizes: numbers of ranks.
        kits: where the arrays live.
        options: for run_ranks.
    """

    world_sizes: tuple[int, ...]
    kits: tuple[str, ...]
    options: dict[str, Any]


COMMUNICATORS = {
    "local": Runs((1,), ("numpy",), {"backend": "local"}),
    "shm": Runs((1, 2, 3, 4), ("numpy",), {"backend": "shm"}),
}
ON_STAND_IN = Runs((1, 2, 3, 4), ("cupy", "numpy"), {"backend": "nccl", "stand_in": True})
ON_GPU = Runs((1, 2, 4), ("cupy", "numpy"), {"backend": "nccl", "allow_shared_gpu": True, "timeout": 300.0})


def runs() -> dict[str, Runs]:
    """Returns the runs that this machine is able to make, by the name that the table gives the communicator."""
    nccl = {"nccl (stand-in)": ON_STAND_IN} if why_no_gpu() else {"nccl": ON_GPU}
    return {**COMMUNICATORS, **nccl}


def covered(notes: Iterable[Note]) -> Covered:
    """Returns the notes in order, as JSON holds them."""
    found: Covered = {}
    for collective, dtype, op in sorted(notes):
        found.setdefault(collective, {}).setdefault(dtype, []).extend([op] if op else [])
    return found


def committed(communicator: str, part: str) -> Covered:
    """Returns what the committed results say of one part on one communicator."""
    rows = json.loads(RESULTS.read_text())["results"]
    return next(row["covered"] for row in rows if (row["communicator"], row["part"]) == (communicator, part))


def run(part: str, planned: Runs) -> set[Note]:
    """Runs one part at all world sizes, and returns what its checks noted."""
    notes: set[Note] = set()
    for world_size in planned.world_sizes:
        for kit in planned.kits:
            findings = run_ranks(world_size, run_part, part, kit, **planned.options)
            failures = [found.failure for found in findings if found.failure]
            if failures:
                raise SystemExit(f"{part} on {planned.options}, {world_size} ranks:\n" + "\n".join(failures))
            notes.update(*(map(tuple, found.notes) for found in findings))
    return notes


def main() -> int:
    """Writes the results."""
    results = measurement.provenance("tests/coverage_table.py")
    results["results"] = []
    for communicator, planned in runs().items():
        for part in PARTS:
            print(f"{part} on {communicator} ...", flush=True)
            row = {"communicator": communicator, "part": part, "world_sizes": planned.world_sizes}
            results["results"].append({**row, "covered": covered(run(part, planned))})
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

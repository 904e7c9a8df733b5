"""A rank of mpiexec that runs parts of the contract, and leaves what it found: mpi_contract_rank.py FOLDER PART...

With GRADSYNC_TEST_NATIVE_MPI few ranks communicate by MPI's own collectives, as many would, and arrays of the
contract's sizes are cut as those of gigabytes would be.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gradsync as gs
from contract_suite import run_part_anew
from gradsync.communicators.mpi import mpi_reduction, mpi_requests


def main(folder: Path, parts: list[str], options: dict[str, object]) -> None:
    """Runs one part after the other, each in a process group of its own, until one fails."""
    is_native = bool(os.environ.get("GRADSYNC_TEST_NATIVE_MPI"))
    if is_native:
        mpi_requests.DIRECT_RANKS = 0
        mpi_requests._PIECE_BYTES = 2**16
        mpi_reduction._NATIVE_ELEMENTS = 2**14
    comm: Any = gs.init_process_group("mpi")
    rank = comm.rank
    assert comm._backend._requests.is_direct is not is_native
    found: dict[str, object] = {}
    try:
        for part in parts:
            found[part] = run_part_anew(None, part, "numpy", options)
    except BaseException:
        found["failure"] = traceback.format_exc()
        raise
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], {"backend": "mpi"})

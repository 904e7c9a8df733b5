"""A rank on one of several machines: mpi_machine_rank.py FOLDER EPOCHS. Trains, and writes down what happens to it."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples"))

import gradsync as gs
from train_digits import Settings, train

STEPS_BEFORE_CUT = 20


def main(folder: Path, epochs: int) -> None:
    faulthandler.dump_traceback_later(35.0, file=(folder / f"{os.getpid()}.stacks").open("w"))
    comm = gs.init_process_group(collective_timeout_seconds=60.0)
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == STEPS_BEFORE_CUT:
            write(folder / f"{comm.rank}.started", {"host": socket.gethostname(), "backend": comm.backend})

    try:
        result = train(comm, Settings(epochs=epochs, quiet=True), count)
    except gs.GradsyncError as error:
        found = {"error": type(error).__name__, "text": str(error), "at": time.time()}
        write(folder / f"{comm.rank}.ended", {"host": socket.gethostname(), **found})
        raise
    digest = hashlib.sha256(b"".join(array.tobytes() for array in result.parameters.values())).hexdigest()
    write(folder / f"{comm.rank}.ended", {"host": socket.gethostname(), "digest": digest})


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes a file that is there only when it is whole."""
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""A rank on one of several machines that communicates over the stand-in for NCCL: nccl_machine_rank.py FOLDER HOST.

HOST is an address of the machine with rank 0, where the stand-in listens; NCCL itself finds the interface.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "fake_cupy"))


def main(folder: Path, host: str) -> None:
    """Leaves what it has found in a file of its own."""
    if socket.gethostname() == "host0":
        os.environ["FAKE_CUPY_ADDRESS"] = host
    os.environ.setdefault("FAKE_CUPY_DEVICES", "2")
    import gradsync as gs

    with gs.init_process_group("nccl") as comm:
        import cupy

        reduced = comm.all_reduce(cupy.full(5, comm.rank + 1.0))
        found = {
            "host": socket.gethostname(),
            "sum": reduced.get().tolist(),
            "objects": comm.objects.all_gather({"rank": comm.rank}),
        }
        comm.barrier()
        cupy.cuda.runtime.deviceSynchronize()
        (folder / f"{comm.rank}.part").write_text(json.dumps(found))
        (folder / f"{comm.rank}.part").rename(folder / f"{comm.rank}.ended")
        comm.objects.all_gather(None)  # rank 0 serves the stand-in: it leaves last


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

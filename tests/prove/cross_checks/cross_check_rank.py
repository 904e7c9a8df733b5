"""One rank of the cross-check: `python cross_check_rank.py SYSTEM FOLDER`, under the launcher of that system.

It runs all cases that the system has, and leaves this rank's results in FOLDER/RANK.npz.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from cross_check_cases import OBJECTS, all_cases, input_of, is_offered


def connect(system: str) -> Any:
    """Meets the other ranks by the means of a system. Each needs libraries of its own."""
    if system in ("mpich", "openmpi"):
        from cross_check_mpi import Mpi

        return Mpi()
    if system == "gloo":
        from cross_check_gloo import Gloo

        return Gloo()
    from cross_check_gradsync import Gradsync

    return Gradsync(asynchronous=system == "gradsync, asynchronous")


def results_of(peer: Any, system: str) -> dict[str, np.ndarray]:
    """Returns what this rank gets, by the case's name; objects as their JSON."""
    results = {}
    for case in all_cases():
        if not is_offered(case, system):
            continue
        try:
            result = peer.run(case, input_of(case, peer.rank, peer.world_size))
        except Exception as error:
            raise RuntimeError(f"{system}, rank {peer.rank}: {case.name}: {error}") from error
        if result is not None:
            is_object = case.collective in OBJECTS
            results[case.name] = np.frombuffer(json.dumps(result).encode(), np.uint8) if is_object else result
    return results


def main() -> None:
    """Runs this rank to its end."""
    system, folder = sys.argv[1:]
    peer = connect(system)
    try:
        np.savez(Path(folder) / f"{peer.rank}.npz", **results_of(peer, system))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # An orderly exit would wait, inside the library, for a rank that is not coming.
        os._exit(1)
    peer.close()


if __name__ == "__main__":
    main()

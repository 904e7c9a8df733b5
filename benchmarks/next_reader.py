"""What the thread that reads costs a small all-reduce over shared memory: with the next room's client, and without.

    gradsync run -n 2 benchmarks/next_reader.py                       # heartbeats every 0.5 s
    gradsync run -n 2 benchmarks/next_reader.py --heartbeat 0.05

Both ranks have the client of today anyway. In every second block they have one of the next room beside it, connected to
a server in rank 0: so this is what the new thread costs in addition, which is more than it costs in its place. The
ratio of the medians, and of the 99th percentiles, is to be at most 1.05; a run of a quiet machine counts.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import numpy as np

import gradsync as gs
from gradsync._next.rendezvous import liveness
from gradsync._next.rendezvous.client import RendezvousClient
from gradsync._next.rendezvous.server import RendezvousServer

BLOCKS, CALLS = 14, 20_000
SECRET = b"of a benchmark, and nobody's own"


@contextlib.contextmanager
def next_client(comm: gs.Communicator) -> Iterator[None]:
    """Has a client of the next room while the block runs."""
    with contextlib.ExitStack() as stack:
        address = ""
        if comm.rank == 0:
            address = stack.enter_context(RendezvousServer(comm.world_size, secret=SECRET)).address
        address = comm.objects.broadcast(address)
        ranks = {"rank": comm.rank, "world_size": comm.world_size}
        stack.enter_context(RendezvousClient.connect(address, secret=SECRET, **ranks))
        yield
        comm.barrier()


def block(comm: gs.Communicator, values: np.ndarray) -> tuple[float, float]:
    """Returns the median and the 99th percentile of one call, in microseconds."""
    took = np.empty(CALLS)
    comm.barrier()
    for number in range(CALLS):
        began = time.perf_counter()
        comm.all_reduce(values)
        took[number] = time.perf_counter() - began
    return float(np.median(took)) * 1e6, float(np.percentile(took, 99)) * 1e6


def main() -> None:
    """Measures alternating blocks and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heartbeat", type=float, default=0.5, help="seconds between two of the new client's [0.5]")
    liveness.HEARTBEAT_SECONDS = parser.parse_args().heartbeat
    with gs.init_process_group("shm") as comm:
        values = np.zeros(1024, np.float32)
        block(comm, values)
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(BLOCKS):
            has_client = bool(number % 2)
            with next_client(comm) if has_client else contextlib.nullcontext():
                found[has_client].append(block(comm, values))
        if comm.rank == 0:
            for index, name in enumerate(("median", "99th percentile")):
                without, beside = (np.median([times[index] for times in found[key]]) for key in (False, True))
                print(f"{name}: {without:.2f} us without, {beside:.2f} us with it, ratio {beside / without:.3f}")


if __name__ == "__main__":
    main()

"""Makes, uses and closes groups and process groups again and again, and counts what stays: nothing may.

    python tests/prove/soak/leaks.py                # 1,000 cycles of each, on 2 ranks over shared memory, and on local

The tests run it in a shortened form.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import gradsync as gs
from belongings import Belongings

WARM_UP_CYCLES = 20  # what is made once, on first use, is no leak
ENDED_WITHIN_SECONDS = 30.0
LARGEST_GROWTH_BYTES = 6 * 2**20  # of 1,000 cycles: a leak of one page in each would be 4 MB


def grown(cycle: Callable[[int], Any], cycles: int) -> list[str]:
    """Runs cycles, and returns in words what there is more of, or less, than before."""
    for number in range(WARM_UP_CYCLES):
        cycle(number)
    await_idle_threads()
    before = Belongings.now()
    for number in range(cycles):
        cycle(WARM_UP_CYCLES + number)
    await_idle_threads()
    after = Belongings.now()
    found = [
        f"{name}: {was} before, {now} after {cycles} cycles"
        for name, was, now in zip(Belongings._fields, before.without_memory(), after.without_memory(), strict=False)
        if was != now
    ]
    growth = after.resident_bytes - before.resident_bytes
    if growth > LARGEST_GROWTH_BYTES:
        found.append(f"memory: {growth / 2**20:.1f} MiB more after {cycles} cycles")
    return found


def await_idle_threads() -> None:
    """Waits for the threads of collectives in the background, which end a second after the last one."""
    deadline = time.monotonic() + ENDED_WITHIN_SECONDS
    for thread in threading.enumerate():
        if thread.name == "gradsync-collectives":
            thread.join(max(deadline - time.monotonic(), 0.0))


def use(comm: Any) -> None:
    array = np.ones(5)
    comm.all_reduce(array)
    assert (array == comm.world_size).all()


def groups(comm: Any, cycles: int) -> list[str]:
    """Groups of the world, by new_group and by split, one in the other; used, at once and in the background."""

    def cycle(number: int) -> None:
        group = comm.new_group(range(comm.world_size))
        use(group)
        if number % 10 == 0:
            inner = group.split(0, key=-group.rank)
            assert inner.asynchronous.all_gather(np.ones(3)).result(60.0).size == 3 * inner.world_size
            assert inner.objects.all_gather(inner.rank) == list(range(inner.world_size))
            inner.close()
        group.close()

    return grown(cycle, cycles)


def abandoned_groups(comm: Any, cycles: int) -> list[str]:
    """Groups that nobody closes, within process groups that are destroyed: destroying closes them."""
    gs.destroy_process_group()

    def cycle(number: int) -> None:
        world = gs.init_process_group(comm.backend)
        kept = [world.new_group(range(world.world_size)), world.split(0)]
        use(kept[number % 2])
        gs.destroy_process_group()
        assert all(group.closed for group in kept)

    found = grown(cycle, cycles)
    gs.init_process_group(comm.backend)
    return found


def process_groups(comm: Any, cycles: int) -> list[str]:
    """Process groups, each a new generation."""
    gs.destroy_process_group()

    def cycle(number: int) -> None:
        use(gs.init_process_group(comm.backend))
        gs.destroy_process_group()

    found = grown(cycle, cycles)
    gs.init_process_group(comm.backend)
    return found


KINDS: dict[str, Callable[[Any, int], list[str]]] = {
    "groups": groups,
    "process groups": process_groups,
    "abandoned groups": abandoned_groups,
}


def on_rank(kind: str, backend: str, cycles: int) -> list[str]:
    with gs.init_process_group(backend) as comm:
        return KINDS[kind](comm, cycles)


def main() -> int:
    parser = argparse.ArgumentParser(description="Counts what stays of groups and process groups that are closed.")
    parser.add_argument("--cycles", type=int, default=1000)
    options = parser.parse_args()
    faulty = False
    for backend, ranks in (("local", 1), ("shm", 2)):
        for kind in KINDS:
            began = time.monotonic()
            by_rank = gs.launch(functools.partial(on_rank, kind, backend, options.cycles), nprocs=ranks)
            faults = [f"rank {rank}: {fault}" for rank, found in enumerate(by_rank) for fault in found]
            verdict = "; ".join(faults) or "nothing stays"
            print(
                f"{options.cycles} cycles of {kind} on {backend}: {verdict}, {time.monotonic() - began:.1f} s",
                flush=True,
            )
            faulty |= bool(faults)
    return int(faulty)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Contenders take turns in blocks, in one run, so that changes of the machine's speed affect all of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from measurement import slowest_rank
from peers.crew import Crew, CrewFailed
from peers.workload import BUSY, Workload

_PR_SET_PDEATHSIG = 1

# Asks the kernel to kill it when the benchmark dies: nothing else would end it.
_BUSY = f"""\
import ctypes
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
while True: pass"""


@dataclass(frozen=True)
class Block:
    """Rounds of one contender: one after the other, or in turns with the others of its system.

    Attributes:
        contender: its name.
        state: of the cores.
        seconds: of each round, its slowest rank.
    """

    contender: str
    state: str
    seconds: list[float]


def measure(workload: Workload, pairs: Mapping[str, Crew], block_count: int, order: random.Random) -> list[Block]:
    """Times a workload with all contenders that the pairs offer.

    Args:
        workload: what to time.
        pairs: by system.
        block_count: how many blocks of each contender.
        order: shuffles the contenders before each turn.

    Raises:
        CrewFailed: a rank failed, or a contender's result was wrong.
    """
    contenders: list[str] = []
    for system, pair in pairs.items():
        expected = {name for name, of in workload.contenders.items() if of == system}
        if expected:
            contenders += _prepare(pair, workload, expected)
    blocks = []
    for _ in range(block_count):
        for state in workload.states:
            with busy_processes(_usable_cores() if state == BUSY else 0):
                shuffled = order.sample(contenders, len(contenders))
                for together in [shuffled] if workload.settings else [[name] for name in shuffled]:
                    blocks += _blocks(pairs, workload, together, state)
    for pair in pairs.values():
        pair.ask("release")
    return blocks


def _blocks(pairs: Mapping[str, Crew], workload: Workload, contenders: list[str], state: str) -> list[Block]:
    """Times a block of each of some contenders of one system, in turns."""
    by_rank = pairs[workload.contenders[contenders[0]]].ask("time", contenders)
    return [Block(name, state, slowest_rank([times[name] for times in by_rank])) for name in contenders]


def _prepare(pair: Crew, workload: Workload, expected: set[str]) -> list[str]:
    """Returns the contenders of the pair that it offers."""
    by_rank = pair.ask("prepare", workload)
    for offered in by_rank:
        if set(offered) != expected or offered != by_rank[0]:
            raise CrewFailed(f"{pair.system}: expected the contenders {sorted(expected)}, got {by_rank}")
    return [name for name, is_offered in by_rank[0].items() if is_offered]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keeps so many processes busy within the context."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", _BUSY]))  # noqa: PERF401
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))

"""A pair of ranks of one system: the crew that the comparisons ask."""

from __future__ import annotations

from peers.collectives import RANKS
from peers.crew import Crew, CrewFailed
from peers.systems import BENCHMARKS, starts

PairFailed = CrewFailed


class Pair(Crew):
    """Two ranks of one system, which sleep between requests. A context: they end with it.

    Args:
        system: one of SYSTEMS.
        folder: private to this run, with a path short enough for a socket in it.

    Raises:
        PairFailed: they did not start.
    """

    def __init__(self, system: str, folder: str) -> None:
        super().__init__(system, folder, lambda address: starts(system, address), RANKS, working_folder=BENCHMARKS)

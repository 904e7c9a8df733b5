"""What every collective over shared memory works with."""

from __future__ import annotations

from typing import NamedTuple

from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.rings import SharedRings
from gradsync.diagnostics import FlightRecorder


class Workplace(NamedTuple):
    """One rank's place in a communicator: who it is, where it meets the others, the memory, how much goes at a time.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        barrier: where the ranks meet.
        rings: the shared memory.
        small_bytes: up to this size arrays are all-reduced all at once.
        chunk_bytes: of a larger list that is all-reduced, what is published between two rounds of the barrier.
        round_bytes: how much of an array that is moved, or reduced on one rank, goes through a ring at a time.
        share_bytes: likewise, of each of the parts of an array that are for different ranks.
        recorder: the communicator's.
        finder: takes note of what is not finite, where that is looked for.
    """

    rank: int
    world_size: int
    barrier: SharedBarrier
    rings: SharedRings
    small_bytes: int
    chunk_bytes: int
    round_bytes: int
    share_bytes: int
    recorder: FlightRecorder
    finder: NonFiniteFinder

    def peers(self) -> list[int]:
        """Returns the other ranks, the next one first: not all of them read the same ring at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

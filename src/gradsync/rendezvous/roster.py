"""The members of one generation: who joined, who left in good order, who died, and whether all have met.

Part of the server's core, without I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradsync.errors import MAX_NAMED_RANKS
from gradsync.rendezvous.waiting import Failure

JOINING_PHASE = "joining"
RUNNING_PHASE = "running"
LEFT_PHASE = "left"


class MemberState(enum.Enum):
    """Where a member is in its life."""

    PRESENT = enum.auto()
    LEFT = enum.auto()
    DEAD = enum.auto()


@dataclass(slots=True)
class Member:
    """One rank of the generation."""

    connection: int
    state: MemberState = MemberState.PRESENT
    pid: int | None = None  # once it has introduced itself
    host: str = ""  # where that is not the server's
    positions: dict[str, int] = field(default_factory=dict)  # by group: how many collectives it has begun

    @property
    def local_pid(self) -> int | None:
        """Its pid where the server can look at that process, else None."""
        return None if self.host else self.pid


class Roster:
    """The members of one generation, by rank.

    Args:
        world_size: how many ranks the generation needs.
        called: what messages call a member.

    Attributes:
        phase: where the members are: joining until all have met, then running.
    """

    def __init__(self, world_size: int, called: str = "rank") -> None:
        self.world_size = world_size
        self.called = called
        self.phase = JOINING_PHASE
        self.members: dict[int, Member] = {}
        self._gave_up: dict[int, None] = {}  # ranks that waited to join and stopped waiting, in that order
        self._departures: list[int] = []  # ranks that left in good order, the latest last
        self._present_count = 0

    def label(self, rank: int) -> str:
        """Returns the rank as messages name it."""
        return f"{self.called} {rank}/{self.world_size}"

    def process(self, rank: int) -> str:
        """Returns "pid 123" or "pid 123 on node7", or "" where it is not known."""
        member = self.members.get(rank)
        if member is None or member.pid is None:
            return ""
        return f"pid {member.pid} on {member.host}" if member.host else f"pid {member.pid}"

    def name(self, rank: int) -> str:
        """Returns the rank as failures name it, e.g. "rank 1/4 (pid 123)"."""
        process = self.process(rank)
        return f"{self.label(rank)} ({process})" if process else self.label(rank)

    def seat(self, rank: int, connection: int) -> None:
        """Adds a rank that joins."""
        self.members[rank] = Member(connection)
        self._present_count += 1
        self._gave_up.pop(rank, None)

    def give_up(self, rank: int) -> None:
        """Takes a joining rank out again; it may come back."""
        self._end_presence(self.members.pop(rank))
        self._gave_up[rank] = None

    def is_complete(self) -> bool:
        """Returns whether every rank has joined."""
        return len(self.members) == self.world_size

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that never joined; when there are none, those that joined and gave up."""
        absent = tuple(rank for rank in range(self.world_size) if rank not in self.members)
        return tuple(rank for rank in absent if rank not in self._gave_up) or absent

    def present(self) -> list[tuple[int, Member]]:
        """Returns the members still connected, in ascending order of rank."""
        return [(r, m) for r, m in sorted(self.members.items()) if m.state is MemberState.PRESENT]

    def is_present(self, rank: int) -> bool:
        """Returns whether a member is still connected."""
        return self.members[rank].state is MemberState.PRESENT

    def is_deserted(self) -> bool:
        """Returns whether no member is connected any more."""
        return not self._present_count

    def mark_left(self, rank: int) -> None:
        """Records an orderly goodbye."""
        self._end_presence(self.members[rank])
        self.members[rank].state = MemberState.LEFT
        self._departures.append(rank)

    def mark_dead(self, rank: int, connection: int) -> Member:
        """Records a death and returns the member; one that was waiting to join becomes a member by it."""
        member = self.members.get(rank)
        if member is None:
            member = self.members[rank] = Member(connection)
        else:
            self._end_presence(member)
        member.state = MemberState.DEAD
        return member

    @property
    def any_left(self) -> bool:
        """Whether any rank has left in good order."""
        return bool(self._departures)

    def first_left(self, ranks: Iterable[int]) -> int | None:
        """Returns the first of these ranks that has left, or None."""
        if not self._departures:
            return None
        return next((rank for rank in ranks if self.members[rank].state is MemberState.LEFT), None)

    def last_to_leave(self) -> int:
        """Returns the rank that said goodbye last."""
        return self._departures[-1]

    def one_remains(self) -> bool:
        """Returns whether all ranks but one have left, of two or more."""
        return self.world_size > 1 and len(self._departures) >= self.world_size - 1

    def left_failure(self, rank: int, need: str) -> Failure:
        """Returns the failure of something that still needs a rank that has left."""
        return Failure(rank, LEFT_PHASE, f"{self.label(rank)} left (an orderly close), but {need}")

    def whereabouts(self, ranks: Iterable[int]) -> str:
        """Describes where these ranks are, e.g. "rank 1 (in 'forward'), rank 2 (not joined)"."""
        ranks = list(ranks)
        named = ", ".join(f"{self.called} {rank} ({self._place_of(rank)})" for rank in ranks[:MAX_NAMED_RANKS])
        more = len(ranks) - MAX_NAMED_RANKS
        return f"{named} and {more} more" if more > 0 else named

    def _end_presence(self, member: Member) -> None:
        self._present_count -= member.state is MemberState.PRESENT

    def _place_of(self, rank: int) -> str:
        member = self.members.get(rank)
        if member is None:
            return "gave up joining" if rank in self._gave_up else "not joined"
        if member.state is MemberState.LEFT:
            return "left"
        return f"in {self.phase!r}"

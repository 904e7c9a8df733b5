"""The roster: the members of one generation, their states, and the texts of their failures.

This module is part of the server's core, without I/O.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from gradsync.errors import MAX_NAMED_RANKS
from gradsync.rendezvous.frames import (
    DEATH,
    MAX_FAILURE_BYTES,
    SILENCE,
    FrameType,
    Send,
    clip_text,
)
from gradsync.rendezvous.liveness import ProcessState

JOINING_PHASE = "joining"
RUNNING_PHASE = "running"
LEFT_PHASE = "left"
_MISSING_RANK_BYTES = 3  # the largest number of bytes for one rank in an encoded list
_MAX_RANKS_BESIDE_TEXT = 12 * 1024  # a failure that lists this number of ranks still has room for a text of 12 KiB

# Ranks in ascending order. All ranks together are a `range`, which is compared, hashed and searched in constant time.
# With a tuple of n ranks, each request would cost the server n steps.
Members = tuple[int, ...] | range


def members_of(ranks: list[int] | None, world_size: int) -> Members | None:
    """Returns the members that a request names; None if the request names no rank, or a rank that does not exist.

    Args:
        ranks: distinct, in ascending order; None is all ranks.
        world_size: the number of ranks.
    """
    if ranks is None or (len(ranks) == world_size and ranks[-1] == world_size - 1):
        return range(world_size)
    return tuple(ranks) if ranks and ranks[-1] < world_size else None


def list_members(members: Iterable[int]) -> str:
    """Returns the members as text, e.g. "(0, 1, 2)"."""
    return str(tuple(members))


def never_arrived(absent: Iterable[int], cancelled: Container[int]) -> tuple[int, ...]:
    """Returns the absent ranks that never arrived; if all absent ranks arrived and cancelled, returns all of them."""
    absent = tuple(absent)
    return tuple(rank for rank in absent if rank not in cancelled) or absent


def failure_room_bytes(missing_ranks: int) -> int:
    """Returns the space for a failure's text in a frame that also lists `missing_ranks` ranks."""
    return MAX_FAILURE_BYTES - _MISSING_RANK_BYTES * min(missing_ranks, _MAX_RANKS_BESIDE_TEXT)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a request or of a whole generation.

    Attributes:
        rank: the rank that caused the failure; one of the ranks if several ranks caused the failure.
        phase: the phase of the rank that caused the failure: joining, running or left.
        text: the full description.
        kind: DEATH, STUCK or SILENCE, see `frames`.
        missing: the ranks that have not arrived at a stuck collective, as far as they are known.
    """

    rank: int
    phase: str
    text: str
    kind: int = DEATH
    missing: tuple[int, ...] = ()

    def send(self, connection: int, sequence: int) -> Send:
        """Returns the FAILED message: the answer to a request or, with sequence 0, a push to a member."""
        text = clip_text(self.text, failure_room_bytes(len(self.missing)))
        fields = sequence, self.kind, self.rank, self.phase, self.missing, text
        return Send(connection, FrameType.FAILED, fields)


@dataclass(eq=False, slots=True)
class Member:
    """One rank of the generation.

    Attributes:
        connection: the number of the rank's connection.
        pid: the rank's process id; None if unknown.
        host: the name of the rank's machine, "another machine" if it has no name; "" on the server's machine.
        is_present: whether the rank is connected; False once it has left, or its connection has ended.
        positions: the number of collectives that the rank has begun, by group.
    """

    connection: int
    pid: int | None
    host: str
    is_present: bool = True
    positions: dict[str, int] = field(default_factory=dict)

    @property
    def local_pid(self) -> int | None:
        """The process id if the rank runs on the server's machine, else None."""
        return None if self.host else self.pid


class Roster:
    """The members of one generation, by rank.

    Args:
        world_size: the number of launched ranks.

    Attributes:
        phase: "joining" until the generation forms, then "running".
        members: the ranks that have joined, also after they have left or failed.
        left: the ranks that have left, in the order of leaving (the keys of a dict).
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.phase = JOINING_PHASE
        self.members: dict[int, Member] = {}
        self._cancelled: set[int] = set()  # ranks that have cancelled their join
        self.left: dict[int, None] = {}

    def label(self, rank: int) -> str:
        """Returns the rank's name without its process, e.g. "rank 1/4"."""
        return f"rank {rank}/{self.world_size}"

    def process(self, rank: int) -> str:
        """Returns "pid 123" or "pid 123 on node7"; "" if the process is not known."""
        member = self.members.get(rank)
        if member is None or member.pid is None:
            return ""
        return f"pid {member.pid} on {member.host}" if member.host else f"pid {member.pid}"

    def name(self, rank: int) -> str:
        """Returns the rank's name with its process, e.g. "rank 1/4 (pid 123)"."""
        process = self.process(rank)
        return f"{self.label(rank)} ({process})" if process else self.label(rank)

    # Joining.

    def add(self, rank: int, member: Member) -> None:
        """Adds a rank that joins."""
        self.members[rank] = member
        self._cancelled.discard(rank)

    def cancel(self, rank: int) -> None:
        """Removes a joining rank, unless the rank has failed. The rank may join again."""
        if self.members[rank].is_present:
            del self.members[rank]
            self._cancelled.add(rank)

    def is_complete(self) -> bool:
        """Whether every launched rank has joined."""
        return len(self.members) == self.world_size

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that have never joined; if there are none, the ranks that cancelled their join."""
        return never_arrived((rank for rank in range(self.world_size) if rank not in self.members), self._cancelled)

    # Who is connected.

    def present(self) -> list[tuple[int, Member]]:
        """Returns the connected members, in ascending order of rank."""
        return [(r, m) for r, m in sorted(self.members.items()) if m.is_present]

    def is_empty(self) -> bool:
        """Whether no member is connected any more."""
        return not any(member.is_present for member in self.members.values())

    def first_left(self, ranks: Iterable[int]) -> int | None:
        """Returns the first of these ranks that has left, or None."""
        return next((rank for rank in ranks if rank in self.left), None) if self.left else None

    def one_remains(self) -> bool:
        """Whether all ranks, or all ranks but one, have left a world of two or more ranks."""
        return self.world_size > 1 and len(self.left) >= self.world_size - 1

    # Sentences.

    def states_text(self, ranks: Iterable[int]) -> str:
        """Returns the states of these ranks as text, e.g. "rank 1 (running), rank 2 (not joined)"."""
        ranks = list(ranks)
        named = ", ".join(f"rank {rank} ({self._state_text(rank)})" for rank in ranks[:MAX_NAMED_RANKS])
        more = len(ranks) - MAX_NAMED_RANKS
        return f"{named} and {more} more" if more > 0 else named

    def incomplete_text(self) -> str:
        """Returns the notice about the ranks that have not joined yet."""
        where = self.states_text(self.missing_ranks())
        return f"{len(self.members)} of {self.world_size} ranks have joined; waiting for {where}"

    def left_failure(self, rank: int, need: str) -> Failure:
        """Returns the failure of a request that still needs a rank that has left."""
        return Failure(rank, LEFT_PHASE, f"{self.label(rank)} left (an orderly close), but {need}")

    def death(self, rank: int, cause: str) -> Failure:
        """Returns the failure of a generation in which a rank's connection ended unexpectedly."""
        lost = f"its control connection ended unexpectedly ({cause})"
        return Failure(rank, self.phase, f"{self.name(rank)} died{self._while_joining()}: {lost}")

    def ended(self, rank: int, how: str) -> Failure:
        """Returns the failure of a generation that cannot form, because the process of a missing rank has ended."""
        return Failure(rank, JOINING_PHASE, f"{self.label(rank)} {how} without joining; the other ranks waited for it")

    def stopped_before_joining(self, rank: int, pid: int, state: ProcessState, seconds: float) -> Failure:
        """Returns the failure of a generation that cannot form, because a missing rank's process is stopped."""
        evidence = f"no sign of life for {seconds:.1f} s, while other ranks wait for it to join"
        text = state.lost_text(f"{self.label(rank)} (pid {pid})", evidence, when=" before it joined")
        return Failure(rank, JOINING_PHASE, text, SILENCE)

    def reported(self, rank: int, reason: str, culprit: int | None) -> Failure:
        """Returns the failure that a rank has reported. It names the culprit, or this rank if there is no culprit."""
        text = f"{self.name(rank)} failed{self._while_joining()}: {reason}"
        return Failure(rank if culprit is None or culprit not in self.members else culprit, self.phase, text)

    def silence(self, rank: int, state: ProcessState, evidence: str) -> Failure:
        """Returns the failure of a generation whose silent rank was found stopped (SIGSTOP), gone or unreachable."""
        text = state.lost_text(self.name(rank), evidence, when=self._while_joining())
        return Failure(rank, self.phase, text, SILENCE)

    def _while_joining(self) -> str:
        return " while joining" if self.phase == JOINING_PHASE else ""

    def _state_text(self, rank: int) -> str:
        member = self.members.get(rank)
        if member is None:
            return "stopped waiting to join" if rank in self._cancelled else "not joined"
        return "left" if rank in self.left else self.phase


def join_refusal(expected_size: int, rank: int, world_size: int) -> str:
    """Returns the reason to refuse a join, with the expected and the given value; "" if the join is accepted."""
    if world_size != expected_size:
        return f"the server expects world_size {expected_size}, rank {rank} joined with world_size {world_size}"
    if rank >= expected_size:
        return f"the server expects ranks 0 to {expected_size - 1}, got rank {rank}"
    return ""

"""The members of one generation: who joined, who left, who failed; and the sentences in which others hear of them.

Part of the server's core, without I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradsync.errors import MAX_NAMED_RANKS
from gradsync.rendezvous.frames import (
    DEATH,
    MAX_FAILURE_BYTES,
    PROTOCOL_VERSION,
    SILENCE,
    STUCK,
    FrameType,
    Send,
    clip_text,
)
from gradsync.rendezvous.liveness import LostProcess, ProcessState

JOINING_PHASE = "joining"
RUNNING_PHASE = "running"
LEFT_PHASE = "left"
_MISSING_RANK_BYTES = 3  # of a rank in a list, at most
_MAX_RANKS_BESIDE_TEXT = 12 * 1024  # the frame has room for the rest beside what is left of the text

# Ranks in ascending order. All ranks together are a `range`: that is compared, hashed and searched at the cost of one
# rank; with a tuple each of n ranks that ask for the same would cost the server the time of n.
Members = tuple[int, ...] | range


def members_of(ranks: list[int] | None, world_size: int) -> Members | None:
    """Returns the members that a request names; None where there are none, or one that does not exist.

    Args:
        ranks: distinct, in ascending order; None for all.
        world_size: how many ranks there are.
    """
    if ranks is None or (len(ranks) == world_size and ranks[-1] == world_size - 1):
        return range(world_size)
    return tuple(ranks) if ranks and ranks[-1] < world_size else None


def list_members(members: Iterable[int]) -> str:
    """Returns them as messages show them, e.g. "(0, 1, 2)"."""
    return str(tuple(members))


def failure_room_bytes(missing_ranks: int) -> int:
    """Returns how long the text of a failure may be, so that it fits one frame beside so many missing ranks."""
    return MAX_FAILURE_BYTES - _MISSING_RANK_BYTES * min(missing_ranks, _MAX_RANKS_BESIDE_TEXT)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request, or a whole generation, cannot go on.

    Attributes:
        rank: the culprit, or one of them.
        phase: where it was: joining, running or left.
        text: the whole story.
        missing: of a stuck collective, the ranks that did not come, as far as they are known; None for anything else.
        is_silence: whether the culprit was found stopped, gone or out of reach.
    """

    rank: int
    phase: str
    text: str
    missing: tuple[int, ...] | None = None
    is_silence: bool = False

    def send(self, connection: int, sequence: int) -> Send:
        """Returns the message that says so, in answer to a request or (sequence 0) to a whole generation."""
        kind = STUCK if self.missing is not None else SILENCE if self.is_silence else DEATH
        missing = self.missing or ()
        text = clip_text(self.text, failure_room_bytes(len(missing)))
        return Send(connection, FrameType.FAILED, (sequence, kind, self.rank, self.phase, missing, text))


class MemberState(enum.Enum):
    """Where a member is in its life."""

    PRESENT = enum.auto()
    LEFT = enum.auto()
    FAILED = enum.auto()


@dataclass(eq=False, slots=True)
class Member:
    """One rank of the generation.

    Attributes:
        min_ranks: the least number of ranks of which it would form a generation; None where it waits for all.
        steps: how many it has completed, as it says.
        pid: once it has introduced itself.
        host: where that is not the server's.
        positions: by group: how many collectives it has begun.
    """

    connection: int
    state: MemberState = MemberState.PRESENT
    min_ranks: int | None = None
    steps: int = 0
    pid: int | None = None
    host: str = ""
    positions: dict[str, int] = field(default_factory=dict)

    @property
    def local_pid(self) -> int | None:
        """Its pid where the server can look at that process, else None."""
        return None if self.host else self.pid


class Roster:
    """The members of one generation, by rank.

    Args:
        world_size: how many ranks were launched.
        noun: what messages call a member.

    Attributes:
        phase: joining until all have met, then running.
        members: by rank: until all have met the number with which a rank was launched; a generation that forms of some
            ranks counts anew.
        by_launch_rank: the same members.
        unintroduced: those that have joined, and not said yet which process they are. They do so right behind.
    """

    def __init__(self, world_size: int, noun: str = "rank") -> None:
        self.world_size = world_size
        self.noun = noun
        self.phase = JOINING_PHASE
        self.members: dict[int, Member] = {}
        self.by_launch_rank: dict[int, Member] = {}
        self.unintroduced: set[int] = set()
        self._cancelled: dict[int, None] = {}  # ranks that waited to join and stopped waiting, in that order
        self._left: list[int] = []  # the latest last
        self._present_count = 0

    def label(self, rank: int) -> str:
        """Returns the rank as messages name it."""
        return f"{self.noun} {rank}/{self.world_size}"

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

    # Joining.

    def seat(self, rank: int, connection: int) -> None:
        """Adds a rank that joins."""
        self.members[rank] = self.by_launch_rank[rank] = Member(connection)
        self._present_count += 1
        self.unintroduced.add(rank)
        self._cancelled.pop(rank, None)

    def cancel(self, rank: int) -> None:
        """Takes a joining rank out again; it may come back. Nothing where it has failed."""
        if self.members[rank].state is MemberState.PRESENT:
            self._present_count -= 1
            self.unintroduced.discard(rank)
            del self.members[rank], self.by_launch_rank[rank]
            self._cancelled[rank] = None

    def is_complete(self) -> bool:
        """Returns whether every rank has come."""
        return len(self.members) == self.world_size and not self.unintroduced

    def form(self) -> None:
        """Begins to run with those that have joined, numbered anew in their order."""
        self.members = {rank: self.members[launched] for rank, launched in enumerate(sorted(self.members))}
        self.world_size = len(self.members)
        self.phase = RUNNING_PHASE

    def least_ranks(self) -> int | None:
        """Returns of how many ranks at least the members would form a generation; None where they wait for all."""
        return max((m.min_ranks for m in self.members.values() if m.min_ranks is not None), default=None)

    def most_advanced(self) -> int:
        """Returns the rank that has completed the most steps, the lowest of several."""
        return max(sorted(self.members), key=lambda rank: self.members[rank].steps)

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that have not come; when there are none, those that stopped waiting."""
        absent = tuple(rank for rank in range(self.world_size) if not self.has_come(rank))
        return tuple(rank for rank in absent if rank not in self._cancelled) or absent

    def has_come(self, rank: int) -> bool:
        """Returns whether a rank has joined and said which process it is: before that nobody would notice its end."""
        return rank in self.members and rank not in self.unintroduced

    # Who is there.

    def present(self) -> list[tuple[int, Member]]:
        """Returns the members still connected, in ascending order of rank."""
        return [(r, m) for r, m in sorted(self.members.items()) if m.state is MemberState.PRESENT]

    def is_present(self, rank: int) -> bool:
        """Returns whether a member is still connected."""
        return self.members[rank].state is MemberState.PRESENT

    def is_deserted(self) -> bool:
        """Returns whether no member is connected any more."""
        return not self._present_count

    def mark(self, rank: int, state: MemberState) -> None:
        """Records that a member has left or failed."""
        member = self.members[rank]
        self._present_count -= member.state is MemberState.PRESENT
        member.state = state
        if state is MemberState.LEFT:
            self._left.append(rank)

    @property
    def any_left(self) -> bool:
        """Whether any rank has left."""
        return bool(self._left)

    def has_left(self, rank: int) -> bool:
        """Returns whether a member has left."""
        return bool(self._left) and rank in self._left

    def first_left(self, ranks: Iterable[int]) -> int | None:
        """Returns the first of these ranks that has left, or None."""
        if not self._left:
            return None
        return next((rank for rank in ranks if self.members[rank].state is MemberState.LEFT), None)

    def last_to_leave(self) -> int:
        """Returns the rank that left last."""
        return self._left[-1]

    def one_remains(self) -> bool:
        """Returns whether all ranks but one have left, of two or more."""
        return self.world_size > 1 and len(self._left) >= self.world_size - 1

    # Sentences.

    def whereabouts(self, ranks: Iterable[int]) -> str:
        """Describes where these ranks are, e.g. "rank 1 (in 'running'), rank 2 (not joined)"."""
        ranks = list(ranks)
        named = ", ".join(f"{self.noun} {rank} ({self._place_of(rank)})" for rank in ranks[:MAX_NAMED_RANKS])
        more = len(ranks) - MAX_NAMED_RANKS
        return f"{named} and {more} more" if more > 0 else named

    def incomplete_text(self) -> str:
        """Returns the notice about the ranks that keep the others waiting."""
        where = self.whereabouts(self.missing_ranks())
        return f"{len(self.members)} of {self.world_size} {self.noun}s have joined; waiting for {where}"

    def left_failure(self, rank: int, need: str) -> Failure:
        """Returns the failure of something that still needs a rank that has left."""
        return Failure(rank, LEFT_PHASE, f"{self.label(rank)} left (an orderly close), but {need}")

    def death(self, rank: int, cause: str) -> Failure:
        """Returns the failure of a generation that lost a rank's connection."""
        lost = f"its control connection was lost without a goodbye ({cause})"
        return Failure(rank, self.phase, f"{self.name(rank)} died in phase {self.phase!r}: {lost}")

    def ended(self, rank: int, how: str) -> Failure:
        """Returns the failure of a generation that waits for a rank whose process has ended."""
        return Failure(rank, JOINING_PHASE, f"{self.label(rank)} {how} without joining: the others would wait in vain")

    def standstill(self, rank: int, pid: int, lost: LostProcess) -> Failure:
        """Returns the failure of a generation that waits for a rank whose process stands still."""
        evidence = f"found so for {lost.seconds:.1f} s, while others waited"
        text = lost.state.lost_text(f"{self.label(rank)} (pid {pid})", evidence, where=" before it joined")
        return Failure(rank, JOINING_PHASE, text, is_silence=True)

    def reported(self, rank: int, reason: str, culprit: int | None) -> Failure:
        """Returns the failure of a generation whose rank said that it failed, or that the culprit, another one, did."""
        text = f"{self.name(rank)} failed in phase {self.phase!r}: {reason}"
        return Failure(rank if culprit is None or culprit not in self.members else culprit, self.phase, text)

    def silence(self, rank: int, state: ProcessState, evidence: str) -> Failure:
        """Returns the failure of a generation with a rank that is silent and was found stopped, gone or unreachable."""
        text = state.lost_text(self.name(rank), evidence, where=f" in phase {self.phase!r}")
        return Failure(rank, self.phase, text, is_silence=True)

    def slow_text(self, rank: int, state: ProcessState, silent_seconds: float) -> str:
        """Returns the notice about a rank that is silent although nothing was found."""
        return state.slow_text(f"{self.name(rank)}, in phase {self.phase!r},", silent_seconds)

    def _place_of(self, rank: int) -> str:
        member = self.members.get(rank)
        if member is None:
            return "gave up joining" if rank in self._cancelled else "not joined"
        return "left" if member.state is MemberState.LEFT else f"in {self.phase!r}"


def join_refusal(expected_size: int, version: int, rank: int, world_size: int, noun: str) -> str:
    """Returns why a join cannot be accepted, with both values, or an empty text."""
    if version != PROTOCOL_VERSION:
        return (
            f"the server speaks protocol version {PROTOCOL_VERSION}, {noun} {rank} version {version}; "
            f"run the same version of gradsync on every {noun}"
        )
    if world_size != expected_size:
        return f"the server expects world_size {expected_size}, {noun} {rank} came with {world_size}"
    if rank >= expected_size:
        return f"the server expects {noun}s 0 to {expected_size - 1}, got {noun} {rank}"
    return ""

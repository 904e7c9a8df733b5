"""Where the ranks of one generation meet: barriers, and ids of groups.

Part of the server's core, without I/O. Each request method returns the messages to send now; one that cannot
be answered yet opens a wait, which a later request, a goodbye or its deadline ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gradsync.rendezvous.events import Send
from gradsync.rendezvous.members import Members, list_members
from gradsync.rendezvous.messages import REFUSED
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.scopes import is_under
from gradsync.rendezvous.waiting import Request, Wait, WaitTable

MAX_BARRIERS = 65_536
MAX_GROUP_IDS = 16_384


class Barrier:
    """One barrier, reusable: all go on when every rank has arrived.

    Args:
        name: its name.
        ranks: who takes part, ascending.
    """

    def __init__(self, name: str, ranks: Members) -> None:
        self.name = name
        self.ranks = ranks
        self.arrived: dict[int, Wait] = {}
        self._gave_up: set[int] = set()  # arrived, and stopped waiting

    def arrive(self, wait: Wait) -> bool:
        """Records an arrival; returns whether it was the last one."""
        self.arrived[wait.request.rank] = wait
        self._gave_up.discard(wait.request.rank)
        return len(self.arrived) == len(self.ranks)

    def withdraw(self, wait: Wait) -> None:
        """Takes an arrival back: the barrier goes on as if that rank had not come yet."""
        del self.arrived[wait.request.rank]
        self._gave_up.add(wait.request.rank)

    def absent_ranks(self) -> Iterator[int]:
        """Returns the ranks that do not wait in it now, one after the other."""
        return (rank for rank in self.ranks if rank not in self.arrived)

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that never came; when there are none, those that gave up."""
        absent = tuple(self.absent_ranks())
        return tuple(rank for rank in absent if rank not in self._gave_up) or absent

    def take_arrived(self) -> list[Wait]:
        """Ends the attempt: returns the waits of those who arrived, and forgets them."""
        waits = list(self.arrived.values())
        self.arrived.clear()
        self._gave_up.clear()
        return waits


class Barriers:
    """The barriers of a generation, by name and members."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._barriers: dict[tuple[str, Members], Barrier] = {}

    def arrive(self, request: Request, name: str, ranks: Members, timeout_ms: int) -> list[Send]:
        """Lets a rank arrive; the last one releases all."""
        barrier = self._barriers.get((name, ranks))
        if barrier is None:
            if len(self._barriers) >= MAX_BARRIERS:
                return [request.refuse(f"more than {MAX_BARRIERS} different barriers; reuse their names", REFUSED)]
            barrier = self._barriers[name, ranks] = Barrier(name, ranks)
        if request.rank in barrier.arrived:
            return [request.refuse(f"{self._roster.label(request.rank)} already waits in barrier {name!r}")]
        if barrier.arrive(self._waits.add(request, timeout_ms, barrier)):
            return self._release(barrier)
        left = self._roster.first_left(barrier.absent_ranks())
        return [] if left is None else self._fail(barrier, left)

    def forget(self, scope: str) -> None:
        """Drops the barriers under a name that nobody uses any more."""
        for name, ranks in [place for place in self._barriers if is_under(place[0], scope)]:
            del self._barriers[name, ranks]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the barriers that still need a rank which has left."""
        sends = []
        for barrier in self._barriers.values():
            if barrier.arrived and rank in barrier.ranks:
                sends += self._fail(barrier, rank)
        return sends

    def _release(self, barrier: Barrier) -> list[Send]:
        return [wait.request.reply() for wait in self._take(barrier)]

    def _fail(self, barrier: Barrier, left: int) -> list[Send]:
        failure = self._roster.left_failure(left, f"barrier {barrier.name!r} needs it")
        return [wait.request.fail(failure) for wait in self._take(barrier)]

    def _take(self, barrier: Barrier) -> list[Wait]:
        waits = barrier.take_arrived()
        for wait in waits:
            self._waits.close(wait)
        return waits


@dataclass(eq=False, slots=True)
class GroupId:
    """The id of one group. The value is a capability: it stays out of the repr."""

    group: str
    root: int
    ranks: Members
    value: bytes | None = field(default=None, repr=False)
    waits: list[Wait] = field(default_factory=list, repr=False)

    def withdraw(self, wait: Wait) -> None:
        """Forgets this wait."""
        self.waits.remove(wait)

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the root, which has not handed the id in."""
        return (self.root,)


class GroupIds:
    """The ids of a generation, one for each group: made by its root, given to its members only."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._ids: dict[str, GroupId] = {}

    def put(self, request: Request, group: str, root: int, ranks: Members, value: bytes) -> list[Send]:
        """Takes the id from the group's root and gives it to the members who wait."""
        found = self._find(request, group, root, ranks)
        if isinstance(found, Send):
            return [found]
        if request.rank != root:
            who = self._roster.label(request.rank)
            text = f"the id of group {group!r} comes from its root, rank {root}, not from {who}"
            return [request.refuse(text)]
        if found.value is not None:
            return [request.refuse(f"the id of group {group!r} was handed in before", REFUSED)]
        found.value = value
        waits, found.waits = found.waits, []
        for wait in waits:
            self._waits.close(wait)
        return [request.reply(), *(wait.request.reply(value) for wait in waits)]

    def get(self, request: Request, group: str, root: int, ranks: Members, timeout_ms: int) -> list[Send]:
        """Answers a member with the id, now or once the root has handed it in."""
        found = self._find(request, group, root, ranks)
        if isinstance(found, Send):
            return [found]
        if found.value is not None:
            return [request.reply(found.value)]
        if self._roster.first_left((root,)) is not None:
            return [self._fail(request, found)]
        found.waits.append(self._waits.add(request, timeout_ms, found))
        return []

    def forget(self, scope: str) -> None:
        """Drops the ids under a name that nobody uses any more."""
        for group in [group for group in self._ids if is_under(group, scope)]:
            del self._ids[group]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the waits for an id whose root has left without handing it in."""
        sends = []
        for entry in self._ids.values():
            if entry.root != rank or entry.value is not None:
                continue
            for wait in entry.waits:
                self._waits.close(wait)
                sends.append(self._fail(wait.request, entry))
            entry.waits = []
        return sends

    def _find(self, request: Request, group: str, root: int, ranks: Members) -> GroupId | Send:
        """Returns the group's entry, or the refusal of a request that does not fit it."""
        if request.rank not in ranks or root not in ranks:
            who = request.rank if request.rank not in ranks else root
            return request.refuse(
                f"{self._roster.label(who)} is not a member of group {group!r}, ranks {list_members(ranks)}"
            )
        entry = self._ids.get(group)
        if entry is None:
            if len(self._ids) >= MAX_GROUP_IDS:
                return request.refuse(f"more than {MAX_GROUP_IDS} groups in one generation", REFUSED)
            entry = self._ids[group] = GroupId(group, root, ranks)
        if (entry.root, entry.ranks) != (root, ranks):
            return request.refuse(
                f"group {group!r} has root {entry.root} and ranks {list_members(entry.ranks)}, "
                f"{self._roster.label(request.rank)} asked with root {root} and ranks {list_members(ranks)}"
            )
        return entry

    def _fail(self, request: Request, entry: GroupId) -> Send:
        need = f"group {entry.group!r} needs the id that it makes"
        return request.fail(self._roster.left_failure(entry.root, need))

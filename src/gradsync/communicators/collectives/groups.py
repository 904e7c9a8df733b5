"""Groups: communicators of some of a communicator's ranks.

A group is a communicator like any other, over the same backend. What all groups of one world share is in `Family`:
their names, and who is to be closed with the world. The backends make the groups, in `_connect_group`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, cast

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import agreement_on, digest_of
from gradsync.communicators.collective_call import CollectiveBase, CollectiveCall
from gradsync.communicators.collectives.group_meeting import meet_members
from gradsync.communicators.collectives.non_member import NonMember
from gradsync.communicators.verdicts import NEWS_SECONDS, await_news
from gradsync.errors import (
    BackendUnavailable,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    RankFailed,
    describe,
)
from gradsync.futures import check_may_call, pending
from gradsync.machine import machine_identity

if TYPE_CHECKING:
    from gradsync.communicators.base import Communicator
    from gradsync.rendezvous.client import RendezvousClient

NO_COLOR = -1  # what _split_group is told of a rank that joins no group
_LISTED_CHARACTERS = 40  # of a group's members in its name


class Family:
    """A world's communicator and all that were made from it.

    Args:
        name: the world's.

    Attributes:
        local_group: the ranks of this machine, where comm.py was asked for them.
        was_aborted: whether this rank has aborted one of them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.local_group: Communicator | None = None
        self.was_aborted = False
        self._counts: dict[str, int] = {}
        self._communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._told: set[str] = set()

    def new_name(self, what: str) -> str:
        """Returns e.g. "world/0,2#1", the same on all ranks that have asked for `what` equally often."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{self.name}/{what}#{count}"

    def add(self, communicator: Communicator) -> None:
        """Takes a communicator in, for as long as somebody holds it."""
        communicator.family = self
        self._communicators.add(communicator)

    def note_told(self, error: BaseException) -> None:
        """Notes that a call of one of them has raised this failure: the server's verdict ends them all."""
        self._told.add(str(error))

    def told(self) -> frozenset[str]:
        """Returns the texts of the failures that a call of one of them has raised."""
        return frozenset(self._told)

    def close(self) -> None:
        """Closes all that were taken in; raises the first error that none has raised yet, when all are closed."""
        self.local_group = None
        errors = []
        for communicator in list(self._communicators):
            try:
                communicator.close()
            except GradsyncError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Groups(CollectiveBase):
    """The methods that make groups."""

    _client: RendezvousClient | None = None  # this rank's connection to the rendezvous server, of this group
    _timeout_seconds: float  # how long a collective waits for a rank; where there is a client

    @cached_property
    def family(self) -> Family:
        """The communicators that were made from the same world."""
        return Family(self.recorder.group)

    def new_group(self, ranks: Iterable[int]) -> Communicator | NonMember:
        """Makes a group of some of these ranks, which are numbered in ascending order there.

        Only the members need to call it; all with the same ranks, and groups with common members in the same order.
        A group is closed with the process group at the latest. Collectives of groups with common members must be called
        in one order by all these.

            group = comm.new_group([0, 2])
            if group:
                group.all_reduce(array)

        Args:
            ranks: the members, as this communicator numbers them, in any order.

        Returns:
            The group; a NonMember, which is false and not None, on a rank that is not in it.

        Raises:
            InvalidArgument: no ranks, one twice, or one outside this communicator.
            RendezvousTimeout: a member did not come before the deadline of this communicator's collectives; the text
                names those that are missing.
            RankFailed, BackendUnavailable, CommunicatorClosed, NcclError: it cannot be made. A rank that fails while it
                makes a group fails for all ranks; aborting this communicator ends the wait for the members.
        """
        members = self._checked_members(ranks)
        if pending:
            check_may_call(self.label, "new_group")
        self.lifetime.check_usable("new_group")
        if self.rank not in members:
            return NonMember(self.label, f"the group of ranks {self._listed(members)}")
        name = self._new_name(members)
        with self._telling_failures("new_group"):
            self._meet_members("new_group", members, name)
            return self._taken_in(self._connect_group(members, name))

    def split(self, color: int | None, key: int = 0) -> Communicator | NonMember:
        """Makes a group of the ranks of each color.

        Every rank must call it.

        Args:
            color: any integer of 64 bits; None joins no group.
            key: the ranks of a group are numbered by it, those with the same key by their rank here.

        Returns:
            The group of this rank's color; a NonMember, which is false and not None, where that is None.

        Raises:
            InvalidArgument: color or key is no integer of 64 bits.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
            RendezvousTimeout, BackendUnavailable: as for new_group.
        """
        agreement = agreement_on("split", (), None, "")
        number = 0 if color is None else self._checked_word("color", color)
        mine = [0 if color is None else 1, number, self._checked_word("key", key)]
        call = CollectiveCall("split", agreement, lambda _launch: self._share_numbers(mine, agreement))
        shared: list[list[int]] = self._run(call, None)
        colors = list(dict.fromkeys([number for has_color, number, _ in shared if has_color]))
        if color is None:
            with self._telling_failures("split"):
                self._split_group(NO_COLOR, 0, (), "")
            return NonMember(self.label, "any group of a split in which its color was None")
        same = [rank for rank, (has_color, number, _) in enumerate(shared) if has_color and number == color]
        members = tuple(sorted(same, key=lambda rank: (shared[rank][2], rank)))
        name = self._new_name(members)
        with self._telling_failures("split"):
            self._meet_members("split", members, name)
            group = self._split_group(colors.index(color), members.index(self.rank), members, name)
        return self._taken_in(cast("Communicator", group))  # not None: it has a color

    def split_by_machine(self) -> Communicator:
        """Makes a group of the ranks on each machine. Every rank must call it.

        Ranks in different containers of one machine count as on different ones: they do not see each other's processes.

        Returns:
            The group of this rank's machine.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, RendezvousTimeout, CommunicatorClosed, ...: as for split.
        """
        import socket  # here: start-up counts

        machine = digest_of("machine", machine_identity() or socket.gethostname())
        return cast("Communicator", self.split(machine - 2**63))  # it has a color

    def _split_group(self, color: int, key: int, members: tuple[int, ...], name: str) -> Communicator | None:
        """Makes this rank's group of a split, in which every rank takes part.

        Args:
            color: a small number for the group, or NO_COLOR.
            key: this rank's number in the group.
            members, name: see _connect_group; empty where there is no color.
        """
        return self._connect_group(members, name) if members else None

    @contextmanager
    def _telling_failures(self, what: str) -> Iterator[None]:
        """Tells the other ranks of a failure in making a group; they would wait for this one otherwise."""
        try:
            yield
        except (RankFailed, CommunicatorClosed):
            self.lifetime.check_usable(what)  # the server may have told only that this rank has failed
            raise  # of what has ended the members' wait, each of them finds out itself
        except BaseException as error:
            if self._client is not None:
                if isinstance(error, BackendUnavailable):
                    # A member that died is not there either, and is the better reason.
                    await_news(NEWS_SECONDS, self._client.check)
                self._client.report_failure(f"in {what}: {describe(error)}")
            raise

    def _new_name(self, members: Sequence[int]) -> str:
        return self.family.new_name(self._listed(members))

    def _listed(self, members: Sequence[int]) -> str:
        return _listed([self.ranks[member] for member in members])

    def _taken_in(self, group: Communicator) -> Communicator:
        if cast("Communicator", self).debug:
            group.use_debug_mode()
        self.family.add(group)
        return group

    def _meet_members(self, what: str, members: Sequence[int], name: str) -> None:
        """Waits for the other members of a group; here, because then the error can say what was called."""
        if self._client is None or len(members) == 1:
            return

        def look_around(missing: tuple[int, ...]) -> None:
            self.lifetime.check_usable(what)
            self._look_for_ended([self.ranks.index(rank) for rank in missing])

        def on_timeout(waited_seconds: float, whom: str) -> str:
            return (
                f"{self.label}: {what} of the ranks {self._listed(members)} waited {waited_seconds:.3g} s: every "
                f"member must call {what}, all with the same ranks, and groups that have members in common in the same "
                f"order; missing: {whom}"
            )

        meet_members(self._client, members, name, self._timeout_seconds, look_around, on_timeout)

    def _look_for_ended(self, missing: list[int]) -> None:
        """Raises RankFailed where a rank has aborted this communicator, or one of those that are missing closed it.

        Called outside of this communicator's turn. What the rendezvous server tells need not be looked for.
        """

    def _leave_group(self) -> None:
        """Lets the server forget what a group's communicator has put there, at its end."""
        if self._client is not None and self._client.name == self.recorder.group:
            self._client.close()

    def _checked_members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        try:
            members = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            members = []
        fits = members and members[0] >= 0 and members[-1] < self.world_size and len(set(members)) == len(members)
        if not fits:
            raise InvalidArgument(
                f"{self.label}: new_group needs one or more distinct ranks from 0 to {self.world_size - 1}, "
                f"got {ranks!r}"
            )
        return tuple(members)

    def _checked_word(self, name: str, value: int) -> int:
        number = integer_of(value)
        if number is None or not -(2**63) <= number < 2**63:
            needed = "an integer of 64 bits or None" if name == "color" else "an integer of 64 bits"
            raise InvalidArgument(f"{self.label}: split needs {name} to be {needed}, got {value!r}")
        return number


def _listed(ranks: Sequence[int]) -> str:
    """Returns the ranks as text, of bounded length."""
    listed = ",".join(map(str, ranks))
    if len(listed) <= _LISTED_CHARACTERS:
        return listed
    from hashlib import blake2b  # here: start-up counts

    return f"{len(ranks)} ranks from {ranks[0]}, {blake2b(listed.encode(), digest_size=8).hexdigest()}"

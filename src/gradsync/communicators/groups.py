"""Groups: communicators of some of a communicator's ranks.

A group is a communicator like any other, over the same backend. What all groups of one world share is in `Family`:
their names, and who is to be closed with the world. The backends make the groups, in `connect_group`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gradsync.communicators.lifetime import Lifetime, RaisedFailures
from gradsync.errors import GradsyncError, RendezvousTimeout, name_ranks

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

NO_COLOR = -1  # what Backend.split_group is told of a rank that joins no group
_LISTED_CHARACTERS = 40  # of a group's members in its name
_LOOK_AROUND_EVERY_SECONDS = 0.25


class Member(Protocol):
    """What a Family asks of a Communicator."""

    lifetime: Lifetime

    def close(self) -> None:
        """Releases it."""


class Family:
    """A world's communicator and all that were made from it.

    Args:
        name: the world's.
        raised: of the world.

    Attributes:
        local_group: the ranks of this machine, where comm.py was asked for them.
    """

    def __init__(self, name: str, raised: RaisedFailures) -> None:
        self.name = name
        self.local_group: Any = None
        self._raised = raised
        self._counts: dict[str, int] = {}
        self._communicators: weakref.WeakSet[Member] = weakref.WeakSet()

    def new_name(self, what: str) -> str:
        """Returns e.g. "world/0,2#1", the same on all ranks that have asked for `what` equally often."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{self.name}/{what}#{count}"

    def add(self, communicator: Member) -> None:
        """Takes a communicator in, for as long as somebody holds it."""
        communicator.lifetime.raised = self._raised
        self._communicators.add(communicator)

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


class NonMember:
    """Stands where a member has its communicator, and counts as false: `if group: group.all_reduce(array)`.

    It is not None: that means the world wherever a communicator may be passed, and who is no member must not take part
    in the world's collectives by mistake. Passed on as a communicator it is refused.

    Args:
        label: how messages name this rank.
        group: what it is no member of, e.g. "the group of ranks 0,2".
    """

    def __init__(self, label: str, group: str) -> None:
        self._label = label
        self._group = group

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"{self._label} is no member of {self._group}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's own questions, of copy and pickle for example
            raise AttributeError(name)
        raise AttributeError(f"{self}, and has no {name!r} there: ask `if group:` first")


def meet_members(
    client: RendezvousClient,
    members: Sequence[int],
    name: str,
    timeout_seconds: float,
    look_around: Callable[[tuple[int, ...]], None],
    on_timeout: Callable[[float, str], str],
) -> None:
    """Returns once all members have come.

    Args:
        client: of the ranks that they are taken from.
        members: numbers there.
        name: of the group, not used before in this generation.
        timeout_seconds: how long to wait.
        look_around: look_around(missing ranks) is called while waiting; raises when the wait is in vain.
        on_timeout: on_timeout(waited seconds, whom in words) returns the text of the error.

    Raises:
        RendezvousTimeout: a member did not come.
        RankFailed: one has died.
    """
    # A place of its own, which the server forgets when all have left it, however the group itself may end.
    meeting = client.group(members, f"{name}/members")
    began = time.monotonic()
    try:
        while True:
            left_seconds = max(began + timeout_seconds - time.monotonic(), 1e-3)
            try:
                meeting.barrier(meeting.name, timeout_seconds=min(left_seconds, _LOOK_AROUND_EVERY_SECONDS))
                return
            except RendezvousTimeout as error:
                look_around(error.missing_ranks)
                if left_seconds <= _LOOK_AROUND_EVERY_SECONDS:
                    text = on_timeout(time.monotonic() - began, whom(error))
                    raise RendezvousTimeout(text, missing_ranks=error.missing_ranks, missing=error.missing) from error
    finally:
        meeting.close()


def whom(error: RendezvousTimeout) -> str:
    """Returns for whom a barrier has waited, with where the server says they are; it may itself be the one."""
    return error.missing or (name_ranks(error.missing_ranks) if error.missing_ranks else "the rendezvous server")


def listed(ranks: Sequence[int]) -> str:
    """Returns the ranks as text, of bounded length."""
    text = ",".join(map(str, ranks))
    if len(text) <= _LISTED_CHARACTERS:
        return text
    from hashlib import blake2b  # here: start-up counts

    return f"{len(ranks)} ranks from {ranks[0]}, {blake2b(text.encode(), digest_size=8).hexdigest()}"

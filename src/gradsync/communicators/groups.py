"""Groups: communicators of some of a communicator's ranks.

A group is a communicator like any other, over the same backend; the backends make it, in `connect_group`. `Family`
names the groups of one world, and closes them with the world.
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

NO_COLOR = -1  # for Backend.split_group: the rank joins no group
_LISTED_CHARACTERS = 40  # the longest list of members in a group's name
_LOOK_AROUND_EVERY_SECONDS = 0.25


class Member(Protocol):
    """The part of a Communicator that a Family uses."""

    _lifetime: Lifetime

    def close(self) -> None:
        """Closes the communicator."""


class Family:
    """A world's communicator and all communicators made from it.

    Args:
        name: the world's name.
        raised: the failures that the world has raised.

    Attributes:
        local_group: the group of this machine's ranks; None until comm.py has made it.
    """

    def __init__(self, name: str, raised: RaisedFailures) -> None:
        self.name = name
        self.local_group: Any = None
        self._raised = raised
        self._counts: dict[str, int] = {}
        self._communicators: weakref.WeakSet[Member] = weakref.WeakSet()

    def new_name(self, what: str) -> str:
        """Returns a new name, e.g. "world/0,2#1"; the same on all ranks that have called this equally often."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{self.name}/{what}#{count}"

    def add(self, communicator: Member) -> None:
        """Adds a communicator, by a weak reference."""
        communicator._lifetime.raised = self._raised
        self._communicators.add(communicator)

    def close(self) -> None:
        """Closes all communicators, then raises the first error that no call has raised yet."""
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
    """The result of new_group and split on a rank that is not a member. False: `if group: group.all_reduce(array)`.

    It is not None, because None as a communicator means the world, and a non-member must not take part in the world's
    collectives by mistake. Functions that take a communicator refuse a NonMember.

    Args:
        label: this rank's name in messages.
        group: the group in words, e.g. "the group of ranks 0,2".
    """

    def __init__(self, label: str, group: str) -> None:
        self._label = label
        self._group = group

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"{self._label} is not a member of {self._group}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python itself asks, e.g. for copy and pickle
            raise AttributeError(name)
        raise AttributeError(f"{self} and cannot use its {name!r}; check `if group:` first")


def meet_members(
    client: RendezvousClient,
    members: Sequence[int],
    name: str,
    timeout_seconds: float,
    look_around: Callable[[tuple[int, ...]], None],
    on_timeout: Callable[[float, str], str],
) -> None:
    """Waits until all members of a new group have called this.

    Args:
        client: the parent communicator's client.
        members: ranks of that client.
        name: the group's name, not used before in this generation.
        timeout_seconds: how long to wait.
        look_around: look_around(missing ranks) is called while waiting; it raises if they cannot arrive any more.
        on_timeout: on_timeout(waited seconds, missing ranks in words) returns the text of the error.

    Raises:
        RendezvousTimeout: a member did not arrive.
        RankFailed: a member has died.
    """
    # A client group of its own: the server removes its entries when all have left it, however the new group ends.
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
    """Returns the missing ranks of a timed-out barrier, with their states if the server has sent these."""
    return error.missing or (name_ranks(error.missing_ranks) if error.missing_ranks else "the rendezvous server")


def listed(ranks: Sequence[int]) -> str:
    """Returns the ranks as text of bounded length; long lists as a count and a digest."""
    text = ",".join(map(str, ranks))
    if len(text) <= _LISTED_CHARACTERS:
        return text
    from hashlib import blake2b  # imported here to keep the start of a rank short

    return f"{len(ranks)} ranks from {ranks[0]}, {blake2b(text.encode(), digest_size=8).hexdigest()}"

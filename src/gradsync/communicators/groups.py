"""Groups: communicators for some or all of the ranks of another.

A group has a backend of the same kind, which `Backend.connect_group` makes. A `CommunicatorTree` gives the groups of
one world their names, and closes them with the world. `await_members` waits until all members have called new_group or
split.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from gradsync.communicators.agreement import digest_of
from gradsync.communicators.backend import Backend
from gradsync.communicators.failures import CAUSE_SECONDS, await_cause
from gradsync.communicators.lifetime import Lifetime
from gradsync.errors import (
    BackendUnavailable,
    CommunicatorClosed,
    RankFailed,
    RendezvousTimeout,
    describe,
    name_ranks,
)

if TYPE_CHECKING:
    from gradsync.communicators.communicator import Communicator

_LISTED_CHARACTERS = 40  # of the longest list of members in a group's name
_CHECK_EVERY_SECONDS = 0.25


class CommunicatorTree:
    """The communicators made from one world: groups, groups of groups, and those of override_backend().

    Args:
        name: the name of the world's communicator.

    Attributes:
        has_begun: whether one of them has completed a step, or the world was rebuilt: there is a state to lose.
        is_rebuilt: whether the world was rebuilt.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_begun = self.is_rebuilt = False
        self._counts: dict[str, int] = {}
        # In the order of their making, which is one order on all ranks: close() waits for messages.
        self._communicators: weakref.WeakKeyDictionary[Communicator, None] = weakref.WeakKeyDictionary()

    def new_name(self, what: str) -> str:
        """Returns a new name for the group `what`, e.g. "world/0,2#1": the same on ranks that have asked alike."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        return f"{self.name}/{what}#{count}"

    def add(self, communicator: Communicator) -> None:
        """Adds a communicator, by a weak reference."""
        self._communicators[communicator] = None

    def communicators(self) -> list[Communicator]:
        """Returns the communicators that are still referred to."""
        return list(self._communicators)

    def close(self) -> None:
        """Closes all communicators of the tree."""
        for communicator in self.communicators():
            communicator.close()


class NonMember:
    """What new_group and split return on a rank that is not a member of the group.

    It is false: write `if group: group.all_reduce(array)`. It is not None, which means the world where a communicator
    is taken: a non-member must not join the world's collectives by mistake, and gets InvalidArgument.

    Args:
        label: this rank's name in errors.
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
        if name.startswith("_"):  # Python itself reads such names, for copy and pickle
            raise AttributeError(name)
        raise AttributeError(f"{self} and cannot use the group's {name!r}; check `if group:` first")


@contextmanager
def reporting_failures(backend: Backend, lifetime: Lifetime, what: str) -> Iterator[None]:
    """Reports an error of the `with` block to the other ranks, which wait for this one to make the group.

    Args:
        backend, lifetime: those of the communicator that makes it.
        what: the public method's name in errors.
    """
    try:
        yield
    except (RankFailed, CommunicatorClosed):
        lifetime.check_usable(what)  # this rank's own failure, rather than the server's copy of it
        raise  # not reported: every member gets this error by itself
    except BaseException as error:
        if backend.client is not None:
            if isinstance(error, BackendUnavailable):
                # If a member has died, the death is the cause.
                await_cause(CAUSE_SECONDS, backend.client.check)
            backend.client.report_failure(f"in {what}: {describe(error)}")
        raise


def await_members(backend: Backend, lifetime: Lifetime, what: str, members: Sequence[int], name: str) -> None:
    """Waits until all members of a new group have called it.

    Args:
        backend, lifetime: those of the communicator that makes the group, whose messages move on meanwhile.
        what: the public method's name in errors.
        members: the members' ranks in that communicator.
        name: the new group's name, unique since the last init_process_group().

    Raises:
        RendezvousTimeout: a member did not call it before the deadline.
        RankFailed: a rank has died, or has closed or aborted the communicator.
        CollectiveTimeout, CommunicatorClosed, RendezvousError: the communicator failed or was closed, or the connection
            to the rendezvous server was lost.
    """
    client, timeout_seconds = backend.client, backend.timeout_seconds
    if client is None or len(members) == 1:
        return
    # The barrier has a group of its own on the server, which forgets it once all have left, however the new group ends.
    waiting = client.group(members, f"{name}/members")
    began = time.monotonic()
    try:
        while True:
            left_seconds = max(began + timeout_seconds - time.monotonic(), 1e-3)
            has_messages = lifetime.messages.move_on(_CHECK_EVERY_SECONDS / 10)
            try:
                seconds = _CHECK_EVERY_SECONDS / (10 if has_messages else 1)
                waiting.barrier(waiting.name, timeout_seconds=min(left_seconds, seconds))
                return
            except RendezvousTimeout as error:
                lifetime.check_usable(what)
                backend.raise_if_ended([backend.ranks.index(rank) for rank in error.missing_ranks])
                if left_seconds <= _CHECK_EVERY_SECONDS:
                    raise RendezvousTimeout(
                        f"{backend.label}: {what} of the ranks {listed([backend.ranks[rank] for rank in members])} "
                        f"waited {time.monotonic() - began:.3g} s for {whom(error)}; every member must call {what} "
                        "with the same ranks; ranks that are together in several groups must make these groups in the "
                        "same order",
                        missing_ranks=error.missing_ranks,
                        missing=error.missing,
                    ) from error
    finally:
        waiting.close()


def whom(error: RendezvousTimeout) -> str:
    """Returns in words who was missing at a barrier, with their states if these are known."""
    return error.missing or (name_ranks(error.missing_ranks) if error.missing_ranks else "the rendezvous server")


def listed(ranks: Sequence[int]) -> str:
    """Returns ranks as a short text: of many only their number, the first, and a digest."""
    text = ",".join(map(str, ranks))
    if len(text) <= _LISTED_CHARACTERS:
        return text
    return f"{len(ranks)} ranks from {ranks[0]}, {digest_of(text):016x}"

"""What a group of ranks has left with the server is dropped once all are done with it: a run may make many groups.

Part of the server's core, without I/O. What belongs to a group stands under its name, see `scopes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradsync.rendezvous.members import Members
from gradsync.rendezvous.roster import Roster

_MAX_SCOPES = 16_384  # more stay until the generation ends


class Store(Protocol):
    """Where something may stand under a name."""

    def forget(self, scope: str) -> None:
        """Drops what stands under the name."""


class Forgetting:
    """The members of groups that are done with their group, while others are not.

    Args:
        roster: the members of the generation; who has left is done with all.
        stores: where to drop what a group has put there.
    """

    def __init__(self, roster: Roster, stores: Sequence[Store]) -> None:
        self._roster = roster
        self._stores = stores
        self._done: dict[tuple[str, Members], set[int]] = {}

    def hear(self, rank: int, scope: str, members: Members) -> None:
        """Takes in that a member is done with what stands under the scope; the last one's word drops it."""
        group = scope, members
        if rank not in members or (group not in self._done and len(self._done) >= _MAX_SCOPES):
            return
        self._done.setdefault(group, set()).add(rank)
        self._settle(group)

    def rank_left(self, rank: int) -> None:
        """Takes in that a rank has left."""
        for group in [group for group in self._done if rank in group[1]]:
            self._settle(group)

    def _settle(self, group: tuple[str, Members]) -> None:
        scope, members = group
        done = self._done[group]
        if len(done) < len(members) and not self._roster.any_left:
            return
        if any(rank not in done and self._roster.is_present(rank) for rank in members):
            return
        del self._done[group]
        for store in self._stores:
            store.forget(scope)

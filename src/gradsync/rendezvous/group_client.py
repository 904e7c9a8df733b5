"""Some of the ranks seen as if they were all: what a group's communicator meets through.

Sits on `client`, whose interface it has as far as communicators use it. Ranks that are passed to it, and its own, count
within the group; ranks in errors and reports are the world's, which is how the server and the user know them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NoReturn

from gradsync.errors import InvalidArgument
from gradsync.rendezvous.agreements import Verdict
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.followers import OnAsked
from gradsync.rendezvous.scopes import is_under


class GroupClient:
    """A rank's place among some members of a generation.

    All members make one, with the same arguments. What they share stands under the group's name: a key, barrier or
    group that is not called so, or "name/...", gets "name/" before it.

    Args:
        client: this rank's, of the generation or of a group.
        members: ranks of `client`; in this order they are rank 0, 1, 2 ... of the group.
        name: not used before in this generation; at most 500 bytes.

    Attributes:
        rank, world_size: this rank's number in the group, and how many members there are.
        world_ranks: the members' numbers in the world, by rank.
        name: see above.
        label: this rank in messages, e.g. "rank 1/2 of group 'world/0,2#1' (rank 2 of the world)".

    Raises:
        InvalidArgument: this rank is no member, or a member is named twice or does not exist.
    """

    rank: int
    world_size: int
    world_ranks: tuple[int, ...]
    label: str

    def __init__(self, client: CommunicatorClient, members: Sequence[int], name: str) -> None:
        numbers = [operator.index(member) for member in members]
        fits = all(0 <= member < client.world_size for member in numbers) and len(set(numbers)) == len(numbers)
        if not fits or client.rank not in numbers:
            raise InvalidArgument(
                f"{client.label}: the members of group {name!r} need to be distinct, from 0 to "
                f"{client.world_size - 1}, and to include this rank, got {numbers}"
            )
        self._client: RendezvousClient = client._client if isinstance(client, GroupClient) else client
        self.world_ranks = tuple([client.world_ranks[member] for member in numbers])
        self.rank = numbers.index(client.rank)
        self.world_size = len(numbers)
        self.name = name
        self.label = f"rank {self.rank}/{self.world_size} of group {name!r} (rank {self._client.rank} of the world)"
        self._is_closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank={self.rank}, world_ranks={self.world_ranks})"

    @property
    def generation(self) -> int:
        """See RendezvousClient."""
        return self._client.generation

    @property
    def has_failed(self) -> Callable[[], bool]:
        """See RendezvousClient: a failure is one of the whole generation."""
        return self._client.has_failed

    def check(self) -> None:
        """See RendezvousClient: a failure is one of the whole generation."""
        self._client.check()

    def set(self, key: str, value: bytes) -> None:
        """See RendezvousClient."""
        self._client.set(self._scoped(key), value)

    def get(self, key: str, *, timeout_seconds: float = 120.0) -> bytes:
        """See RendezvousClient."""
        return self._client.get(self._scoped(key), timeout_seconds=timeout_seconds)

    def add(self, key: str, amount: int = 1) -> int:
        """See RendezvousClient."""
        return self._client.add(self._scoped(key), amount)

    def delete(self, key: str) -> bool:
        """See RendezvousClient."""
        return self._client.delete(self._scoped(key))

    def barrier(self, name: str = "", *, timeout_seconds: float = 120.0) -> None:
        """Waits until every member has arrived; see RendezvousClient."""
        self._client.barrier(self._scoped(name), ranks=self.world_ranks, timeout_seconds=timeout_seconds)

    def unique_id(
        self, group: str, *, root: int, make_id: Callable[[], bytes] | None, timeout_seconds: float = 120.0
    ) -> bytes:
        """Returns the one 128-byte id that the member `root` makes; see RendezvousClient."""
        return self._client.unique_id(
            self._scoped(group),
            root=self.world_ranks[root],
            ranks=self.world_ranks,
            make_id=make_id,
            timeout_seconds=timeout_seconds,
        )

    def agree(self, group: str, position: int, digest: int, *, timeout_seconds: float = 120.0) -> Verdict:
        """Asks whether all members do the same; see RendezvousClient."""
        return self._client.agree(
            self._scoped(group), position, digest, ranks=self.world_ranks, timeout_seconds=timeout_seconds
        )

    def passed_position(self, group: str) -> int | None:
        """See RendezvousClient."""
        return self._client.passed_position(self._scoped(group))

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """See RendezvousClient."""
        self._client.follow(self._scoped(group), on_asked)

    def unfollow(self, group: str) -> None:
        """See RendezvousClient."""
        self._client.unfollow(self._scoped(group))

    def report_waiting(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> None:
        """See RendezvousClient; `missing` are numbers in the world."""
        claim = (position, what, waited_seconds, missing)
        self._client.report_waiting(self._scoped(group), *claim, ranks=self.world_ranks)

    def report_absence(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> NoReturn:
        """See RendezvousClient; `missing` are numbers in the world."""
        claim = (position, what, waited_seconds, missing)
        self._client.report_absence(self._scoped(group), *claim, ranks=self.world_ranks)

    def report_failure(self, reason: str, *, culprit: int | None = None) -> None:
        """See RendezvousClient: it ends the whole generation."""
        self._client.report_failure(reason, culprit=culprit)

    def close(self) -> None:
        """Says that this rank is done with the group; the server forgets it once all members are. Idempotent.

        Nothing waits, and the world's client goes on.
        """
        if not self._is_closed:
            self._is_closed = True
            self._client.forget(self.name, ranks=self.world_ranks)

    def _scoped(self, name: str) -> str:
        return name if is_under(name, self.name) else f"{self.name}/{name}"


# What a communicator's ranks meet through.
CommunicatorClient = RendezvousClient | GroupClient

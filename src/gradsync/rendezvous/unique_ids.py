"""The 128-byte ids that this rank makes as the root of a group, or gets from the root.

Part of the client, beside `client`.
"""

from __future__ import annotations

from collections.abc import Callable

from gradsync.errors import InvalidArgument
from gradsync.rendezvous.messages import UNIQUE_ID_BYTES, FrameType
from gradsync.rendezvous.request_channel import RequestChannel
from gradsync.rendezvous.scopes import is_under


class UniqueIds:
    """The ids of one client's groups.

    Args:
        requests: where they are handed in and asked for.
        rank, who: this rank, and how messages name it.
    """

    def __init__(self, requests: RequestChannel, rank: int, who: str) -> None:
        self._requests = requests
        self._rank = rank
        self._who = who
        self._made: dict[tuple[str, tuple[int, ...] | None], bytes] = {}  # by this rank, as root

    def get(
        self,
        group: str,
        root: int,
        members: list[int] | None,
        make_id: Callable[[], bytes] | None,
        timeout_seconds: float,
    ) -> bytes:
        """Returns the id, as `RendezvousClient.unique_id` says."""
        operation = f"unique_id {group!r}"
        if self._rank != root:
            return bytes(self._requests.ask(operation, timeout_seconds, FrameType.GET_ID, group, root, members))
        place = (group, None if members is None else tuple(members))
        if place not in self._made:
            made = self._make(operation, make_id)
            self._requests.ask_at_once(operation, FrameType.PUT_ID, group, root, members, made)
            self._made[place] = made
        return self._made[place]

    def forget(self, scope: str) -> None:
        """Drops the ids under a name that this rank is done with."""
        for place in [place for place in self._made if is_under(place[0], scope)]:
            del self._made[place]

    def _make(self, operation: str, make_id: Callable[[], bytes] | None) -> bytes:
        if make_id is None:
            raise InvalidArgument(f"{self._who}: {operation} needs make_id on its root, got None")
        made = make_id()
        if not isinstance(made, (bytes, bytearray)) or len(made) != UNIQUE_ID_BYTES:
            size = f"{len(made)} bytes" if isinstance(made, (bytes, bytearray)) else type(made).__name__
            raise InvalidArgument(f"{self._who}: {operation} needs {UNIQUE_ID_BYTES} bytes from make_id, got {size}")
        return bytes(made)

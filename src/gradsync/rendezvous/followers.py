"""The client's answers to questions of other ranks: "I am asking about this position; have you passed it?".

Sits between `pushes`, which gets the questions, and `client_connection`, on which the answers go out. The
communicators of this rank say what they launched.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable

from gradsync.errors import InvalidArgument
from gradsync.rendezvous.agreements import PassedEvent
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.messages import MAX_EVENT_BYTES, FrameType, clip_text

OnAsked = Callable[[int], "PassedEvent | None"]

_log = logging.getLogger("gradsync.rendezvous")


class Followers:
    """Who is to be asked what this rank launched, by group.

    Args:
        connection: authenticated.
        who: the rank as messages name it, e.g. "rank 1/4".
    """

    def __init__(self, connection: ClientConnection, who: str) -> None:
        self._connection = connection
        self._who = who
        self._on_asked: dict[str, OnAsked] = {}

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """Lets `on_asked` answer for a group.

        Raises:
            InvalidArgument: somebody answers for this group already.
        """
        if self._on_asked.setdefault(group, on_asked) is not on_asked:
            raise InvalidArgument(f"{self._who}: group {group!r} is followed already; unfollow it first")

    def unfollow(self, group: str) -> None:
        """Ends that; a call under way in another thread may still run. Idempotent."""
        self._on_asked.pop(group, None)

    def tell(self, group: str, position: int) -> None:
        """Asks the group's communicator what it launched at a position, and tells the server if it has."""
        on_asked = self._on_asked.get(group)
        if on_asked is None:
            return
        try:
            event = on_asked(position)
            if event is not None:
                text = clip_text(event.description, MAX_EVENT_BYTES)
                self._connection.post(FrameType.PASSED, group, position, operator.index(event.digest), text)
        except StreamEnded:
            pass  # whoever reads next finds the server gone, and says so
        except Exception:  # the thread that asks belongs to somebody else, who can do nothing about it
            _log.exception("%s: position %d of group %r counts as not reached yet", self._who, position, group)

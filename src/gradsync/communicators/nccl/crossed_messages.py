"""Two ranks that both send first, or both receive first: each would wait for the other one until the deadline.

A rank that has waited for long with nothing else to do than one message says so under the positions that both of its
directions to the peer have come to. Where the peer has said the same of the same positions, neither can get on: whoever
had met the other one's message would have come to a later position.
"""

from __future__ import annotations

import contextlib

from gradsync.communicators.agreement import Agreement, Description, message_mismatch
from gradsync.errors import GradsyncError, RendezvousTimeout
from gradsync.rendezvous.group_client import GroupClient

_TEXT_BYTES = 4096


class CrossedMessages:
    """Looks whether the peer waits as this rank does.

    Args:
        pair: the way of the two ranks to the rendezvous server.
        label: this rank in messages.
        positions: which message each of the two directions has come to, the one to the higher rank first.
        sends: whether it waits to send; else to receive.
        agreement: on the message.

    Attributes:
        were_found: whether the peer waits so.
    """

    def __init__(
        self, pair: GroupClient, label: str, positions: tuple[int, int], agreement: Agreement, *, sends: bool
    ) -> None:
        self._pair = pair
        self._label = label
        kind = "sends" if sends else "receives"
        self._place = f"crossed/{positions[0]}-{positions[1]}/{kind}"
        self._agreement = agreement
        self._is_told = False
        self._mine = ""  # what it has told
        self.were_found = False

    def look(self) -> None:
        """Says that this rank waits.

        Raises:
            PlanMismatch: so does the peer, which is going to find the same.
        """
        if not self._is_told:
            self._mine = self._agreement.text_for_others()
            self._pair.set(self._key(self._pair.rank), self._mine.encode(errors="replace")[:_TEXT_BYTES])
            self._is_told = True
        try:
            text = self._pair.get(self._key(1 - self._pair.rank), timeout_seconds=0.0).decode(errors="replace")
        except RendezvousTimeout:
            return
        self.were_found = True
        ranks = self._pair.world_ranks
        texts = {ranks[self._pair.rank]: self._mine, ranks[1 - self._pair.rank]: text}
        descriptions = {rank: Description.parse(text) for rank, text in texts.items()}
        raise message_mismatch(self._label, descriptions, is_circle=True)

    def withdraw(self) -> None:
        """Takes back what was said, because the message was met after all."""
        if self._is_told:
            with contextlib.suppress(GradsyncError):  # nobody comes to these positions again
                self._pair.delete(self._key(self._pair.rank))

    def _key(self, rank: int) -> str:
        return f"{self._place}/{rank}"

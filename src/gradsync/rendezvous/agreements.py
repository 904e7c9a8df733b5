"""Agreement over the control connection: the words that both ends and the communicators share.

NCCL cannot carry a digest of what the ranks are about to reduce, so its communicators ask the rendezvous server
instead. Each communicator is a group that numbers its collectives: position 0, 1, 2, ... A rank whose next
collective is the one that the common history predicts launches it without asking; any other rank asks, with the
digest of its collective, and waits for the verdict. `agreement_places` decides, `client` asks, `followers` answers
for a rank that has gone ahead.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Verdict(enum.IntEnum):
    """What the server says about one position of a group, the same to every rank that asked."""

    SAME = 0  # every member is about to do the same: go on
    DIFFERENT = 1  # the members differ, and none has gone ahead
    PASSED = 2  # a member has gone ahead with something else than another one is about to do


class PassedEvent(NamedTuple):
    """What a rank launched at a position that another one asks about.

    Attributes:
        digest: of the collective, an unsigned integer of 64 bits.
        description: the collective in words, for the other ranks' error; cut to 48 KiB.
    """

    digest: int
    description: str


def event_key(group: str, position: int, rank: int) -> str:
    """Returns the key under which a rank's description of its collective stands when the ranks differ.

    The server stores it there for a rank that has gone ahead; a rank that asked sets it itself, for the others.
    """
    return f"{group}/agree/{position}/{rank}"

"""How the members of a group that is to be made come together: each knows who is missing, and why nobody comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradsync.errors import RendezvousTimeout, name_ranks

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

_LOOK_AROUND_EVERY_SECONDS = 0.25


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

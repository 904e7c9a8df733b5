"""What the ranks of a communicator tell the rendezvous server while they wait for each other, and hear from it.

A rank that waits long is told of in the log; one that has waited too long asks the server for a verdict, which is the
same on every rank. So whoever finds, in whatever way, that a collective cannot end looks here first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from gradsync.communicators.agreement import place_of_caller
from gradsync.diagnostics import Entry, FlightRecorder
from gradsync.errors import CollectiveTimeout, GradsyncError, RankFailed, RendezvousError

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

WARN_AFTER_SECONDS = 5.0
# How much later than what it explains a verdict may come: a broken connection, an error of NCCL, a rank that gave up.
NEWS_SECONDS = 2.0
_LOOK_FOR_NEWS_EVERY_SECONDS = 0.02


def await_news(seconds: float, look: Callable[[], None]) -> None:
    """Calls `look`, which raises what is news, again and again for a moment of so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        look()
        time.sleep(_LOOK_FOR_NEWS_EVERY_SECONDS)


class Verdicts:
    """One communicator's way to the server's verdict.

    Args:
        client: this rank's connection to the rendezvous server.
        recorder: of the communicator: says in which collective the rank waits.

    Attributes:
        was_heard: whether a verdict, or the loss of the server, has been raised here: other ranks hear of it too.
        is_known: tells, at next to no cost, whether `check` would raise, or will in the other ranks in a moment.
    """

    def __init__(self, client: RendezvousClient, recorder: FlightRecorder) -> None:
        self.was_heard = False
        self.is_known = client.has_failed
        self._client = client
        self._recorder = recorder
        self._warned_of = -math.inf  # when what it was began

    def check(self) -> None:
        """Raises the verdict, or that the server is gone; never waits.

        Raises:
            RankFailed, CollectiveTimeout: the verdict.
            RendezvousError: the server is gone.
        """
        try:
            self._client.check()
        except (RankFailed, CollectiveTimeout, RendezvousError):
            self.was_heard = True
            raise

    def await_news(self, seconds: float, look: Callable[[], None] | None = None) -> None:
        """Raises the verdict, should it come within a moment: another rank has heard it, or what it is about.

        Args:
            seconds: the moment.
            look: raises what is news; None is `check`.
        """
        await_news(seconds, look or self.check)

    def known(self) -> RankFailed | CollectiveTimeout | None:
        """Returns the verdict, where there is one."""
        try:
            self.check()
        except (RankFailed, CollectiveTimeout) as verdict:
            return verdict
        except GradsyncError:
            pass  # the server is gone, or this rank has left it
        return None

    def warn(self, waited_seconds: float, missing: Sequence[int] | None, entry: Entry | None = None) -> None:
        """Has the server tell, once for a collective or message, who is waited for, where that has taken long.

        Args:
            waited_seconds: how long this rank has waited.
            missing: for whom, by their numbers in the world; None where it cannot know.
            entry: the collective, which was launched; None is the last one begun, in which a thread waits.
        """
        if waited_seconds < WARN_AFTER_SECONDS:
            return
        what = entry or self._recorder.last
        if what is not None and what.began > self._warned_of:
            self._warned_of = what.began
            told = _told(what, is_launched=entry is not None)
            self._client.report_waiting(self._recorder.group, *told, waited_seconds, missing)

    def give_up(self, waited_seconds: float, missing: Sequence[int] | None, entry: Entry | None = None) -> NoReturn:
        """Asks for the verdict on a collective that has reached its deadline, and raises it. Arguments as for `warn`.

        Raises:
            CollectiveTimeout: on every rank, naming who is missing.
            RankFailed: a rank has died meanwhile.
            RendezvousError: the server is gone.
        """
        number, what = _told(entry or self._recorder.last, is_launched=entry is not None)
        self.was_heard = True
        self._client.report_stuck(self._recorder.group, number, what, waited_seconds, missing)


def raise_if_left(
    client: RendezvousClient, name: str, label: str, position: float, ranks: Iterable[int] | None = None
) -> None:
    """Raises RankFailed where another rank has left a communicator before it had passed one of its collectives.

    For communicators whose ranks share no memory in which they could tell each other. Such a rank has told the server
    by `announce_left`.

    Args:
        client: this rank's connection; its ranks are the communicator's.
        name: of the communicator, as in `announce_left`.
        label: this rank in errors.
        position: the collective's number.
        ranks: whom to look for, by their numbers in the world; None is all.
    """
    wanted = set(client.world_ranks if ranks is None else ranks) - {client.world_ranks[client.rank]}
    for rank, came_to in client.left_ranks(name).items():
        if rank in wanted and came_to <= position:
            raise RankFailed(
                f"{label}: rank {rank} closed the communicator while this rank still needed it; "
                "do all ranks make the same number of steps?",
                rank=rank,
                phase="collective",
            )


def _told(entry: Entry | None, *, is_launched: bool) -> tuple[int, str]:
    """Returns the number and the title that the server tells; of a message with the line where the rank is.

    Ranks that wait in one collective are told of together, and have their lines in the report. Of messages each rank
    waits in another one, and where two wait for each other the lines are what has to be changed.
    """
    from gradsync.rendezvous.frames import OF_MESSAGES  # here: start-up counts

    if entry is None:
        return OF_MESSAGES, "a collective"
    if not entry.what.is_message:
        return entry.number, entry.title
    place = place_of_caller()
    if not place:
        return OF_MESSAGES, entry.title
    return OF_MESSAGES, f"{entry.title.removesuffix(')')}, {'launched; by now ' if is_launched else ''}{place})"

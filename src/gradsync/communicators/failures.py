"""Failures of other ranks: a communicator reports long waits to the rendezvous server, and gets failures from it.

A long wait is logged. A wait that reaches its deadline fails the generation: the server sends the same error to every
rank. So a backend that finds by itself that a collective cannot end first asks for the server's error here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from gradsync.communicators.agreement import find_call_site
from gradsync.diagnostics import Entry, FlightRecorder
from gradsync.errors import CollectiveTimeout, GradsyncError, RankFailed, RendezvousError

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

WARN_AFTER_SECONDS = 5.0
# The server's error may arrive this much later than its consequence, such as a broken connection or an NCCL error.
CAUSE_SECONDS = 2.0
_CHECK_EVERY_SECONDS = 0.02


def await_cause(seconds: float, check: Callable[[], None]) -> None:
    """Calls `check` again and again for `seconds`; `check` raises the cause once it has arrived."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        time.sleep(_CHECK_EVERY_SECONDS)


class FailureMonitor:
    """Gets failures from the rendezvous server for one communicator, and reports the communicator's long waits.

    Args:
        client: this rank's connection to the rendezvous server.
        recorder: the communicator's flight recorder, which has the collective that this rank waits in.

    Attributes:
        was_raised: whether this object has raised the server's error, or the loss of the server: then the other ranks
            get that error too.
        has_failed: a function that takes 0.1 us and returns whether the generation has failed or this rank has
            reported a failure.
    """

    def __init__(self, client: RendezvousClient, recorder: FlightRecorder) -> None:
        self.was_raised = False
        self.has_failed = client.has_failed
        self._client = client
        self._recorder = recorder
        self._warned_of = -math.inf  # when the last reported collective began

    def check(self) -> None:
        """Raises the generation's failure, if it has failed; never waits.

        Raises:
            RankFailed, CollectiveTimeout: the failure.
            RendezvousError: the server is gone.
        """
        try:
            self._client.check()
        except (RankFailed, CollectiveTimeout, RendezvousError):
            self.was_raised = True
            raise

    def await_cause(self, seconds: float, check: Callable[[], None] | None = None) -> None:
        """Raises the failure if it arrives within `seconds`: this rank has already seen a consequence of it.

        Args:
            seconds: how long to wait.
            check: a function that raises the failure, if it has arrived; None is the method `check`.
        """
        await_cause(seconds, check or self.check)

    def failure(self) -> RankFailed | CollectiveTimeout | None:
        """Returns the generation's failure, or None."""
        try:
            self.check()
        except (RankFailed, CollectiveTimeout) as failure:
            return failure
        except GradsyncError:
            pass  # the server is gone, or this rank has left it
        return None

    def warn(self, waited_seconds: float, missing: Sequence[int] | None, entry: Entry | None = None) -> None:
        """Reports a wait of 5 s or more to the server, which logs it; once for each collective or message.

        Args:
            waited_seconds: how long this rank has waited.
            missing: the world ranks that it waits for; None if it does not know them.
            entry: a launched collective; None is the last begun collective, in which a thread waits.
        """
        if waited_seconds < WARN_AFTER_SECONDS:
            return
        what = entry or self._recorder.last
        if what is not None and what.began > self._warned_of:
            self._warned_of = what.began
            number_and_title = _number_and_title(what, is_launched=entry is not None)
            self._client.report_waiting(self._recorder.group, *number_and_title, waited_seconds, missing)

    def time_out(self, waited_seconds: float, missing: Sequence[int] | None, entry: Entry | None = None) -> NoReturn:
        """Reports that a collective has reached its deadline, and raises the failure. Arguments as for `warn`.

        Raises:
            CollectiveTimeout: on every rank; names the missing ranks.
            RankFailed: a rank has died meanwhile.
            RendezvousError: the server is gone.
        """
        number, what = _number_and_title(entry or self._recorder.last, is_launched=entry is not None)
        self.was_raised = True
        self._client.report_stuck(self._recorder.group, number, what, waited_seconds, missing)


def raise_if_left(
    client: RendezvousClient, name: str, label: str, position: float, ranks: Iterable[int] | None = None
) -> None:
    """Raises RankFailed if another rank has closed a communicator before the collective with number `position`.

    For communicators without shared memory. A rank that closes such a communicator reports it to the server with
    `announce_left`.

    Args:
        client: this rank's client, whose ranks are the communicator's ranks.
        name: the communicator's name, as in `announce_left`.
        label: this rank's name in errors.
        position: the collective's number.
        ranks: the world ranks that this rank needs; None is all.
    """
    wanted = set(client.world_ranks if ranks is None else ranks) - {client.world_ranks[client.rank]}
    for rank, left_at in client.left_ranks(name).items():
        if rank in wanted and left_at <= position:
            raise closed_failure(label, rank)


def closed_failure(label: str, rank: int) -> RankFailed:
    """Returns the error of a collective that needs a rank which has closed the communicator.

    Args:
        label: this rank, e.g. "rank 0/2".
        rank: the world rank that has closed it.
    """
    return RankFailed(
        f"{label}: rank {rank} closed the communicator while this rank still needed it; "
        "check that all ranks run the same number of steps; for uneven data use `with sync.join():`",
        rank=rank,
        phase="collective",
    )


def _number_and_title(entry: Entry | None, *, is_launched: bool) -> tuple[int, str]:
    """Returns the number and the title of a collective for the server. A message's title has the line of code.

    For a collective, the server's report has the line of code of each waiting rank. But each rank waits in another
    message. If two ranks wait for each other, the user needs the lines of both.
    """
    from gradsync.rendezvous.frames import OF_MESSAGES  # imported here to keep the start of a rank short

    if entry is None:
        return OF_MESSAGES, "a collective"
    if not entry.what.is_message:
        return entry.number, entry.title
    site = find_call_site()
    if not site.line:
        return OF_MESSAGES, entry.title
    return OF_MESSAGES, f"{entry.title.removesuffix(')')}, {'launched; by now ' if is_launched else ''}{site})"

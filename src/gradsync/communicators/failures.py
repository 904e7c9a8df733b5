"""Failures of other ranks: a communicator reports long waits to the rendezvous server, and gets failures from it.

The server logs the waits. If one reaches its deadline, it asks every rank for its status, which the functions at the
end of this file return, and sends all ranks one error. A backend may find only a consequence of a failure, such as a
broken connection; then it waits a moment for the server's error, which names the cause (await_cause). Ranks that
disagree on a collective exchange their descriptions of it through the server.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from gradsync.communicators.agreement import Agreement, Description, find_call_site, mismatch
from gradsync.communicators.lifetime import usable_recorders
from gradsync.diagnostics import Entry, FlightRecorder, stack_report
from gradsync.errors import (
    CollectiveTimeout,
    GradsyncError,
    PlanMismatch,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
)

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

WARN_AFTER_SECONDS = 5.0
# The server's error may arrive this much later than a consequence of the failure: a broken connection, an NCCL error.
CAUSE_SECONDS = 2.0
# The same where the cause is a deadline: the server first asks all ranks where they are, for 5 s at most.
VERDICT_SECONDS = 7.0
TEXTS_WITHIN_SECONDS = 5.0  # how long a rank waits for the descriptions of a collective by the other ranks
_STORED_TEXT_SECONDS = 0.25  # after that: how long for each piece of a description that the server has
_CHECK_EVERY_SECONDS = 0.02
_ASK_AGAIN_AFTER_SECONDS = 1.0  # without an answer of the server; then a rank checks for failures

T = TypeVar("T")
_LAST_COLLECTIVES = 8  # of each group, in the report when a collective does not end


def await_cause(seconds: float, check: Callable[[], None]) -> None:
    """Calls `check` again and again for `seconds`: it raises the cause of a failure once that is known."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        time.sleep(_CHECK_EVERY_SECONDS)


class FailureMonitor:
    """Gets failures from the rendezvous server for one communicator, and reports its long waits.

    Args:
        client: this rank's connection to the rendezvous server.
        recorder: the communicator's flight recorder, with an entry for the collective in which this rank waits.

    Attributes:
        was_raised: whether it has raised an error of the server, or that of a lost server; the other ranks get one too.
        has_failed: returns, in 0.1 us, whether the server has sent a failure, or this rank has reported one.
        client: see Args.
        group: the communicator's name.
    """

    def __init__(self, client: RendezvousClient, recorder: FlightRecorder) -> None:
        self.was_raised = False
        self.has_failed = client.has_failed
        self.client = client
        self.group = recorder.group
        self._recorder = recorder
        self._warned_of = -math.inf  # when the last reported collective began

    def check(self) -> None:
        """Raises the failure that the server has sent, if there is one; never waits.

        Raises:
            RankFailed, CollectiveTimeout: the server has sent this failure.
            RendezvousError: the server is gone.
            CommunicatorClosed: this rank has left the server.
        """
        try:
            self.client.check()
        except (RankFailed, CollectiveTimeout, RendezvousError):
            self.was_raised = True
            raise

    def failure(self) -> RankFailed | CollectiveTimeout | None:
        """Returns the failure that the server has sent; None if there is none."""
        try:
            self.check()
        except (RankFailed, CollectiveTimeout) as failure:
            return failure
        except GradsyncError:
            pass  # the server is gone, or this rank has left it
        return None

    @property
    def awaited_message(self) -> str:
        """The title of the message in which a thread waits now; "" if there is none."""
        last = self._recorder.last
        return last.title if last is not None and last.what.is_message and last.ended is None else ""

    def warn(self, waited_seconds: float, missing: Sequence[int] | None, entry: Entry | None = None) -> None:
        """Reports a wait of 5 s or more to the server, which logs it; each wait at most once.

        Args:
            waited_seconds: how long this rank has waited.
            missing: the world ranks that it waits for; None if it does not know them.
            entry: the launched collective whose end it waits for; None: a thread waits in the one that began last.
        """
        if waited_seconds < WARN_AFTER_SECONDS:
            return
        what = entry or self._recorder.last
        if what is not None and what.began > self._warned_of:
            self._warned_of = what.began
            number_and_title = _number_and_title(what, is_launched=entry is not None)
            self.client.report_waiting(self._recorder.group, *number_and_title, waited_seconds, missing)

    def time_out(self, waited_seconds: float, missing: Sequence[int] | None, entry: Entry | None = None) -> NoReturn:
        """Tells the server that a collective has reached its deadline, and raises the error that all ranks get.

        For the arguments see `warn`.

        Raises:
            CollectiveTimeout: it names the missing ranks, if they are known.
            RankFailed: a rank was found dead or stopped (SIGSTOP), or another failure came before.
            RendezvousError: the server is gone.
        """
        number, what = _number_and_title(entry or self._recorder.last, is_launched=entry is not None)
        self.was_raised = True
        self.client.report_stuck(self._recorder.group, number, what, waited_seconds, missing)

    def await_answer(self, ask: Callable[[float], T], timeout_seconds: float, check: Callable[[], None]) -> T:
        """Asks the server until it answers; meanwhile checks for failures, and reports a long wait.

        Args:
            ask: ask(seconds) returns the server's answer, or raises RendezvousTimeout after `seconds`.
            timeout_seconds: how long this rank waits for the answer.
            check: raises the reason if no answer will come.

        Raises:
            CollectiveTimeout, RankFailed, RendezvousError: see time_out.
        """
        began = time.monotonic()
        while True:
            left_seconds = max(began + timeout_seconds - time.monotonic(), 1e-3)
            try:
                return ask(min(left_seconds, _ASK_AGAIN_AFTER_SECONDS))
            except RendezvousTimeout as error:
                check()
                waited_seconds, missing = time.monotonic() - began, error.missing_ranks or None
                if left_seconds <= _ASK_AGAIN_AFTER_SECONDS:
                    self.time_out(waited_seconds, missing)
                self.warn(waited_seconds, missing)


# -- Descriptions of the collectives on which the ranks disagree ------------------------------------------------------


def publish_description(client: RendezvousClient, group: str, position: int, text: str) -> None:
    """Stores this rank's description of an event on the server, for exchange_descriptions on the other ranks.

    It is stored in pieces, of which only the last is shorter than MAX_EVENT_BYTES. Descriptions of the group's earlier
    events go: a rank reads the others' before it begins its next event.

    Args:
        client: this rank's connection to the rendezvous server.
        group: the communicator's name; for messages, with the two ranks.
        position: the event's number in the group, equal on all ranks that disagree on it.
        text: the Description, as text.
    """
    from gradsync.rendezvous.wire import MAX_EVENT_BYTES, event_prefix  # imported here to keep a rank's start short

    client.delete(event_prefix(group, client.world_ranks[client.rank]))
    data = text.encode(errors="replace")
    for number, begin in enumerate(range(0, len(data) + 1, MAX_EVENT_BYTES)):
        key = _piece_key(group, position, client.world_ranks[client.rank], number)
        client.set(key, data[begin : begin + MAX_EVENT_BYTES])


def exchange_mismatch(
    client: RendezvousClient, group: str, position: int, label: str, agreement: Agreement, ranks: Iterable[int]
) -> PlanMismatch:
    """Exchanges the descriptions of an event on which ranks disagree; returns the error that all of them raise.

    Args:
        client, group, position, ranks: see exchange_descriptions.
        label: this rank's name in errors.
        agreement: the event, on this rank.
    """
    text = agreement.described().to_text()
    descriptions = exchange_descriptions(client, group, position, text, ranks)
    return mismatch(label, agreement, descriptions, is_rebuilt=client.generation > 1)


def exchange_descriptions(
    client: RendezvousClient, group: str, position: int, text: str, ranks: Iterable[int]
) -> dict[int, Description]:
    """Exchanges the descriptions of an event on which the ranks disagree, through the server.

    Args:
        client, group, position, text: see publish_description.
        ranks: the world ranks that call this for the event.

    Returns:
        Each rank's description; for one that does not arrive, the reason: the ranks raise PlanMismatch in any case.
    """
    own, deadline = client.world_ranks[client.rank], time.monotonic() + TEXTS_WITHIN_SECONDS
    found = {own: Description.from_text(text)}
    with contextlib.suppress(GradsyncError):  # the other ranks then raise their errors without this description
        publish_description(client, group, position, text)
    for rank in ranks:
        if rank != own:
            try:
                found[rank] = Description.from_text(_read_description(client, group, position, rank, deadline))
            except GradsyncError as error:
                found[rank] = Description(f"(no description: {error})")
    return found


def _read_description(client: RendezvousClient, group: str, position: int, rank: int, deadline: float) -> str:
    from gradsync.rendezvous.wire import MAX_EVENT_BYTES

    pieces: list[bytes] = []
    while not pieces or len(pieces[-1]) == MAX_EVENT_BYTES:
        key = _piece_key(group, position, rank, len(pieces))
        seconds = max(deadline - time.monotonic(), _STORED_TEXT_SECONDS)
        pieces.append(client.get(key, timeout_seconds=seconds))
    return b"".join(pieces).decode(errors="replace")


def _piece_key(group: str, position: int, rank: int, number: int) -> str:
    from gradsync.rendezvous.wire import event_key

    key = event_key(group, position, rank)
    return key if number == 0 else f"{key}/{number}"


# -- Communicators that a rank has closed -----------------------------------------------------------------------------


def raise_if_left(
    client: RendezvousClient,
    name: str,
    label: str,
    position: float,
    ranks: Iterable[int] | None = None,
    message: str = "",
) -> None:
    """Raises RankFailed if another rank has closed the communicator without calling collective number `position`.

    For NCCL and MPI, where a rank that closes tells the server by `announce_left`.

    Args:
        client: this rank's rendezvous client, whose members are the communicator's ranks.
        name: the communicator's name for `announce_left`.
        label: this rank's name in errors.
        position: the collective's number.
        ranks: the world ranks that this rank needs, read after the server's answer; None: all.
        message: see closed_failure.
    """
    left = client.left_ranks(name)
    wanted = set(client.world_ranks if ranks is None else ranks) - {client.world_ranks[client.rank]}
    for rank, left_at in left.items():
        if rank in wanted and left_at <= position:
            raise closed_failure(label, rank, message)


def closed_failure(label: str, rank: int, message: str = "") -> RankFailed:
    """Returns the error for a collective or message that needs a rank which has closed the communicator.

    Args:
        label: this rank's name in errors, e.g. "rank 0/2".
        rank: the world rank that has closed it.
        message: the title of the message; "" for a collective.
    """
    what = f"rank {rank} closed the communicator while this rank still needed it"
    if message:
        text = f"{what} for {message}; check that each message is sent, and received, as often as on the other rank"
    else:
        text = f"{what}; check that all ranks run the same number of steps; for uneven data see docs/uneven.md"
    return RankFailed(f"{label}: {text}", rank=rank, phase="collective")


def _number_and_title(entry: Entry | None, *, is_launched: bool) -> tuple[int, str]:
    """Returns the number and the title of a collective or message, for the server's report.

    The title of a message has the program's line of code, which the server does not add: two ranks that wait for each
    other wait in different messages, and the user needs both lines.
    """
    from gradsync.rendezvous.wire import OF_MESSAGES  # imported here to keep the start of a rank short

    if entry is None:
        return OF_MESSAGES, "a collective"
    if not entry.what.is_message:
        return entry.number, entry.title
    site = find_call_site()
    if not site:
        return OF_MESSAGES, entry.title
    state = "launched; the program is now " if is_launched else ""
    return OF_MESSAGES, f"{entry.title.removesuffix(')')}, {state}{site})"


# -- The status of this rank, for the report when a collective does not end -------------------------------------------
# Any thread may call these.


def positions() -> dict[str, int]:
    """Returns how many collectives this rank has begun, by reported group."""
    return {recorder.group: recorder.begun for recorder in _reported_recorders()}


def status_report() -> tuple[str, dict[str, list[tuple[int, int, str, bool]]]]:
    """Returns the last collectives of each reported group (see _reported_recorders).

    Returns:
        Text, which also has this process's Python stacks; and, by group, the same collectives as data, to compare with
        other ranks': number, digest, title, and whether it is still running.
    """
    from gradsync.rendezvous.wire import MAX_CALL_BYTES, MAX_STATUS_CALLS, clip_text

    recorders = _reported_recorders()
    calls: dict[str, list[tuple[int, int, str, bool]]] = {}
    for recorder in recorders:
        collectives = [entry for entry in recorder.entries() if not entry.what.is_message]
        calls[recorder.group] = [
            (entry.number, entry.what.digest, clip_text(entry.what.headline(), MAX_CALL_BYTES), entry.ended is None)
            for entry in collectives[-(MAX_STATUS_CALLS // len(recorders)) :]
        ]
    return "\n".join([*map(_collectives, recorders), stack_report()]), calls


def _reported_recorders() -> list[FlightRecorder]:
    """Returns the flight recorders of groups with several ranks, the last used first.

    There are at most MAX_STATUS_GROUPS: a message to the server has no room for more.
    """
    from gradsync.rendezvous.wire import MAX_STATUS_GROUPS  # imported here to keep the start of a rank short

    recorders = [r for r in usable_recorders() if r.world_size > 1]
    return sorted(recorders, key=_last_used, reverse=True)[:MAX_STATUS_GROUPS]


def _last_used(recorder: FlightRecorder) -> float:
    """Returns when the group's last collective ended; infinity if it is still running, 0 if there was none."""
    last = recorder.last
    return 0.0 if last is None else last.ended or math.inf


def _collectives(recorder: FlightRecorder) -> str:
    if recorder.last is None:
        return f"no collective of group {recorder.group!r} yet"
    last = recorder.describe(_LAST_COLLECTIVES).replace("\n", "\n  ")
    return f"collectives of group {recorder.group!r}, newest first:\n  {last}"

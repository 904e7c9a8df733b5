"""Requests of one client: asked by any of its threads, answered or failed by a deadline.

Sits between `client`, which offers the calls, and `client_connection` and `inbox`, which move the messages. A
failure is sticky: once the generation has failed or the server is gone, every later request raises the same error.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import os
import time
from functools import partial
from typing import Any, NoReturn

from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    RendezvousError,
    RendezvousTimeout,
    name_ranks,
)
from gradsync.rendezvous.answers import result_of
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.followers import Followers
from gradsync.rendezvous.inbox import Inbox, Pending
from gradsync.rendezvous.liveness import Liveness
from gradsync.rendezvous.messages import (
    MAX_RANKS,
    MAX_WHAT_BYTES,
    FieldError,
    FrameType,
    Message,
    clip_text,
)
from gradsync.rendezvous.pushes import Pushes
from gradsync.rendezvous.self_report import SelfReport

_GRACE_SECONDS = 2.0  # how long after its deadline a wait still listens for the server's own, better answer
_AT_ONCE_SECONDS = 30.0  # for requests that the server answers at once
_VERDICT_WITHIN_SECONDS = 1.0
_GOODBYE_SECONDS = 1.0
_MAX_TIMEOUT_SECONDS = 1e9


def check_timeout(timeout_seconds: float) -> float:
    """Returns the timeout.

    Raises:
        InvalidArgument: it is not a finite number of seconds from 0.
    """
    valid = isinstance(timeout_seconds, (int, float)) and 0 <= timeout_seconds <= _MAX_TIMEOUT_SECONDS
    if not valid:  # NaN and infinity fail the comparison too
        raise InvalidArgument(f"timeout_seconds needs a finite number from 0, got {timeout_seconds!r}")
    return timeout_seconds


class RequestChannel:
    """Asks requests over one connection.

    Args:
        connection: authenticated.
        who: the rank as messages name it, e.g. "rank 1/4".

    Attributes:
        followers: who answers the questions of other ranks.
        self_report: who answers for this rank, when another one misses it.
        has_reported: whether the server has taken this rank's word that the generation has failed.
    """

    def __init__(self, connection: ClientConnection, who: str) -> None:
        self.followers = Followers(connection, who)
        self.self_report = SelfReport(connection)
        self._connection = connection
        self._who = who
        pushes = Pushes(self.followers, self.self_report)
        self._inbox = Inbox(connection, who, pushes.answer)
        self._liveness = Liveness(connection, self._inbox, self.self_report, who)
        self._pid = os.getpid()
        self.has_reported = False

    @property
    def is_seated(self) -> bool:
        """Whether the server has accepted this rank's join (which may still wait for others)."""
        return self._inbox.server is not None

    def begin_heartbeats(self, interval_seconds: float) -> None:
        """Lets the server hear of this rank, from an interval after it is seated until the end."""
        self._liveness.start(interval_seconds)

    def ask(
        self,
        operation: str,
        timeout_seconds: float,
        frame_type: FrameType,
        *fields: Any,
        shown_seconds: float | None = None,
    ) -> Any:
        """Asks a request that may wait, and returns its result.

        Args:
            operation: what messages call it.
            timeout_seconds: the deadline, which the server keeps; sent as the last field.
            frame_type, fields: the request.
            shown_seconds: the deadline that messages name, where the caller's was longer.

        Raises:
            InvalidArgument, RendezvousError, RendezvousTimeout, RankFailed, CommunicatorClosed: as the calls
                of `RendezvousClient` say.
        """
        timeout_ms = math.ceil(check_timeout(timeout_seconds) * 1000.0)
        deadline = time.monotonic() + timeout_seconds
        shown = timeout_seconds if shown_seconds is None else shown_seconds
        return self._exchange(operation, deadline + _GRACE_SECONDS, shown, frame_type, *fields, timeout_ms)

    def ask_at_once(self, operation: str, frame_type: FrameType, *fields: Any) -> Any:
        """Asks a request that the server answers at once, and returns its result. Raises as `ask`."""
        listen_until = time.monotonic() + _AT_ONCE_SECONDS + _GRACE_SECONDS
        return self._exchange(operation, listen_until, _AT_ONCE_SECONDS, frame_type, *fields)

    def has_failed(self) -> bool:
        """Whether the sticky failure is there, or will be in a moment; reads nothing, and costs next to nothing."""
        return self._inbox.failure is not None or self.has_reported

    def check(self) -> None:
        """Raises the sticky failure, after reading what has come in; never waits, one poll call when idle."""
        inbox = self._inbox
        if inbox.failure is None:
            inbox.poll()
            if self._connection.has_unsent:
                self._send_leftovers()
        if inbox.failure is not None:  # asked here: this runs inside spin loops
            inbox.raise_failure()

    def forget(self, scope: str, ranks: list[int] | None) -> None:
        """Tells the server that this rank is done with a name, without waiting for an answer."""
        if self._inbox.failure is None and os.getpid() == self._pid:
            try:
                self._connection.post(FrameType.FORGET, scope, ranks)
            except StreamEnded as error:
                self._inbox.lose(error)

    def report_waiting(
        self,
        group: str,
        ranks: list[int] | None,
        position: int,
        what: str,
        waited_seconds: float,
        missing: list[int] | None,
    ) -> None:
        """Tells the server that this rank waits for others in a collective, without waiting for an answer."""
        self._inbox.raise_failure()
        self._connection.post(FrameType.WAITING, *_wait_fields(group, ranks, position, what, waited_seconds, missing))

    def report_absence(
        self,
        group: str,
        ranks: list[int] | None,
        position: int,
        what: str,
        waited_seconds: float,
        missing: list[int] | None,
    ) -> NoReturn:
        """Tells the server that the others did not come in time, and raises its verdict."""
        fields = _wait_fields(group, ranks, position, what, waited_seconds, missing)
        listen_until = time.monotonic() + _VERDICT_WITHIN_SECONDS
        with contextlib.suppress(RendezvousTimeout):
            operation = f"reporting who is absent from {what}"
            self._exchange(operation, listen_until, _VERDICT_WITHIN_SECONDS, FrameType.ABSENT, *fields)
        self._inbox.raise_failure()
        whom = f" for {name_ranks(missing)}" if missing else ""
        raise CollectiveTimeout(
            f"{self._who}: waited {waited_seconds:.3g} s in {what}{whom}; where the others are is not known: "
            f"the rendezvous server at {self._connection.address} did not answer within {_VERDICT_WITHIN_SECONDS:g} s",
            missing_ranks=tuple(missing or ()),
        )

    def close(self) -> None:
        """Says goodbye, waits briefly until the server has heard it, and closes. Idempotent."""
        if os.getpid() != self._pid:
            self.abandon()
            return
        failure = self._inbox.failure
        if isinstance(failure, CommunicatorClosed):
            return
        self._liveness.end()
        self._inbox.stop(self._closed_error())
        # Who has lost the server has failed: a goodbye that still reached it would hide that from the others.
        if not isinstance(failure, RendezvousError):
            self._say_goodbye()
        self._connection.shut_down()
        self._inbox.await_idle()
        self._liveness.await_end()
        self._connection.close()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _GOODBYE_SECONDS
        with contextlib.suppress(RendezvousError):
            self._connection.send(deadline, FrameType.BYE)
            # The server closes in answer: from then on this rank may join the next generation.
            self._inbox.await_end(deadline)

    def abandon(self) -> None:
        """Closes the descriptor; in the child of a fork without any I/O, and without a lock: it may not own them."""
        self._inbox.failure = self._closed_error()
        if os.getpid() == self._pid:
            self._liveness.end()
            self._connection.shut_down()
            self._liveness.await_end()
        self._connection.close()

    def _closed_error(self) -> CommunicatorClosed:
        return CommunicatorClosed(f"{self._who}: this rendezvous client is closed; connect again to join anew")

    def _exchange(
        self, operation: str, listen_until: float, shown_seconds: float, frame_type: FrameType, *fields: Any
    ) -> Any:
        """Sends one request and waits for its answer."""
        if os.getpid() != self._pid:
            raise CommunicatorClosed(f"{self._who}: this rendezvous client belongs to the process that made it")
        self._inbox.raise_failure()
        pending = Pending()
        try:
            message = self._send_and_wait(pending, listen_until, frame_type, *fields)
        except FieldError as error:
            raise InvalidArgument(f"{self._who}: {operation}: {error}") from None
        except GradsyncError:
            raise
        except BaseException:  # KeyboardInterrupt above all: the server must not count this rank as waiting
            self._cancel(pending)
            raise
        finally:
            self._inbox.forget(pending)
        if message is None:
            self._cancel(pending)
            raise RendezvousTimeout(
                f"{self._who}: {operation} reached its deadline of {shown_seconds:.3g} s, "
                f"and the rendezvous server at {self._connection.address} did not answer"
            )
        return result_of(message, self._who, operation, shown_seconds)

    def _send_and_wait(self, pending: Pending, deadline: float, frame_type: FrameType, *fields: Any) -> Message | None:
        # Behind the join, and not with a later message: a rank that is stopped in between would never be missed.
        then = self.self_report.introduction() if frame_type is FrameType.JOIN else ()
        try:
            self._connection.send(
                deadline, frame_type, *fields, announce=partial(self._inbox.expect, pending), then=then
            )
        except StreamEnded as error:
            raise copy.copy(self._inbox.lose(error)) from error
        return self._inbox.await_answer(pending, deadline)

    def _send_leftovers(self) -> None:
        try:
            self._connection.flush()
        except StreamEnded as error:
            self._inbox.lose(error)

    def _cancel(self, pending: Pending) -> None:
        """Withdraws a request that nobody waits for any more."""
        if pending.sequence is not None:
            with contextlib.suppress(RendezvousError):
                self._connection.post(FrameType.CANCEL, pending.sequence)


def _wait_fields(
    group: str,
    ranks: list[int] | None,
    position: int,
    what: str,
    waited_seconds: float,
    missing: list[int] | None,
) -> tuple[Any, ...]:
    waited_ms = max(0, math.ceil(waited_seconds * 1000.0))
    if len(ranks or ()) + len(missing or ()) > MAX_RANKS:  # both lists might not fit one frame
        ranks = None
    return group, ranks, operator.index(position), clip_text(what, MAX_WHAT_BYTES), waited_ms, missing

"""Requests of one client: asked one at a time, answered or failed by a deadline.

Sits between `client`, which offers the calls, and `client_connection`, which moves the messages. Holds what
makes a failure sticky: once the generation has failed or the server is gone, every later request raises the
same error.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from gradsync.errors import (
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
)
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.messages import (
    INVALID,
    MAX_PHASE_BYTES,
    TO_GENERATION,
    FieldError,
    FrameType,
    Message,
    clip_text,
)
from gradsync.rendezvous.wire import FrameError

_GRACE_SECONDS = 2.0  # how long after its deadline a wait still listens for the server's own, better answer
_AT_ONCE_SECONDS = 30.0  # for requests that the server answers at once
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
    """Asks requests over one connection, for one thread at a time.

    Args:
        connection: authenticated.
        who: the rank as messages name it, e.g. "rank 1/4".

    Attributes:
        is_seated: whether the server has accepted this rank's join (which may still wait for others).
    """

    def __init__(self, connection: ClientConnection, who: str) -> None:
        self._connection = connection
        self._who = who
        self._turn = threading.Lock()  # held for a whole request, or while reading
        self._send_turn = threading.Lock()  # held while sending: a goodbye may interrupt a waiting request
        self._poll_input = connection.poll_input
        self._failure: GradsyncError | None = None
        self._phase: str | None = None
        self._sent_phase: str | None = None
        self._pid = os.getpid()
        self.is_seated = False

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
        deadline = time.monotonic() + check_timeout(timeout_seconds)
        shown = timeout_seconds if shown_seconds is None else shown_seconds
        with self._my_turn(operation, deadline):
            left_ms = max(0, math.ceil((deadline - time.monotonic()) * 1000.0))
            return self._exchange(operation, deadline, shown, frame_type, *fields, left_ms)

    def ask_at_once(self, operation: str, frame_type: FrameType, *fields: Any) -> Any:
        """Asks a request that the server answers at once, and returns its result. Raises as `ask`."""
        deadline = time.monotonic() + _AT_ONCE_SECONDS
        with self._my_turn(operation, deadline):
            return self._exchange(operation, deadline, _AT_ONCE_SECONDS, frame_type, *fields)

    def check(self) -> None:
        """Raises the sticky failure, after reading what has come in; never waits, one poll call when idle."""
        if self._failure is None:
            # A thread that is inside a request reads the connection itself, and will see what comes.
            if not self._turn.acquire(False):
                return
            try:
                if self._poll_input(0):
                    self._drain()
            finally:
                self._turn.release()
        if self._failure is not None:
            raise copy.copy(self._failure)

    def set_phase(self, phase: str) -> None:
        """Tells the server what this rank does now, without waiting for an answer."""
        self._phase = clip_text(phase, MAX_PHASE_BYTES)
        # Another thread's request, or a full socket, delays the news until the next request.
        if self._phase != self._sent_phase and self._failure is None and self._turn.acquire(False):
            try:
                self._send_phase()
            except StreamEnded as error:
                self._break(error)
            finally:
                self._turn.release()

    def close(self) -> None:
        """Says goodbye, waits briefly until the server has heard it, and closes. Idempotent."""
        if os.getpid() != self._pid:
            self.abandon()
            return
        if isinstance(self._failure, CommunicatorClosed):
            return
        self._failure = self._closed_error()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        idle = self._turn.acquire(False)
        try:
            with contextlib.suppress(RendezvousError):
                with self._send_turn:
                    self._connection.send(deadline, FrameType.BYE)
                # The server closes in answer: from then on this rank may join the next generation.
                while idle and self._connection.receive(deadline) is not None:
                    pass
            self._connection.shut_down()
            if not idle:  # the thread that waits in a request is woken by the shut down
                self._turn.acquire()
        finally:
            self._turn.release()
        self._connection.close()

    def abandon(self) -> None:
        """Closes the descriptor without any I/O, and without a lock: the child of a fork may not own them."""
        self._failure = self._closed_error()
        self._connection.close()

    def _closed_error(self) -> CommunicatorClosed:
        return CommunicatorClosed(f"{self._who}: this rendezvous client is closed; connect again to join anew")

    @contextlib.contextmanager
    def _my_turn(self, operation: str, deadline: float) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise CommunicatorClosed(f"{self._who}: this rendezvous client belongs to the process that made it")
        left_seconds = max(0.0, deadline - time.monotonic())
        if not self._turn.acquire(timeout=min(left_seconds, threading.TIMEOUT_MAX)):
            raise RendezvousTimeout(f"{self._who}: {operation} found this client in use by another thread all the time")
        try:
            if self._failure is not None:
                raise copy.copy(self._failure)
            yield
        finally:
            self._turn.release()

    def _exchange(
        self, operation: str, deadline: float, shown_seconds: float, frame_type: FrameType, *fields: Any
    ) -> Any:
        """Sends one request and waits for its answer; the turn is held."""
        sequence: int | None = None
        try:
            self._send_phase()
            with self._send_turn:
                sequence = self._connection.send(deadline + _GRACE_SECONDS, frame_type, *fields)
            message = self._await_answer(sequence, deadline + _GRACE_SECONDS)
        except FieldError as error:
            raise InvalidArgument(f"{self._who}: {operation}: {error}") from None
        except (StreamEnded, FrameError) as error:
            self._break(error)
            raise copy.copy(self._failure or error) from error
        except GradsyncError:
            raise
        except BaseException:  # KeyboardInterrupt above all: the server must not count this rank as waiting
            self._cancel(sequence)
            raise
        if message is None:
            self._cancel(sequence)
            raise RendezvousTimeout(
                f"{self._who}: {operation} reached its deadline of {shown_seconds:.3g} s, "
                f"and the rendezvous server at {self._connection.address} did not answer"
            )
        return self._result_of(message, operation, shown_seconds)

    def _send_phase(self) -> None:
        if self._phase is not None and self._phase != self._sent_phase:
            with self._send_turn:
                if self._connection.post(FrameType.SET_PHASE, self._phase):
                    self._sent_phase = self._phase

    def _await_answer(self, sequence: int, deadline: float) -> Message | None:
        """Returns the answer to this request, or None when the deadline comes first."""
        while (message := self._connection.receive(deadline)) is not None:
            self._notice_failure(message)
            if self._failure is not None:
                raise copy.copy(self._failure)
            if message.type is FrameType.SEATED:
                self.is_seated = True
            elif message.fields[0] == sequence:
                return message
            # Else the late answer to a request that was given up: nobody waits for it.
        return None

    def _cancel(self, sequence: int | None) -> None:
        """Withdraws a request that nobody waits for any more."""
        if sequence is None:
            return
        with contextlib.suppress(RendezvousError), self._send_turn:
            self._connection.post(FrameType.CANCEL, sequence)

    def _drain(self) -> None:
        """Reads what has come in while no request waits: pushes, and answers that nobody waits for."""
        try:
            while self._failure is None and (message := self._connection.take_buffered()) is not None:
                self._notice_failure(message)
        except (StreamEnded, FrameError) as error:
            self._break(error)

    def _notice_failure(self, message: Message) -> None:
        if message.type is FrameType.FAILED and message.fields[0] == TO_GENERATION and self._failure is None:
            self._failure = self._rank_failed(message, "")

    def _break(self, error: RendezvousError) -> None:
        """Remembers that the connection is of no more use; an earlier failure stays."""
        if self._failure is None:
            self._failure = RendezvousError(
                f"{self._who}: the rendezvous server at {self._connection.address} is gone ({error}); "
                "it was stopped or killed, or the network between failed"
            )

    def _rank_failed(self, message: Message, operation: str) -> RankFailed:
        _, rank, phase, text = message.fields
        return RankFailed(f"{self._who}: {operation}{text}", rank=rank, phase=phase)

    def _result_of(self, message: Message, operation: str, shown_seconds: float) -> Any:
        """Returns the value of an answer, or raises the error that it stands for."""
        if message.type is FrameType.REPLY:
            return message.fields[1]
        if message.type is FrameType.FAILED:
            raise self._rank_failed(message, f"{operation}: ")
        if message.type is FrameType.TIMED_OUT:
            _, missing, where = message.fields
            raise RendezvousTimeout(
                f"{self._who}: {operation} reached its deadline of {shown_seconds:.3g} s; "
                + (f"missing: {where}" if missing else "no rank has set it"),
                missing_ranks=tuple(missing),
            )
        _, kind, text = message.fields
        error = InvalidArgument if kind == INVALID else RendezvousError
        raise error(f"{self._who}: {operation}: {text}")

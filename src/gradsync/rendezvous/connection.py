"""A rank's connection to the rendezvous server. One thread owns the socket; nobody else reads or writes it.

Callers append to a deque and wake that thread, so that nothing can tear a frame, wait for a lock in a signal handler,
or need repair after Ctrl-C. Each caller that waits for an answer waits on a lock of its own: an Event's inner lock
would stay held if Ctrl-C arrived when the wait begins. A second thread runs the callbacks that describe this rank,
which may take time. After a fork the child closes its copies of the descriptors.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Any, NamedTuple

from gradsync.arguments import check_seconds, is_loopback, parse_address
from gradsync.errors import (
    AuthenticationError,
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
    describe,
)
from gradsync.machine import start_thread
from gradsync.rendezvous.sockets import ConnectionLost, receive_some, send_some, tune_stream
from gradsync.rendezvous.wire import (
    MAX_FRAME_BYTES,
    MAX_REASON_BYTES,
    MAX_REPORT_BYTES,
    MAX_STATUS_GROUPS,
    SILENT,
    STUCK,
    Calls,
    Channel,
    FrameError,
    Kind,
    Message,
    Status,
    clip_text,
)

AT_ONCE_SECONDS = 30.0  # the deadline of requests that do not wait for other ranks
#: The longest wait for the failure after this rank has reported a stuck collective: the server asks all ranks first.
FAILURE_WITHIN_SECONDS = 10.0
_ANSWERED_WITHIN_SECONDS = 2.0  # how long after a deadline the server's answer, which names the missing ranks, may come
_LEAVE_SECONDS = 1.0
_BEAT_SECONDS = 2.0
_HANDSHAKE_SECONDS = 5.0
NO_ANSWER = "no answer to the handshake: a busy server, or another service"
# A flooded server drops its oldest unauthenticated connections, and another service ends each. One attempt cannot tell
# which it was, so a client tries for several seconds.
_FLOOD_SECONDS = 5.0
_NOTICE_SECONDS = 5.0
_DIAL_SECONDS = 3.0
_FIRST_BACKOFF_SECONDS, _LAST_BACKOFF_SECONDS = 0.005, 0.5
_THREAD_END_SECONDS = 0.2

NO_REPORT = "(it reports nothing)"

#: Called in a thread of its own when the world has failed, or its server is gone, unless a collective only took too
#: long. A launcher that shares the run with other launchers sets it in its ranks, because nobody else tells it.
on_failure: Callable[[GradsyncError], object] | None = None
#: Called in a thread of its own when the server has ended the connection: it is gone, or the others go on without this
#: rank, which did not answer them. For a launcher that goes on without ranks that fail.
on_loss: Callable[[GradsyncError], object] | None = None

_log = logging.getLogger("gradsync.rendezvous")


class _Pending:
    """A request that waits for its answer; `is_over` is released when the answer or a failure arrives."""

    __slots__ = ("answer", "is_over", "parts")

    def __init__(self) -> None:
        self.is_over = threading.Lock()
        self.is_over.acquire()
        self.answer: list[Any] | None = None  # the fields of the last REPLY
        self.parts: list[Any] = []  # the values of those before


class Callbacks(NamedTuple):
    """What describes this rank to the other ranks, see `RendezvousClient.describe_with`."""

    positions: Callable[[], Mapping[str, int]] = dict
    report: Callable[[], tuple[str, Calls]] = lambda: (NO_REPORT, {})


class Connection:
    """An authenticated connection to a rendezvous server; made by `dial`, shared by a client and its groups.

    Args:
        stream: the connected, non-blocking socket.
        channel: its channel, whose handshake has ended.
        address: the server's address, for messages.
        label: this rank in messages, e.g. "rank 1/4".

    Attributes:
        address, label: the arguments.
        failure: the error that every request raises from now on, or None. The first failure stays until `close` or
            `abandon` replaces it.
        is_accepted: whether the server knows that this rank joins, or has answered a request.
        departed: for each group the ranks that have left it, with the number of collectives that each had begun.
        if_lost: what the error adds when the server is gone.
        callbacks: what describes this rank to the other ranks.
    """

    def __init__(self, stream: socket.socket, channel: Channel, address: str, label: str) -> None:
        self.address = address
        self.label = label
        self.failure: GradsyncError | None = None
        self.if_lost = ""
        self.departed: dict[str, dict[int, int]] = {}
        self.callbacks = Callbacks()
        self._stream = stream
        self._channel = channel
        self._outbox: deque[tuple[Any, ...]] = deque()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self.is_accepted = self._has_joined = self._has_reported = self._is_ending = False
        self._questions: Queue[bool] = Queue()  # True: the server asks for this rank's status
        self._threads = [
            threading.Thread(target=run, name=f"gradsync-{name}", daemon=True)
            for name, run in (("connection", self._run), ("answers", self._answer_questions))
        ]
        _connections.add(self)
        for thread in self._threads:
            start_thread(thread)

    # -- Requests ------------------------------------------------------------------------------------------------

    def ask(
        self, operation: str, timeout_seconds: float, kind: Kind, *fields: Any, shown_seconds: float | None = None
    ) -> list[Any]:
        """Sends a request, waits for the answer, and returns its values.

        Args:
            operation: the request's name in messages.
            timeout_seconds: the caller's deadline. The server answers at the deadline, and names the missing ranks.
            kind, fields: the request; of those that wait for other ranks, the last field is the deadline, and left out.
            shown_seconds: the timeout to name in error texts, if it is not `timeout_seconds`.

        Raises:
            InvalidArgument, RendezvousError, RendezvousTimeout, RankFailed, CollectiveTimeout, CommunicatorClosed: see
                the methods of `RendezvousClient`.
        """
        check_seconds(f"{self.label}: {operation}", "timeout_seconds", timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        shown = timeout_seconds if shown_seconds is None else shown_seconds
        if kind in (Kind.JOIN, Kind.GET, Kind.EXCHANGE):
            fields = (*fields, int(min(timeout_seconds, 10**9) * 1000))
        self.raise_failure()
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        try:
            if self.failure is None:  # else it came before the request was registered
                self._put(kind, number, *fields)
                pending.is_over.acquire(timeout=_until(deadline + _ANSWERED_WITHIN_SECONDS))
        except BaseException as error:
            if kind is Kind.JOIN and not isinstance(error, GradsyncError):  # the others must not wait for this rank
                self.report_failure(describe(error), None)
            raise
        finally:
            self._pending.pop(number, None)
        if pending.answer is not None:
            how = f"reached its deadline of {shown:.3g} s"
            if time.monotonic() < deadline - 0.01:
                how = "ended, because the rank that hosts the server reached its deadline"
            return self._result(pending, operation, how)
        self.raise_failure()
        raise RendezvousTimeout(
            f"{self.label}: {operation} reached its deadline of {shown:.3g} s, and the rendezvous server at "
            f"{self.address} did not answer"
        )

    def post(self, kind: Kind, *fields: Any) -> None:
        """Sends a message that needs no answer; never waits, and is safe in a signal handler."""
        self._put(kind, 0, *fields)

    def _put(self, *message: Any) -> None:
        self._outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so that the thread wakes anyway; or the thread has ended
            self._wake_writer.send(b"w")

    def has_failed(self) -> bool:
        """Returns whether requests fail now, or this rank has reported a failure. Takes about 0.1 us."""
        return self.failure is not None or self._has_reported

    def raise_failure(self) -> None:
        """Raises `failure`, if there is one."""
        if self.failure is not None:
            raise copy.copy(self.failure) from self.failure.__cause__

    def report_failure(self, reason: str, culprit: int | None) -> None:
        """Fails the generation; does not wait for an answer, because the caller is handling an error."""
        if self.failure is None:
            self._has_reported = True
            self.post(Kind.FAIL, clip_text(reason, MAX_REASON_BYTES), culprit)

    def await_failure(self, kind: Kind, *fields: Any) -> None:
        """Sends a message that makes the server fail the generation; waits for the failure and raises it.

        Returns if no failure arrives within FAILURE_WITHIN_SECONDS.
        """
        self.raise_failure()
        number, pending = next(self._numbers), _Pending()  # the server sends no answer; the failure ends this wait
        self._pending[number] = pending
        try:
            if self.failure is None:
                self.post(kind, *fields)
                pending.is_over.acquire(timeout=FAILURE_WITHIN_SECONDS)
        finally:
            self._pending.pop(number, None)
        self.raise_failure()

    def _result(self, pending: _Pending, operation: str, how_ended: str) -> list[Any]:
        """Returns the values of an answer, or raises its error."""
        assert pending.answer is not None
        status, _, *values = pending.answer
        if status == Status.OK:
            return [[*pending.parts, *values[0]]] if pending.parts else values
        if status == Status.FAILED:
            raise failure_of(values, self.label, f"{operation}: ")
        if status == Status.TIMED_OUT:
            missing, where = values
            raise RendezvousTimeout(
                f"{self.label}: {operation} {how_ended}; "
                + (f"missing: {where}" if missing else "no rank has set the key"),
                missing_ranks=tuple(missing),
                missing=where if missing else "",
            )
        error = InvalidArgument if status == Status.INVALID else RendezvousError
        raise error(f"{self.label}: {operation}: {values[0]}")

    # -- The thread that owns the socket -------------------------------------------------------------------------

    def _run(self) -> None:
        waiter, stream, beat_at = select.poll(), self._stream, time.monotonic() + _BEAT_SECONDS
        waiter.register(self._wake_reader, select.POLLIN)
        try:
            while True:
                is_ending = self._is_ending  # what was put in before that is still sent
                self._seal()
                outgoing = self._channel.outgoing
                if outgoing:
                    send_some(stream, outgoing)
                if is_ending and (outgoing or not self._outbox):
                    return
                waiter.register(stream, select.POLLIN | (select.POLLOUT if outgoing else 0))
                has_more = self._outbox and not outgoing
                ready = waiter.poll(0.0 if has_more else max(beat_at - time.monotonic(), 0.0) * 1000.0 + 1.0)
                for descriptor, _ in ready:
                    if descriptor == self._wake_reader.fileno():
                        self._wake_reader.recv(4096)
                    else:
                        self._receive()
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + _BEAT_SECONDS
                    # After a failure, too: who does not come to a rebuild may have been stopped.
                    if self._has_joined and not isinstance(self.failure, CommunicatorClosed):
                        self.post(Kind.BEAT, dict(self._positions()))
        except (ConnectionLost, FrameError, OSError, ValueError) as error:
            if isinstance(error, ConnectionLost):  # perhaps in a send: the server's last words may have arrived
                with contextlib.suppress(Exception):
                    while self._receive():
                        pass
            self._lose(error if isinstance(error, RendezvousError) else RendezvousError(str(error)))
        except Exception as error:  # no caller would see the error
            _log.exception("%s: the thread of the rendezvous client has failed", self.label)
            self._lose(RendezvousError(f"internal error: {describe(error)}"))
        finally:
            self._questions.put(False)
            for end in (stream, self._wake_reader, self._wake_writer):
                with contextlib.suppress(OSError):  # the program has closed the descriptor itself
                    end.close()

    def _receive(self) -> bool:
        """Handles what has arrived; returns whether that was something."""
        data = receive_some(self._stream, MAX_FRAME_BYTES)
        for message in self._channel.feed(data):
            self._handle(message)
        return bool(data)

    def _seal(self) -> None:
        """Seals what callers want to send, but no more than the stream takes soon: they may go on adding to it."""
        while self._outbox and len(self._channel.outgoing) < MAX_FRAME_BYTES:
            kind, number, *fields = self._outbox.popleft()
            self._has_joined = self._has_joined or kind is Kind.JOIN
            try:
                self._channel.seal(kind, number, *fields)
            except Exception as error:  # e.g. text that UTF-8 cannot encode
                self._end(number, [Status.INVALID, True, describe(error)])

    def _handle(self, message: Message) -> None:
        """Handles one message of the server. Never waits, and calls no callback."""
        kind, fields = message.kind, message.fields
        if kind is Kind.REPLY:
            if fields[1]:
                self._end(message.request, fields)
            elif message.request in self._pending:
                self.is_accepted = True
                self._pending[message.request].parts += fields[2]
        elif kind is Kind.FAILED:
            self._fail(failure_of(fields, self.label))
        elif kind is Kind.LEFT:
            group, rank, begun = fields
            self.departed.setdefault(group, {})[rank] = begun
        else:
            self._questions.put(True)

    def _end(self, number: int, answer: list[Any] | None) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.answer = answer
            pending.is_over.release()

    def _fail(self, failure: GradsyncError) -> None:
        """Sets `failure` if it is None, and then ends all requests.

        `failure` is set first, so that a request that is registered later finds it, see `ask`.
        """
        if self.failure is None:
            self.failure = failure
            if on_failure is not None and self._has_joined and not isinstance(failure, CollectiveTimeout):
                _start(on_failure, failure)
        for number in list(self._pending):
            self._end(number, None)

    def _lose(self, error: RendezvousError) -> None:
        failure = RendezvousError(
            f"{self.label}: the rendezvous server at {self.address} is gone ({error}); "
            f"it ended or was killed, or the network failed{self.if_lost}"
        )
        failure.__cause__ = error
        self._fail(failure)
        if on_loss is not None and self._has_joined and not isinstance(self.failure, CommunicatorClosed):
            _start(on_loss, self.failure or failure)

    # -- The thread of the callbacks -----------------------------------------------------------------------------

    def _answer_questions(self) -> None:
        while self._questions.get():
            begun = self._positions()
            try:
                text, calls = self.callbacks.report()
            except Exception as error:
                text, calls = f"(its report failed: {describe(error)})", {}
            status = {group: (count, calls.get(group, ())) for group, count in begun.items()}
            self.post(Kind.STATUS, status, clip_text(text, MAX_REPORT_BYTES))

    def _positions(self) -> Mapping[str, int]:
        """Returns the number of collectives that this rank has begun in each group; {} if the callback fails."""
        try:
            return dict(itertools.islice(self.callbacks.positions().items(), MAX_STATUS_GROUPS))
        except Exception:  # the ranks' report shows that the numbers are missing
            return {}

    # -- Closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Sends LEAVE, and waits up to 1 s until the server has read it. Idempotent."""
        failure = self.failure
        if not isinstance(failure, CommunicatorClosed):
            self._fail_as_closed()
            # A rank that has lost the server counts as failed. A LEAVE that still arrives would hide this failure.
            if not isinstance(failure, RendezvousError):
                self.post(Kind.LEAVE, "", None, 0)
                self._await_end(_LEAVE_SECONDS)  # the server answers by closing the connection
        self.abandon()

    def abandon(self) -> None:
        """Closes the connection without LEAVE, after a failure. Idempotent."""
        if not isinstance(self.failure, CommunicatorClosed):
            self._fail_as_closed()
        self._is_ending = True
        self._wake()
        self._await_end(_THREAD_END_SECONDS)
        with contextlib.suppress(OSError):  # its thread has closed the stream already
            self._stream.shutdown(socket.SHUT_RDWR)

    def _await_end(self, seconds: float) -> None:
        current = threading.current_thread()
        for thread in self._threads:
            if thread is not current:
                thread.join(seconds)

    def _fail_as_closed(self) -> None:
        self.failure = CommunicatorClosed(
            f"{self.label}: this rendezvous client is closed; to join again, make a new client with connect"
        )
        self._fail(self.failure)

    def close_copy(self) -> None:
        """Closes a forked child's copies of the descriptors, without I/O."""
        self.failure = CommunicatorClosed(f"{self.label}: this rendezvous client belongs to the process that made it")
        self._pending, self._threads = {}, []
        for end in (self._stream, self._wake_reader, self._wake_writer):
            with contextlib.suppress(OSError):
                end.close()


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    for connection in list(_connections):
        connection.close_copy()
    _connections.clear()


os.register_at_fork(after_in_child=_close_copies)


def _start(hook: Callable[[GradsyncError], object], error: GradsyncError) -> None:
    threading.Thread(target=hook, args=(error,), name="gradsync-failure", daemon=True).start()


def failure_of(fields: list[Any], label: str, operation: str = "") -> GradsyncError:
    """Returns the error of a failure.

    Args:
        fields: its fields in a message.
        label: this rank in messages, e.g. "rank 1/4".
        operation: the name of the request that failed, followed by ": "; "" if the whole generation has failed.
    """
    kind, rank, phase, missing, text = fields
    if kind == STUCK:  # the operation is left out: this rank's own request has nothing to do with the stuck collective
        ordered = tuple(sorted(missing, key=lambda each: (each != rank, each)))  # the cause first
        return CollectiveTimeout(f"{label}: {text}", missing_ranks=ordered)
    return RankFailed(f"{label}: {operation}{text}", rank=rank, phase=phase, was_silent=kind == SILENT)


def _until(deadline: float) -> float:
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


class WrongServer(RendezvousError):
    """What answers at an address is no rendezvous server, or one of another version."""


# -- Connecting to a server -------------------------------------------------------------------------------------------


def dial(
    address: str,
    *,
    secret: bytes,
    deadline: float,
    label: str,
    shown_seconds: float | None = None,
) -> Connection:
    """Connects to a server and authenticates; if no server answers, tries again until the deadline.

    Args:
        address: "host:port" or "[IPv6]:port".
        secret: the run's secret.
        deadline: monotonic seconds.
        label: the caller's name in messages, e.g. "rank 1/4".
        shown_seconds: the timeout to name in error texts; None is the time until the deadline.

    Raises:
        InvalidArgument: the address is malformed.
        RendezvousTimeout: no server was reached by the deadline; the text has the address and the last cause.
        AuthenticationError: the server does not know the secret.
        RendezvousError: another service uses that port, or the server speaks another version of the protocol.
    """
    parse_address(address)
    began = time.monotonic()
    shown_seconds = deadline - began if shown_seconds is None else shown_seconds
    backoff_seconds, notice_at = _FIRST_BACKOFF_SECONDS, began + _NOTICE_SECONDS
    first_ended_at: float | None = None  # when a connection was first ended before the handshake
    while True:
        try:
            stream = _connect(address, deadline)
        except (OSError, ValueError) as error:  # ValueError: the host's name is too long, or has invalid characters
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if getattr(error, "errno", None) == errno.ENETUNREACH and is_loopback(parse_address(address)[0]):
                cause = f"{cause}; the loopback interface is down, try: ip link set lo up"
        else:
            made = _try_handshake(stream, address, secret, deadline, label)
            if isinstance(made, Connection):
                return made
            cause, now = made, time.monotonic()
            if cause != NO_ANSWER:
                first_ended_at = first_ended_at or now
            if first_ended_at is not None and now - first_ended_at >= _FLOOD_SECONDS:
                raise WrongServer(
                    f"{label}: {address} accepts connections but ends each before a handshake ({cause}): "
                    "another service or run holds this port"
                )
        # Jitter, so that ranks that started together do not connect together.
        pause = backoff_seconds * (0.5 + os.urandom(1)[0] / 512)
        now = time.monotonic()
        if now + pause >= deadline:
            raise RendezvousTimeout(
                f"{label}: no rendezvous server at {address} within {shown_seconds:.3g} s; last cause: {cause}",
                cause=cause,
            )
        if now >= notice_at:
            notice_at = now + _NOTICE_SECONDS
            _log.warning("gradsync: %s has not reached the rendezvous server at %s yet: %s", label, address, cause)
        time.sleep(pause)
        backoff_seconds = min(backoff_seconds * 1.5, _LAST_BACKOFF_SECONDS)


def _connect(address: str, deadline: float) -> socket.socket:
    """Returns a connected socket, or raises OSError or ValueError."""
    host, port = parse_address(address)
    # The name is passed as bytes: for text Python loads the tables of international names, which takes milliseconds.
    name: Any = host.encode() if host.isascii() else host
    # At most a quarter of the remaining time: if one address never answers, the host's other addresses are tried too.
    timeout_seconds = max(min(_DIAL_SECONDS, (deadline - time.monotonic()) / 4), 0.001)
    stream = socket.create_connection((name, port), timeout_seconds)
    try:
        # On a free port of the ephemeral range a socket can connect to itself.
        if stream.getsockname() == stream.getpeername():
            raise ConnectionRefusedError("Connection refused (the socket connected to itself)")
        tune_stream(stream)
    except OSError:
        stream.close()
        raise
    return stream


def _try_handshake(stream: socket.socket, address: str, secret: bytes, deadline: float, label: str) -> Connection | str:
    """Returns the authenticated connection, or the cause of a failure after which a retry may succeed."""
    channel, waiter = Channel(secret), select.poll()
    until = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
    try:
        while not channel.is_open:
            if channel.outgoing:
                send_some(stream, channel.outgoing)
            waiter.register(stream, select.POLLIN | (select.POLLOUT if channel.outgoing else 0))
            if not waiter.poll(_until(until) * 1000.0 + 1.0) and time.monotonic() >= until:
                stream.close()
                return NO_ANSWER  # a busy server answers later
            channel.feed(receive_some(stream, MAX_FRAME_BYTES))
        return Connection(stream, channel, address, label)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the program may have closed the descriptor itself
            stream.close()
        if isinstance(error, (ConnectionLost, OSError)):
            return str(error)
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"{label}: {address}: {error}") from None
        if isinstance(error, FrameError):
            raise WrongServer(
                f"{label}: {address} does not speak the rendezvous protocol ({error}): "
                "another service or run holds this port"
            ) from error
        if isinstance(error, RendezvousError):
            raise WrongServer(f"{label}: {address}: {error}") from None
        raise

"""A rank's connection to the rendezvous server. One daemon thread reads from the connection until its end.

`dial` connects and authenticates; if no server answers, it tries again until its deadline. `client` uses the
connection. The rules of this module:

- Only one thread reads. Each thread that sends a request waits for the answer on a lock of its own. No thread waits on
  a Condition or an Event, whose inner lock would stay held if Ctrl-C arrived when the wait begins.
- A send never blocks. Bytes that do not fit the socket's buffer are written later, by the thread that waits for the
  answer or by the reader. So no blocked send can delay the heartbeats, which the reader sends.
- A second thread answers the server's request for this rank's status, so that a callback that blocks delays neither
  answers to this rank's requests nor heartbeats.
- If a process's own timer fires late, this process was paused (by SIGSTOP, for example). Then this process does not
  report its peer as silent.
- After a fork the child closes its copy of the descriptor, replaces the lock for sending, and acquires no lock.
- The reader is a daemon thread, because daemon threads still run at exit, when the client sends LEAVE.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradsync.arguments import check_seconds, parse_address
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
from gradsync.machine import machine_identity
from gradsync.rendezvous.frames import (
    INVALID,
    MAX_REASON_BYTES,
    MAX_REPORT_BYTES,
    PROGRESS,
    SILENCE,
    STUCK,
    THE_WORLD,
    TO_GENERATION,
    Calls,
    FieldError,
    FrameType,
    Message,
    clip_text,
)
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake, ServerProcess
from gradsync.rendezvous.liveness import LATE_AFTER_SECONDS, Judgement, Peer, inspect_peer
from gradsync.rendezvous.sockets import ConnectionLost, receive_some, send_some, tune_stream
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameError, FrameReader, Session

AT_ONCE_SECONDS = 30.0  # the deadline of requests that do not wait for other ranks
# The longest wait for the failure after this rank has reported a stuck collective: the server asks all ranks first,
# and waits for their answers (stuck.ANSWER_SECONDS).
FAILURE_WITHIN_SECONDS = 10.0
_ANSWERED_WITHIN_SECONDS = 2.0  # the longest wait for an answer that the server sends at once, e.g. to a CANCEL
_LEAVE_SECONDS = 1.0
_WRITE_EVERY_SECONDS = 0.005  # how often a waiting thread tries to send the bytes that did not fit the socket's buffer
_HANDSHAKE_SECONDS = 5.0
_NO_ANSWER = "no answer to the handshake: a busy server, or another service"
# A flooded server drops its oldest unauthenticated connections. A different service ends each connection. A client
# cannot distinguish the two cases in one attempt, so a client tries for several seconds.
_FLOOD_SECONDS = 5.0
_DIAL_SECONDS = 3.0
_FIRST_BACKOFF_SECONDS = 0.005
_LAST_BACKOFF_SECONDS = 0.5
_POLL_SECONDS = 0.25  # a poll does not notice when the program closes our descriptor, so each poll is short
_THREAD_END_SECONDS = 0.2

NO_REPORT = "(it reports nothing)"

#: Called in a thread of its own when the world has failed, or its server is gone, unless a collective only took too
#: long. A launcher that shares the run with other launchers sets it in its ranks, because nobody else tells it.
on_failure: Callable[[GradsyncError], object] | None = None

_log = logging.getLogger("gradsync.rendezvous")


class _Pending:
    """A request that waits for its answer; `is_over` is released when the answer or a failure arrives."""

    __slots__ = ("answer", "arriving", "is_over", "sequence", "values")

    def __init__(self, arriving: tuple[list[object], object] | None = None) -> None:
        self.arriving = arriving  # a list, and the item to append to it when the answer arrives
        self.sequence = 0  # set when the request is sent
        self.is_over = threading.Lock()
        self.is_over.acquire()
        self.answer: Message | None = None
        self.values: list[bytes] = []  # the parts that have arrived of an answer in several frames


class Callbacks(NamedTuple):
    """The functions that describe this rank to the other ranks, see `RendezvousClient.describe_with`."""

    positions: Callable[[], Mapping[str, int]] = dict
    report: Callable[[], tuple[str, Calls]] = lambda: (NO_REPORT, {})


class Connection:
    """An authenticated connection to a rendezvous server; made by `dial`, shared by a client and its groups.

    Any number of threads may send requests, each with its own deadline.

    Args:
        stream: the connected, non-blocking socket.
        session: seals and opens the messages.
        reader: holds bytes that arrived right after the handshake.
        unsent: the last bytes of the handshake, which are sent together with the first message.
        server: the server's process.
        address: the server's address, for messages.
        label: this rank in messages, e.g. "rank 1/4".

    Attributes:
        address, label: the arguments.
        failure: the error that every request raises from now on, or None. The first failure stays until `close` or
            `abandon` replaces it.
        is_accepted: whether the server has accepted this rank's join.
        beat_at: when the next heartbeat is due, in monotonic seconds.
        callbacks: the functions that describe this rank to the other ranks.
    """

    def __init__(
        self,
        stream: socket.socket,
        session: Session,
        reader: FrameReader,
        unsent: bytes,
        server: ServerProcess,
        address: str,
        label: str,
    ) -> None:
        self.address = address
        self.label = label
        self.failure: GradsyncError | None = None
        self.is_accepted = False
        self._server = server
        self._stream = stream
        self._session = session
        self._reader = reader
        # Held to seal and send a message, without blocking. Threads other than the reader acquire it only by `with`.
        self._sending = threading.Lock()
        self._outgoing = session.send_sequence, bytearray(unsent)  # set in one assignment, see `_queue`
        self._pending: dict[int, _Pending] = {}  # by sequence
        self._has_asked = False
        self._has_reported = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # Heartbeats; only the reader uses these.
        self._interval_seconds = math.inf
        self.beat_at = math.inf
        self._server_peer = Peer(time.monotonic())
        self._answering: threading.Thread | None = None  # answers the server's request for this rank's status
        self.callbacks = Callbacks()
        _connections.add(self)

    # Requests.

    def ask(
        self,
        operation: str,
        timeout_seconds: float,
        frame_type: FrameType,
        *fields: Any,
        shown_seconds: float | None = None,
        arriving: tuple[list[object], object] | None = None,
    ) -> Any:
        """Sends a request, waits for the answer, and returns its value.

        At the deadline the client sends CANCEL; the server's answer names the missing ranks.

        Args:
            operation: the request's name in messages.
            timeout_seconds: the caller's deadline.
            frame_type, fields: the type and the fields of the request.
            shown_seconds: the timeout to name in error texts, if it is not `timeout_seconds`.
            arriving: see RendezvousClient.exchange.

        Raises:
            InvalidArgument, RendezvousError, RendezvousTimeout, RankFailed, CollectiveTimeout, CommunicatorClosed: see
                the methods of `RendezvousClient`.
        """
        check_seconds(f"{self.label}: {operation}", "timeout_seconds", timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        shown = timeout_seconds if shown_seconds is None else shown_seconds
        pending = _Pending(arriving)
        self.raise_failure()
        try:
            self.post(frame_type, *fields, pending=pending)
            if pending.answer is None:  # a failure before `post` registered the request does not end the wait below
                self.raise_failure()
            if not self._wait(pending, deadline):
                self.post(FrameType.CANCEL, pending.sequence)
                self._wait(pending, time.monotonic() + _ANSWERED_WITHIN_SECONDS)
        except FieldError as error:
            raise InvalidArgument(f"{self.label}: {operation}: {error}") from None
        except ConnectionLost as error:
            # The reader notices the lost server too, after it has read the server's last messages.
            if not pending.is_over.acquire(timeout=_ANSWERED_WITHIN_SECONDS):
                self._lose(error)
        except GradsyncError:
            raise
        except BaseException as error:  # e.g. KeyboardInterrupt: the server must not count this rank as waiting
            if frame_type is FrameType.JOIN:  # report the reason to the other ranks, so that they do not wait
                self.report_failure(describe(error), None)
            elif pending.sequence:
                with contextlib.suppress(RendezvousError):
                    self.post(FrameType.CANCEL, pending.sequence)
            raise
        finally:
            self._pending.pop(pending.sequence, None)
        how_ended = f"reached its deadline of {shown:.3g} s"
        if time.monotonic() < deadline:
            how_ended = "ended, because the rank that hosts the server reached its deadline"
        if pending.answer is not None:
            return _result(pending, self.label, operation, how_ended)
        self.raise_failure()
        raise RendezvousTimeout(
            f"{self.label}: {operation} {how_ended}, and the rendezvous server at {self.address} did not answer"
        )

    def has_failed(self) -> bool:
        """Returns whether requests fail now, or this rank has reported a failure. Takes about 0.1 us.

        Requests fail if the generation has failed, the server is lost, or the connection is closed.
        """
        return self.failure is not None or self._has_reported

    def raise_failure(self) -> None:
        """Raises `failure`, if there is one."""
        if self.failure is not None:
            raise copy.copy(self.failure) from self.failure.__cause__

    def report_failure(self, reason: str, culprit: int | None) -> None:
        """Fails the generation; does not wait for an answer, because the caller is handling an error."""
        if self.failure is None:
            self._has_reported = True
            with contextlib.suppress(ConnectionLost):
                self.post(FrameType.REPORT_FAILURE, clip_text(reason, MAX_REASON_BYTES), culprit)

    def await_failure(self, frame_type: FrameType, *fields: Any) -> None:
        """Sends a message that makes the server fail the generation; waits for the failure and raises it.

        Returns if no failure arrives within FAILURE_WITHIN_SECONDS.
        """
        self.raise_failure()
        pending = _Pending()  # the server sends no answer; the failure ends this request
        try:
            with contextlib.suppress(ConnectionLost):
                self.post(frame_type, *fields, pending=pending)
            if self.failure is None:  # because a failure before `post` registered the message does not end the wait
                self._wait(pending, time.monotonic() + FAILURE_WITHIN_SECONDS)
        finally:
            self._pending.pop(pending.sequence, None)
        self.raise_failure()

    def post(self, frame_type: FrameType, *fields: Any, pending: _Pending | None = None) -> None:
        """Sends a message; never waits. Bytes that do not fit the socket's buffer are sent later.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            ConnectionLost: the server is gone.
        """
        with self._sending:
            self._has_asked = True
            self._queue(frame_type, *fields, pending=pending)
            self._write()

    def _queue(self, frame_type: FrameType, *fields: Any, pending: _Pending | None = None) -> None:
        """Seals a message and adds it to the unsent bytes; the caller holds the lock.

        A signal handler may raise in each call below. The bytes and the number of the next message change in one
        assignment, so such an interrupt neither loses nor repeats a number; the peer would refuse both.
        """
        sequence, unsent = self._outgoing
        self._session.send_sequence = sequence  # an interrupt after `seal` has left it one too high
        unsent = unsent + self._session.seal(frame_type, *fields)
        if pending is not None:  # registered before the send, because the answer may arrive at once
            pending.sequence, self._pending[sequence] = sequence, pending
        self._outgoing = sequence + 1, unsent

    @property
    def _unsent(self) -> bytearray:
        return self._outgoing[1]

    def _write(self) -> None:
        """Writes as much as the socket takes now; the caller holds the lock."""
        if self._unsent:
            send_some(self._stream, self._unsent)

    def _wait(self, pending: _Pending, deadline: float) -> bool:
        """Waits until a request is over; returns False at the deadline (monotonic seconds)."""
        while (left_seconds := deadline - time.monotonic()) > 0.0:
            # While the socket's buffer is full, an answer or a failure may still arrive.
            longest = _WRITE_EVERY_SECONDS if self._unsent else threading.TIMEOUT_MAX
            if pending.is_over.acquire(timeout=min(left_seconds, longest)):
                return True
            with self._sending:
                self._write()
        return pending.is_over.acquire(False)

    # Reading: methods of the reader's thread, and `start`.

    def start(self, interval_seconds: float) -> None:
        """Starts the reader's thread, which also sends heartbeats once this rank has asked to join."""
        self._interval_seconds = interval_seconds
        self.beat_at = time.monotonic() + interval_seconds
        self._thread = threading.Thread(target=self._run, name="gradsync-reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        waiter = select.poll()
        has_input = False
        while self.run_once(has_input=has_input):
            try:
                waiter.register(self._stream, select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN)
            except ValueError:  # `close` has closed the stream, because it waits for this thread only for a moment
                return
            wait_seconds = min(max(self.beat_at - time.monotonic(), 0.0), _POLL_SECONDS)
            has_input = bool(waiter.poll(wait_seconds * 1000.0 + 1.0))

    def run_once(self, *, has_input: bool) -> bool:
        """Reads new bytes, writes unsent bytes, and sends a heartbeat if a heartbeat is due.

        Returns:
            Whether the connection is still open.
        """
        try:
            if has_input:
                self._read()
            if self._unsent:
                with self._sending:
                    self._write()
            now = time.monotonic()
            if now >= self.beat_at:
                was_late = now - self.beat_at > LATE_AFTER_SECONDS
                self.beat_at = now + self._interval_seconds
                self._beat(now, was_late=was_late)
        except (ConnectionLost, FrameError) as error:
            self._lose(error)
        except Exception as error:  # no caller would see the error
            _log.exception("%s: the reader's thread of the rendezvous client has failed", self.label)
            self._lose(RendezvousError(f"internal error: {describe(error)}"))
        else:
            return True
        return False

    def _read(self) -> None:
        now = time.monotonic()
        self._reader.feed(receive_some(self._stream, MAX_FRAME_BYTES), now)
        while (frame := self._reader.next_frame()) is not None:
            self._handle(self._session.open(frame))
            if self._server_peer.note_alive(now):
                _log.warning("%s: %s responds again", self.label, self._server_name())

    def _handle(self, message: Message) -> None:
        """Handles one message of the server. Never waits, and calls no callback.

        Passes an answer to the request that waits for it, starts the answering thread, or records the failure of the
        generation.
        """
        kind = message.type
        if kind is FrameType.PULSE:
            self.is_accepted = True  # the server sends the first PULSE when it accepts the JOIN
        elif kind is FrameType.FAILED and message.fields[0] == TO_GENERATION:
            if self.failure is None:
                self._fail(failure_of(message, self.label))
        elif kind is FrameType.STATUS_REQUEST:
            self._answer_later()
        elif kind is FrameType.VALUES:
            pending = self._pending.get(message.fields[0])
            if pending is not None:
                pending.values += message.fields[2]
                if message.fields[1]:
                    self._end(message.fields[0], message)
        elif kind is FrameType.REFUSED and message.fields[0] not in self._pending:  # no request waits for it
            _log.warning("%s: the rendezvous server refused a message: %s", self.label, message.fields[2])
        else:  # `_end` ignores late answers to requests that have ended
            self._end(message.fields[0], message)

    def _end(self, sequence: int, answer: Message | None) -> None:
        pending = self._pending.pop(sequence, None)
        if pending is not None:
            pending.answer = answer
            if pending.arriving is not None and answer is not None and answer.type is FrameType.VALUES:
                arrivals, item = pending.arriving
                arrivals.append(item)
            pending.is_over.release()

    def _fail(self, failure: GradsyncError) -> None:
        """Sets `failure` if it is None, and then ends all requests.

        `failure` is set first, so that a request that is registered later finds the failure, see `ask`.
        """
        if self.failure is None:
            self.failure = failure
            if on_failure is not None and self.is_accepted and not isinstance(failure, CollectiveTimeout):
                threading.Thread(target=on_failure, args=(failure,), name="gradsync-failure", daemon=True).start()
        for sequence in list(self._pending):
            self._end(sequence, None)

    def _lose(self, error: RendezvousError) -> None:
        """Ends all requests, because the connection was lost."""
        failure = RendezvousError(
            f"{self.label}: the rendezvous server at {self.address} is gone ({error}); "
            "it ended or was killed, or the network failed"
        )
        failure.__cause__ = error
        self._fail(failure)

    def _beat(self, now: float, *, was_late: bool) -> None:
        """Sends a heartbeat, and inspects the server if the server has been silent."""
        if not self._has_asked or self.failure is not None:  # the server expects no heartbeat
            self._server_peer.reset(now)
            return
        if self._sending.acquire(False):  # else another thread sends a message now, which is a sign of life too
            try:
                if not self._unsent:
                    self._queue(FrameType.HEARTBEAT, self._progress())
                self._write()
            finally:
                self._sending.release()
        if was_late:
            self._server_peer.reset(now)
        if now >= self._server_peer.due_at():
            self._inspect_server(now)

    def _inspect_server(self, now: float) -> None:
        is_local = self._server.is_on(machine_identity())
        state = inspect_peer(self._server.pid if is_local else None, self._stream)
        self._server_peer.note_inspection(now)
        judgement = self._server_peer.judge(now, state)
        silent_seconds = now - self._server_peer.last_seen_at
        if judgement is Judgement.SLOW:
            _log.warning("%s: %s", self.label, state.slow_text(self._server_name(), silent_seconds))
        elif judgement is Judgement.LOST:
            self._lose_server(state.lost_text(self._server_name(), f"no sign of life for {silent_seconds:.1f} s"))

    def _lose_server(self, text: str) -> None:
        self._fail(RendezvousError(f"{self.label}: {text}"))
        self.shut_down()

    def _server_name(self) -> str:
        return f"the rendezvous server at {self.address}{f' (pid {self._server.pid})' if self._server.pid else ''}"

    # This rank's status.

    def _answer_later(self) -> None:
        """Sends this rank's status in a thread of its own. The server asks once: then the generation fails."""
        self._answering = threading.Thread(target=self._send_status, name="gradsync-answers", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, so no answer is needed any more
            self._answering.start()

    def _send_status(self) -> None:
        progress = self._progress()
        try:
            text, calls = self.callbacks.report()
            status = {group: (begun, calls.get(group, ())) for group, begun in progress.items()}
            self.post(FrameType.STATUS, status, clip_text(text, MAX_REPORT_BYTES))
        except ConnectionLost:  # the reader reports that the server is gone
            pass
        except Exception as error:  # the callback failed, or its calls do not fit
            text = clip_text(f"(its report failed: {describe(error)})", MAX_REPORT_BYTES)
            with contextlib.suppress(ConnectionLost):
                self.post(FrameType.STATUS, {group: (begun, ()) for group, begun in progress.items()}, text)

    def _progress(self) -> Mapping[str, int]:
        """Returns the number of collectives that this rank has begun in each group.

        The result is empty if the callback fails, or names too many groups.
        """
        with contextlib.suppress(Exception):  # the ranks' report shows that the numbers are missing
            positions = self.callbacks.positions()
            if PROGRESS.accepts(positions):
                return positions
        return {}

    # Closing.

    def close(self) -> None:
        """Sends LEAVE, waits up to 1 s until the server has read it, ends the threads, and closes. Idempotent.

        After the loss of the server, sends no LEAVE.
        """
        if self._is_closed:
            self._end_threads()  # Ctrl-C may have interrupted an earlier call
            return
        failure = self.failure
        self._fail_as_closed()
        try:
            # A rank that has lost the server counts as failed. A LEAVE that still arrives would hide this failure from
            # the other ranks.
            if not isinstance(failure, RendezvousError):
                self._send_leave()
        finally:
            self._end_threads()

    def abandon(self) -> None:
        """Closes the connection without LEAVE, after a failure. Idempotent."""
        if not self._is_closed:
            self._fail_as_closed()
        self._end_threads()

    def shut_down(self) -> None:
        """Ends the stream in both directions; wakes the reader."""
        with contextlib.suppress(OSError):  # the server has ended the stream already
            self._stream.shutdown(socket.SHUT_RDWR)

    def _send_leave(self) -> None:
        pending = _Pending()
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RendezvousError):
            # The server answers by closing the connection; after that this rank may join the next generation.
            self.post(FrameType.LEAVE, THE_WORLD, None, 0, pending=pending)
            if self._thread is not None and self._thread.is_alive():  # otherwise the stream has ended
                self._wait(pending, deadline)

    def _end_threads(self) -> None:
        if self._stream.fileno() < 0:
            return
        self.shut_down()
        current = threading.current_thread()
        for thread in (self._answering, self._thread):
            if thread is not None and thread is not current and thread.is_alive():
                thread.join(_THREAD_END_SECONDS)
        with contextlib.suppress(OSError):  # the program has closed the descriptor itself
            self._stream.close()

    def _fail_as_closed(self) -> None:
        self._is_closed = True
        self.failure = CommunicatorClosed(
            f"{self.label}: this rendezvous client is closed; to join again, make a new client with connect"
        )
        self._fail(self.failure)

    def close_copy(self) -> None:
        """Closes a forked child's copy, without I/O and without the lock, which may stay held forever in the child."""
        self._is_closed = True
        self.failure = CommunicatorClosed(f"{self.label}: this rendezvous client belongs to the process that made it")
        self._sending = threading.Lock()
        self._pending, self._thread, self._answering = {}, None, None
        with contextlib.suppress(OSError):
            self._stream.close()


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    for connection in list(_connections):
        connection.close_copy()
    _connections.clear()


os.register_at_fork(after_in_child=_close_copies)


# Answers as values and errors.


def failure_of(message: Message, label: str, operation: str = "") -> GradsyncError:
    """Returns the error of a FAILED message.

    Args:
        message: the FAILED message.
        label: this rank in messages, e.g. "rank 1/4".
        operation: the name of the request that the message answers, followed by ": "; "" if the message is about the
            whole generation.
    """
    _, kind, rank, phase, missing, text = message.fields
    if kind == STUCK:  # the operation is left out: this rank's own request has nothing to do with the stuck collective
        ordered = tuple(sorted(missing, key=lambda each: (each != rank, each)))  # the cause first
        return CollectiveTimeout(f"{label}: {text}", missing_ranks=ordered)
    return RankFailed(f"{label}: {operation}{text}", rank=rank, phase=phase, was_silent=kind == SILENCE)


def _result(pending: _Pending, label: str, operation: str, how_ended: str) -> Any:
    """Returns the value of an answer, or raises its error."""
    message = pending.answer
    assert message is not None
    if message.type is FrameType.REPLY:
        return message.fields[1]
    if message.type is FrameType.VALUES:
        return pending.values
    if message.type is FrameType.FAILED:
        raise failure_of(message, label, f"{operation}: ")
    if message.type is FrameType.TIMED_OUT:
        _, missing, where = message.fields
        raise RendezvousTimeout(
            f"{label}: {operation} {how_ended}; " + (f"missing: {where}" if missing else "no rank has set the key"),
            missing_ranks=tuple(missing),
            missing=where if missing else "",
        )
    _, kind, text = message.fields
    error = InvalidArgument if kind == INVALID else RendezvousError
    raise error(f"{label}: {operation}: {text}")


# Connecting to a server.


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
    shown_seconds = deadline - time.monotonic() if shown_seconds is None else shown_seconds
    backoff_seconds = _FIRST_BACKOFF_SECONDS
    first_ended_at: float | None = None  # when a connection was first ended before the handshake
    while True:
        try:
            stream = _connect(address, deadline)
        except (OSError, ValueError) as error:  # ValueError: the host's name is too long, or has invalid characters
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        else:
            made = _try_handshake(stream, address, secret, deadline, label)
            if isinstance(made, Connection):
                return made
            cause = made
            now = time.monotonic()
            if cause != _NO_ANSWER and first_ended_at is None:
                first_ended_at = now
            if first_ended_at is not None and now - first_ended_at >= _FLOOD_SECONDS:
                raise RendezvousError(
                    f"{label}: {address} accepts connections but ends each before a handshake ({cause}): "
                    "another service or run holds this port"
                )
        # Jitter, so that ranks that started together do not connect together.
        pause = backoff_seconds * (0.5 + os.urandom(1)[0] / 512)
        if time.monotonic() + pause >= deadline:
            raise RendezvousTimeout(
                f"{label}: no rendezvous server at {address} within {shown_seconds:.3g} s; last cause: {cause}",
                cause=cause,
            )
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
    try:
        session, reader, proof, server = _shake_hands(
            stream, secret, min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
        )
        return Connection(stream, session, reader, proof, server, address, label)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the program may have closed the descriptor itself
            stream.close()
        if isinstance(error, RendezvousTimeout):  # a busy server answers later
            return _NO_ANSWER
        if isinstance(error, (ConnectionLost, OSError)):
            return str(error)
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"{label}: {address}: {error}") from None
        if isinstance(error, FrameError):
            raise RendezvousError(
                f"{label}: {address} does not speak the rendezvous protocol ({error}): "
                "another service or run holds this port"
            ) from error
        if isinstance(error, RendezvousError):
            raise RendezvousError(f"{label}: {address}: {error}") from None
        raise


def _shake_hands(
    stream: socket.socket, secret: bytes, deadline: float
) -> tuple[Session, FrameReader, bytes, ServerProcess]:
    """Runs the handshake.

    Returns:
        The session; the reader, which holds the bytes that arrived after the handshake; the PROOF, which the caller
        sends together with the first message; and the identity of the server's process.
    """
    handshake = ClientHandshake(secret, os.urandom(NONCE_BYTES))
    reader, unsent, waiter = FrameReader(), bytearray(handshake.hello()), select.poll()
    while (frame := reader.next_frame()) is None:
        waiter.register(stream, select.POLLIN | select.POLLOUT if unsent else select.POLLIN)
        left_seconds = max(deadline - time.monotonic(), 0.0)
        if not waiter.poll(left_seconds * 1000.0 + 1.0) and time.monotonic() >= deadline:
            raise RendezvousTimeout("no answer to the handshake")
        if unsent:
            send_some(stream, unsent)
        reader.feed(receive_some(stream, MAX_FRAME_BYTES), time.monotonic())
    proof, session = handshake.receive(frame)
    reader.limit_bytes = MAX_FRAME_BYTES
    return session, reader, proof, handshake.server

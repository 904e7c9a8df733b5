"""A rank's connection to the rendezvous server: dialled, then read by one daemon thread until its end.

Under `client`, which is the face. Rules, each with a test:

- One thread reads. Threads that ask wait for their own answer, each on a lock of its own: never on a Condition or an
  Event, whose inner lock stays taken where Ctrl-C comes as the wait begins.
- Nobody waits while it sends. What finds no room is written later, by whoever waits for the answer or by the reader, so
  heartbeats leave by the reader's poll timeout and never by a send that blocks.
- What others ask of this rank is answered by a second thread that lives only for that: a callback that is blocked, or
  that writes a long dump, keeps neither answers nor heartbeats.
- Who is late to its own clock was itself not running, and judges nobody.
- After a fork the child closes its copy of the descriptor, replaces the locks and acquires none.
- The reader is a daemon thread, and holds no reference to the connection while it waits: a client that is forgotten is
  closed, and LEAVE can be sent at exit, while daemon threads still run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import operator
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from gradsync.arguments import parse_address
from gradsync.environment import check_removed_variables
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
    name_ranks,
)
from gradsync.machine import machine_identity
from gradsync.rendezvous.frames import (
    INVALID,
    MAX_EVENT_BYTES,
    MAX_GROUP_BYTES,
    MAX_REASON_BYTES,
    MAX_REPORT_BYTES,
    MAX_TOLD_CALLS,
    MAX_TOLD_GROUPS,
    MAX_WHAT_BYTES,
    SILENCE,
    STUCK,
    THE_WORLD,
    TO_GENERATION,
    FieldError,
    FrameType,
    LaunchedEvent,
    Message,
    clip_text,
)
from gradsync.rendezvous.handshake import RANDOM_BYTES, ClientHandshake, ServerProcess
from gradsync.rendezvous.liveness import LATE_AFTER_SECONDS, Judgement, Peer, look_at, look_at_process
from gradsync.rendezvous.sockets import look_up, tune_stream
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, UNFINISHED, FrameError, FrameReader, Session

#: How long an answer may take that the server gives at once: to a cancel, above all.
ANSWER_SECONDS = 2.0
AT_ONCE_SECONDS = 30.0  # the deadline of requests that do not wait for other ranks
_FAILURE_WITHIN_SECONDS = 1.0  # after this rank has reported a stuck collective
_GOODBYE_SECONDS = 1.0
_POLL_SECONDS = 0.25  # at most: a descriptor that the program closes under us ends no poll that is under way
_THREAD_END_SECONDS = 0.2
_CALLBACKS_END_SECONDS = 2.0  # a dump that is being written is wanted whole
_MAX_TIMEOUT_SECONDS = 1e9
_HANDSHAKE_SECONDS = 5.0
_NO_ANSWER = "no answer to the handshake: a busy server, or another service"
# A server that is flooded drops its oldest strangers, and looks from here like a service that ends each connection:
# several attempts over several seconds tell them apart.
_HANDSHAKE_ATTEMPTS = 5
_FLOOD_SECONDS = 5.0
_DIAL_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 0.005
_LAST_BACKOFF_SECONDS = 0.5

OnAsked = Callable[[int], "LaunchedEvent | None"]
#: A rank's last collectives, by group: number, digest, what it is, and whether the rank is inside.
Calls = Mapping[str, Sequence[tuple[int, int, str, bool]]]

_log = logging.getLogger("gradsync.rendezvous")


class StreamEnded(RendezvousError):
    """The peer closed or reset the connection."""


def check_timeout(timeout_seconds: float) -> float:
    """Returns the timeout.

    Raises:
        InvalidArgument: it is not a finite number of seconds from 0.
    """
    valid = isinstance(timeout_seconds, (int, float)) and 0 <= timeout_seconds <= _MAX_TIMEOUT_SECONDS
    if not valid:  # NaN and infinity fail the comparison too
        raise InvalidArgument(f"timeout_seconds needs a finite number from 0, got {timeout_seconds!r}")
    return timeout_seconds


class _Pending:
    """A request that waits for its answer; `is_over` is released once there is one, or never can be."""

    __slots__ = ("answer", "arriving", "is_over", "sequence", "values")

    def __init__(self, arriving: tuple[list[object], object] | None = None) -> None:
        self.arriving = arriving  # where a decision is noted, and as what
        self.sequence = 0  # once it is sent
        self.is_over = threading.Lock()
        self.is_over.acquire()
        self.answer: Message | None = None
        self.values: list[bytes] = []  # of an answer in several frames


class Connection:
    """An authenticated connection to a rendezvous server; made by `dial`, shared by a client and its groups.

    Any number of threads may ask, each with its own deadline.

    Args:
        stream: the connected, non-blocking socket.
        session: seals and opens what travels.
        reader: has what was read behind the handshake.
        unsent: the end of the handshake, which travels with the first message.
        server: which process the server is.
        address: the server's, for messages.
        label: this rank in messages, e.g. "rank 1/4".

    Attributes:
        address, label: as given.
        own_host: the address of this end.
        failure: what every request raises from now on, or None; the first one stays, but for a close.
        is_seated: whether the server has accepted this rank's join.
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
        self.own_host = str((stream.getsockname() or ("",))[0])  # "" of a socket pair
        self.failure: GradsyncError | None = None
        self.is_seated = False
        self._server = server
        self._ended_by: StreamEnded | None = None
        self._stream = stream
        self._session = session
        self._reader = reader
        self._sending = threading.Lock()  # held for a seal and a send that does not block; only ever taken by `with`
        self._unsent = bytearray(unsent)
        self._writable = select.poll()
        self._writable.register(stream, select.POLLOUT)
        self._pending: dict[int, _Pending] = {}  # by sequence
        self._has_asked = False
        self._has_reported = False
        self._is_closed = False
        self._pid = os.getpid()
        self._has_ended = False  # the stream: nothing comes any more
        self._thread: threading.Thread | None = None
        # Heartbeats; the reader's own.
        self._interval_seconds = math.inf
        self._beat_at = math.inf
        self._server_peer = Peer(time.monotonic())
        # What others ask of this rank.
        self._pushes: deque[Message] = deque()
        self._answering: threading.Thread | None = None
        self._on_asked: dict[str, OnAsked] = {}
        self._positions: Callable[[], Mapping[str, int]] = dict
        self._report: Callable[[], str] = str
        self._history: Callable[[], Calls] = dict
        self._on_trouble: Callable[[str], None] = _do_nothing
        _connections.add(self)

    # Asking.

    def ask(
        self,
        operation: str,
        timeout_seconds: float,
        frame_type: FrameType,
        *fields: Any,
        then: tuple[Any, ...] = (),
        shown_seconds: float | None = None,
        arriving: tuple[list[object], object] | None = None,
    ) -> Any:
        """Sends a request and returns its result.

        At the deadline the request is cancelled; the answer to that names the ranks that are missing.

        Args:
            operation: what messages call it.
            timeout_seconds: the caller's deadline.
            frame_type, fields: the request.
            then: another message that travels right behind it, its type first.
            shown_seconds: the deadline that messages name, where the caller's was longer.
            arriving: see RendezvousClient.agree.

        Raises:
            InvalidArgument, RendezvousError, RendezvousTimeout, RankFailed, CollectiveTimeout, CommunicatorClosed: as
                the calls of `RendezvousClient` say.
        """
        deadline = time.monotonic() + check_timeout(timeout_seconds)
        shown = timeout_seconds if shown_seconds is None else shown_seconds
        pending = _Pending(arriving)
        self.raise_failure()
        try:
            self._send(frame_type, fields, then, pending)
            self.raise_failure()  # one that came before this request was registered has not ended it
            if not self._wait(pending, deadline):
                self.post(FrameType.CANCEL, pending.sequence)
                self._wait(pending, time.monotonic() + ANSWER_SECONDS)
        except FieldError as error:
            raise InvalidArgument(f"{self.label}: {operation}: {error}") from None
        except StreamEnded as error:
            # The reader finds that out too, and before it what the server has said last.
            if not pending.is_over.acquire(timeout=ANSWER_SECONDS):
                self._lose(error)
        except GradsyncError:
            raise
        except BaseException as error:  # KeyboardInterrupt above all: the server must not count this rank as waiting
            if frame_type in (
                FrameType.JOIN,
                FrameType.JOIN_START,
            ):  # it gives up its seat: the others hear why, and do not wait for it
                self.report_failure(describe(error), None)
            elif pending.sequence:
                with contextlib.suppress(RendezvousError):
                    self.post(FrameType.CANCEL, pending.sequence)
            raise
        finally:
            self._pending.pop(pending.sequence, None)
        if pending.answer is not None:
            return _result(pending, self.label, operation, shown)
        self.raise_failure()
        raise RendezvousTimeout(
            f"{self.label}: {operation} reached its deadline of {shown:.3g} s, "
            f"and the rendezvous server at {self.address} did not answer"
        )

    def post(self, frame_type: FrameType, *fields: Any) -> None:
        """Sends a message that needs no answer, without waiting; what finds no room now goes later.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded: the server is gone.
        """
        self._send(frame_type, fields)

    def has_failed(self) -> bool:
        """Whether the sticky failure is there, or will be in a moment; costs next to nothing."""
        return self.failure is not None or self._has_reported

    def raise_failure(self) -> None:
        """Raises the sticky failure, if there is one."""
        if self.failure is not None:
            raise copy.copy(self.failure) from self._ended_by

    def report_failure(self, reason: str, culprit: int | None) -> None:
        """Fails the generation, without waiting for an answer: the caller is on its way out."""
        if self.failure is None:
            self._has_reported = True
            with contextlib.suppress(StreamEnded):
                self.post(FrameType.REPORT_FAILURE, clip_text(reason, MAX_REASON_BYTES), culprit)

    def report_waiting(
        self, group: str, ranks: list[int] | None, position: int, what: str, waited_seconds: float, missing: Any
    ) -> None:
        """Tells the server that this rank waits for others in a collective, without waiting for an answer."""
        self.raise_failure()
        self._post_stuck(group, ranks, position, what, waited_seconds, missing, is_over=False)

    def report_stuck(
        self, group: str, ranks: list[int] | None, position: int, what: str, waited_seconds: float, missing: Any
    ) -> NoReturn:
        """Tells the server that the others did not come in time, and raises the failure that follows."""
        pending, key = _Pending(), -time.monotonic_ns()  # no request's sequence is negative
        self._pending[key] = pending
        try:
            self.raise_failure()
            with contextlib.suppress(StreamEnded):
                self._post_stuck(group, ranks, position, what, waited_seconds, missing, is_over=True)
            self._wait(pending, time.monotonic() + _FAILURE_WITHIN_SECONDS)
        finally:
            self._pending.pop(key, None)
        self.raise_failure()
        whom = f" for {name_ranks(missing)}" if missing else ""
        raise CollectiveTimeout(
            f"{self.label}: waited {waited_seconds:.3g} s in {what}{whom}; where the others are is not known: "
            f"the rendezvous server at {self.address} did not answer within {_FAILURE_WITHIN_SECONDS:g} s",
            missing_ranks=tuple(missing or ()),
        )

    def _post_stuck(
        self,
        group: str,
        ranks: list[int] | None,
        position: int,
        what: str,
        waited_seconds: float,
        missing: list[int] | None,
        *,
        is_over: bool,
    ) -> None:
        waited_ms = max(0, math.ceil(waited_seconds * 1000.0))
        what = clip_text(what, MAX_WHAT_BYTES)
        if len(ranks or ()) + len(missing or ()) > _MAX_LISTED_RANKS:  # both lists might not fit one frame
            ranks = None
        self.post(FrameType.STUCK, group, ranks, operator.index(position), what, waited_ms, missing, is_over)

    def _send(
        self,
        frame_type: FrameType,
        fields: tuple[Any, ...],
        then: tuple[Any, ...] = (),
        pending: _Pending | None = None,
    ) -> None:
        """Seals a message and writes what finds room.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded: the server is gone.
        """
        with self._sending:
            self._has_asked = True
            sequence = self._session.next_send_sequence
            if pending is not None:  # before it goes: the answer may be read at once
                pending.sequence, self._pending[sequence] = sequence, pending
            try:
                # Added as soon as it is sealed: after Ctrl-C in between the server would miss a sequence.
                self._unsent += self._session.seal(frame_type, *fields)
                if then:
                    self._unsent += self._session.seal(*then)
            except FieldError:
                if pending is not None:
                    pending.sequence = 0
                    del self._pending[sequence]
                raise
            self._write()

    def _write(self) -> None:
        """Writes what finds room; the caller holds the lock."""
        if not self._unsent:
            return
        try:
            sent = self._stream.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        del self._unsent[:sent]

    def _wait(self, pending: _Pending, deadline: float) -> bool:
        """Waits until a request is over; returns whether it is by its deadline (monotonic seconds)."""
        while self._unsent:  # there was no room
            if pending.is_over.acquire(False):
                return True
            if not self._writable.poll(_milliseconds_until(deadline)) and time.monotonic() >= deadline:
                return False
            with self._sending:
                self._write()
        left_seconds = max(deadline - time.monotonic(), 0.0)
        return pending.is_over.acquire(timeout=min(left_seconds, threading.TIMEOUT_MAX))

    # Reading: the one thread, and what only it may call.

    def start(self, interval_seconds: float) -> None:
        """Starts the thread that reads, and sends heartbeats once this rank has asked to join."""
        self._interval_seconds = interval_seconds
        self._beat_at = time.monotonic() + interval_seconds
        waiter = select.poll()
        args = (weakref.ref(self), waiter, self._stream, interval_seconds)
        waiter.register(self._stream, select.POLLIN)
        self._thread = threading.Thread(target=_read_until_the_end, args=args, name="gradsync-reader", daemon=True)
        self._thread.start()

    def take_turn(self, *, has_input: bool) -> bool:
        """Reads what has come, writes what was left over, and beats when it is time.

        Returns:
            Whether there is more to come.
        """
        try:
            if has_input:
                self._read()
            if self._unsent:
                with self._sending:
                    self._write()
            now = time.monotonic()
            if now >= self._beat_at:
                was_late = now - self._beat_at > LATE_AFTER_SECONDS
                self._beat_at = now + self._interval_seconds
                self._beat(now, was_late=was_late)
        except (StreamEnded, FrameError) as error:
            self._lose(error)
        except Exception as error:  # nobody else could say so
            _log.exception("%s: the thread that reads has failed", self.label)
            self._lose(RendezvousError(f"internal error: {describe(error)}"))
        else:
            return True
        return False

    @property
    def events(self) -> int:
        """What the reader waits for beside the time."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    @property
    def beat_at(self) -> float:
        """When the next heartbeat is due, in monotonic seconds."""
        return self._beat_at

    def _read(self) -> None:
        try:
            data = self._stream.recv(MAX_FRAME_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        if not data:
            raise StreamEnded("connection closed by the server")
        self._reader.feed(data)
        was_complete = False
        while (frame := self._reader.next_frame()) is not None:
            was_complete = True
            self._take(self._session.open(frame))
        now = time.monotonic()
        self._reader.note_time(now, was_complete=was_complete)
        if was_complete and self._server_peer.hear(now):
            _log.warning("%s: %s is heard of again", self.label, self._server_name())

    def _take(self, message: Message) -> None:
        """Gives a message to whom it concerns; never waits, and calls nothing that others have handed in."""
        kind = message.type
        if kind is FrameType.PULSE:
            return
        if kind is FrameType.SEATED:
            self.is_seated = True
        elif kind is FrameType.FAILED and message.fields[0] == TO_GENERATION:
            if self.failure is None:
                self._fail(failure_of(message, self.label))
                if not self._has_reported:  # who has reported it knows, and has told its own
                    self._push(message)
        elif kind in (FrameType.ASKED, FrameType.STATUS_REQUEST, FrameType.LOOK):
            self._push(message)
        elif kind is FrameType.VALUES:
            pending = self._pending.get(message.fields[0])
            if pending is not None:
                pending.values += message.fields[2]
                if message.fields[1]:
                    self._end(message.fields[0], message)
        else:  # or the late answer to a request that was given up: nobody waits for it
            self._end(message.fields[0], message)

    def _end(self, sequence: int, answer: Message | None) -> None:
        pending = self._pending.pop(sequence, None)
        if pending is not None:
            pending.answer = answer
            if pending.arriving is not None and answer is not None and answer.type is FrameType.DECISION:
                arrivals, what = pending.arriving
                arrivals.append(what)
            pending.is_over.release()

    def _fail(self, failure: GradsyncError) -> None:
        """Sets the sticky failure, unless there is one, and ends all requests.

        In this order: a request that is registered later finds the failure, see `ask`.
        """
        if self.failure is None:
            self.failure = failure
        for sequence in list(self._pending):
            self._end(sequence, None)

    def _lose(self, error: RendezvousError) -> None:
        """Notes that the connection is of no more use."""
        self._has_ended = True
        if self.failure is None and isinstance(error, StreamEnded):
            self._ended_by = error
        self._fail(
            RendezvousError(
                f"{self.label}: the rendezvous server at {self.address} is gone ({error}); "
                "it was stopped or killed, or the network between failed"
            )
        )

    def _beat(self, now: float, *, was_late: bool) -> None:
        """Sends a heartbeat, and looks at the server when it has been silent."""
        if not self._has_asked or self.failure is not None:  # the server expects none
            self._server_peer.restart(now)
            return
        if self._sending.acquire(False):  # else somebody sends just now, which is as good a sign of life
            try:
                if not self._unsent:
                    self._unsent += self._session.seal(FrameType.HEARTBEAT, self._progress())
                self._write()
            finally:
                self._sending.release()
        if was_late:
            self._server_peer.restart(now)
        if self._reader.is_stuck(now):
            self._lose_server(f"{self._server_name()} is lost: {UNFINISHED}")
        elif now >= self._server_peer.due_at():
            self._look_at_server(now)

    def _look_at_server(self, now: float) -> None:
        is_local = self._server.is_on(machine_identity())
        state = look_at(self._server.pid if is_local else None, self._stream)
        self._server_peer.looked(now)
        judgement = self._server_peer.judge(now, state)
        silent_seconds = now - self._server_peer.heard_at
        if judgement is Judgement.SLOW:
            _log.warning("%s: %s", self.label, state.slow_text(self._server_name(), silent_seconds))
        elif judgement is Judgement.LOST:
            self._lose_server(state.lost_text(self._server_name(), f"not heard of for {silent_seconds:.1f} s"))

    def _lose_server(self, text: str) -> None:
        self._has_ended = True
        self._fail(RendezvousError(f"{self.label}: {text}"))
        self.shut_down()

    def _server_name(self) -> str:
        return f"the rendezvous server at {self.address}{f' (pid {self._server.pid})' if self._server.pid else ''}"

    # What others ask of this rank.

    def describe_with(
        self,
        positions: Callable[[], Mapping[str, int]],
        report: Callable[[], str],
        history: Callable[[], Calls],
        on_trouble: Callable[[str], None] | None,
    ) -> None:
        """Lets these say how far this rank has come, what it does, and what it remembers; the last hears of trouble."""
        self._positions, self._report, self._history = positions, report, history
        self._on_trouble = on_trouble or _do_nothing

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """Lets `on_asked` answer the questions of other members of a group."""
        if self._on_asked.setdefault(group, on_asked) is not on_asked:
            raise InvalidArgument(f"{self.label}: group {group!r} is followed already; unfollow it first")

    def unfollow(self, group: str) -> None:
        """Ends that; a call under way may still run. Idempotent."""
        self._on_asked.pop(group, None)

    def _push(self, message: Message) -> None:
        """Has a push answered by a thread that lives as long as there are any."""
        self._pushes.append(message)
        if self._answering is None:
            thread = threading.Thread(target=self._answer_pushes, name="gradsync-answers", daemon=True)
            self._answering = thread
            with contextlib.suppress(RuntimeError):  # the interpreter ends: nobody is to be answered any more
                thread.start()

    def _answer_pushes(self) -> None:
        while True:
            try:
                push = self._pushes.popleft()
            except IndexError:
                self._answering = None
                if not self._pushes:
                    return
                continue  # the reader has come in between, and may have started another one
            with contextlib.suppress(StreamEnded):  # the reader finds the server gone, and says so
                if push.type is FrameType.ASKED:
                    self._answer_question(*push.fields)
                elif push.type is FrameType.STATUS_REQUEST:
                    self._answer_inquiry(*push.fields)
                elif push.type is FrameType.LOOK:
                    rank, pid = push.fields
                    self.post(FrameType.LOOKED, rank, look_at_process(pid).name)
                else:
                    self._note_trouble(push.fields[-1].partition("\n")[0])

    def _answer_question(self, group: str, position: int) -> None:
        """Asks the group's communicator what it launched at a position, and tells the server if it has."""
        on_asked = self._on_asked.get(group)
        if on_asked is None:
            return
        try:
            event = on_asked(position)
            if event is not None:
                text = clip_text(event.description, MAX_EVENT_BYTES)
                self.post(FrameType.LAUNCHED, group, position, operator.index(event.digest), text)
        except StreamEnded:
            raise
        except Exception:  # who asks is another rank, which can do nothing about it
            _log.exception("%s: position %d of group %r counts as not reached yet", self.label, position, group)

    def _answer_inquiry(self, inquiry: int) -> None:
        """Tells the server what this rank does."""
        try:
            self.post(FrameType.STATUS, inquiry, self._status(), self._report_text())
        except FieldError:  # a history that cannot be sent: the report shows what there is without it
            progress: dict[str, tuple[int, Sequence[Any]]] = {
                group: (begun, ()) for group, begun in self._progress().items()
            }
            self.post(FrameType.STATUS, inquiry, progress, self._report_text())
        self._note_trouble("a rank has waited too long for others")  # last: it may write a dump, and the server waits

    def _note_trouble(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the thread that tells can do nothing about it
            self._on_trouble(text)

    def _progress(self) -> dict[str, int]:
        """Returns how many collectives this rank has begun in each group; nothing where that cannot be told."""
        try:
            told = islice(self._positions().items(), MAX_TOLD_GROUPS)
            return {clip_text(group, MAX_GROUP_BYTES): min(max(int(begun), 0), 2**63 - 1) for group, begun in told}
        except Exception:  # the report shows that it is missing
            return {}

    def _status(self) -> dict[str, tuple[int, Sequence[Any]]]:
        """Returns how many collectives this rank has begun in each group, and its last ones."""
        status: dict[str, tuple[int, Sequence[Any]]] = {group: (begun, ()) for group, begun in self._progress().items()}
        with contextlib.suppress(Exception):
            history = self._history()
            most = MAX_TOLD_CALLS // max(len(history), 1)
            for group, calls in islice(history.items(), MAX_TOLD_GROUPS):
                if group in status or len(status) < MAX_TOLD_GROUPS:
                    begun = status.get(group, (max((call[0] for call in calls), default=0), ()))[0]
                    status[group] = begun, [list(call) for call in calls[-most:]]
        return status

    def _report_text(self) -> str:
        try:
            return clip_text(self._report() or NOTHING_TO_TELL, MAX_REPORT_BYTES)
        except Exception as error:
            return clip_text(f"(its report cannot be made: {describe(error)})", MAX_REPORT_BYTES)

    # The end.

    def close(self) -> None:
        """Sends LEAVE, waits briefly until the server has heard it, and closes. Idempotent."""
        if self._is_closed:
            self._end_threads()  # where Ctrl-C has come in the middle of an earlier call
            return
        failure, self._is_closed = self.failure, True
        self.failure = self._closed_error()
        self._fail(self.failure)
        try:
            # Who has lost the server has failed: a goodbye that still reached it would hide that from the others.
            if not isinstance(failure, RendezvousError) and self._thread is not None:
                self._say_goodbye()
        finally:
            self._end_threads()

    def abandon(self) -> None:
        """Closes the connection without LEAVE: for a client that has failed. Idempotent.

        In the child of a fork only its copy is closed, which the parent does not notice.
        """
        if os.getpid() != self._pid:
            self.close_copy()
            return
        if not self._is_closed:
            self._is_closed = True
            self.failure = self._closed_error()
            self._fail(self.failure)
        self._end_threads()

    def shut_down(self) -> None:
        """Ends the stream in both directions; wakes the reader."""
        with contextlib.suppress(OSError):  # the server was faster
            self._stream.shutdown(socket.SHUT_RDWR)

    def _say_goodbye(self) -> None:
        pending = _Pending()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        with contextlib.suppress(RendezvousError):
            # The server closes in answer: from then on this rank may join the next generation.
            self._send(FrameType.LEAVE, (THE_WORLD, None, 0), (), pending)
            if not self._has_ended:
                self._wait(pending, deadline)

    def _end_threads(self) -> None:
        if self._stream.fileno() < 0:
            return
        self.shut_down()
        current = threading.current_thread()
        for thread, seconds in ((self._answering, _CALLBACKS_END_SECONDS), (self._thread, _THREAD_END_SECONDS)):
            if thread is not None and thread is not current and thread.is_alive():
                thread.join(seconds)
        with contextlib.suppress(OSError):  # somebody has closed it under us: nothing is left to close
            self._stream.close()

    def _closed_error(self) -> CommunicatorClosed:
        return CommunicatorClosed(f"{self.label}: this rendezvous client is closed; connect again to join anew")

    def close_copy(self) -> None:
        """Closes the child's copy after a fork, without any I/O and without a lock: who held it is not here."""
        self._is_closed = True
        self.failure = CommunicatorClosed(f"{self.label}: this rendezvous client belongs to the process that made it")
        self._sending = threading.Lock()
        self._pending, self._thread, self._answering = {}, None, None
        with contextlib.suppress(OSError):
            self._stream.close()


NOTHING_TO_TELL = "(nothing is known of what it does)"
_MAX_LISTED_RANKS = 16_384
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_copies() -> None:
    for connection in list(_connections):
        connection.close_copy()
    _connections.clear()


os.register_at_fork(after_in_child=_close_copies)


def _read_until_the_end(
    reference: weakref.ReferenceType[Connection], waiter: select.poll, stream: socket.socket, interval_seconds: float
) -> None:
    """The thread that reads."""
    wait_seconds = interval_seconds
    events = select.POLLIN
    while True:
        ready = waiter.poll(min(max(wait_seconds, 0.0), _POLL_SECONDS) * 1000.0 + 1.0)
        connection = reference()
        if connection is None:  # the client was forgotten; its end is the end of the stream
            stream.close()
            return
        if not connection.take_turn(has_input=bool(ready)):
            return
        if connection.events != events:
            events = connection.events
            waiter.register(stream, events)
        wait_seconds = connection.beat_at - time.monotonic()
        del connection


def _do_nothing(_text: str) -> None:
    pass


def _milliseconds_until(deadline: float) -> float:
    """Returns the time left, rounded up so that a wait never ends early; 0 once the deadline has passed."""
    left = (deadline - time.monotonic()) * 1000.0
    return 0 if left <= 0 else min(left + 1.0, 2**30)


# What an answer stands for: a value, or the error that the caller gets.


def failure_of(message: Message, label: str, operation: str = "") -> GradsyncError:
    """Returns the error of a FAILED message.

    Args:
        message: of the type FAILED.
        label: this rank as messages name it, e.g. "rank 1/4".
        operation: the request that it answers, ending in ": "; empty for a whole generation.
    """
    _, kind, rank, phase, missing, text = message.fields
    if kind == STUCK:  # of a collective: the request of a rank that learned of it by chance says nothing
        ordered = tuple(sorted(missing, key=lambda each: (each != rank, each)))  # the one that is the cause comes first
        return CollectiveTimeout(f"{label}: {text}", missing_ranks=ordered)
    return RankFailed(f"{label}: {operation}{text}", rank=rank, phase=phase, was_silent=kind == SILENCE)


def _result(pending: _Pending, label: str, operation: str, shown_seconds: float) -> Any:
    """Returns the value of an answer, or raises the error that it stands for."""
    message = pending.answer
    assert message is not None
    if message.type is FrameType.REPLY:
        return message.fields[1]
    if message.type is FrameType.VALUES:
        return pending.values
    if message.type in (FrameType.DECISION, FrameType.JOINED, FrameType.POSITIONS):
        return message.fields[1:]
    if message.type is FrameType.FAILED:
        raise failure_of(message, label, f"{operation}: ")
    if message.type is FrameType.TIMED_OUT:
        _, missing, where = message.fields
        raise RendezvousTimeout(
            f"{label}: {operation} reached its deadline of {shown_seconds:.3g} s; "
            + (f"missing: {where}" if missing else "no rank has set it"),
            missing_ranks=tuple(missing),
            missing=where if missing else "",
        )
    _, kind, text = message.fields
    error = InvalidArgument if kind == INVALID else RendezvousError
    raise error(f"{label}: {operation}: {text}")


# Dialling.


def dial(address: str, *, secret: bytes, deadline: float, label: str, generation: int = 0) -> Connection:
    """Returns an authenticated connection; retries while the server is not up yet.

    Args:
        address: "host:port" or "[IPv6]:port".
        secret: the run's secret.
        deadline: monotonic seconds.
        label: the caller as messages name it, e.g. "rank 1/4".
        generation: for which it comes; 0 is whichever forms next.

    Raises:
        RendezvousTimeout: no server was reached by the deadline; the text has the address and the last cause.
        AuthenticationError: the server does not know the secret.
        InvalidArgument: a variable is set that has gone (`check_removed_variables`).
        RendezvousError: something else speaks on that port.
    """
    parse_address(address)
    check_removed_variables()
    started = time.monotonic()
    backoff_seconds = _FIRST_BACKOFF_SECONDS
    handshakes = 0
    give_up_at = deadline
    while True:
        try:
            stream = _connect(address, min(deadline, time.monotonic() + _DIAL_SECONDS))
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
        else:
            made = _try_handshake(stream, address, secret, deadline, label, generation)
            if isinstance(made, Connection):
                return made
            cause = made
            handshakes += cause != _NO_ANSWER
            if handshakes == 1:
                give_up_at = time.monotonic() + _FLOOD_SECONDS
            if handshakes >= _HANDSHAKE_ATTEMPTS and time.monotonic() >= give_up_at:
                raise RendezvousError(
                    f"{label}: {address} accepts connections but ends each before a handshake ({cause}): "
                    "another service or run holds this port"
                )
        # Jitter keeps ranks that started together from knocking together.
        pause = backoff_seconds * (0.5 + os.urandom(1)[0] / 512)
        if time.monotonic() + pause >= deadline:
            raise RendezvousTimeout(
                f"{label}: no rendezvous server at {address} within {deadline - started:.3g} s; last cause: {cause}",
                cause=cause,
            )
        time.sleep(pause)
        backoff_seconds = min(backoff_seconds * 1.5, _LAST_BACKOFF_SECONDS)


def _connect(address: str, deadline: float) -> socket.socket:
    """Returns a connected socket, or raises OSError."""
    host, port = parse_address(address)
    targets = look_up(host, port)
    while True:
        # An address that swallows what is sent to it leaves the others of that name their share of the time.
        timeout_seconds = max((deadline - time.monotonic()) / len(targets), 0.001)
        family, kind, protocol, _, target = targets.pop(0)
        try:
            return _connect_to(socket.socket(family, kind, protocol), target, timeout_seconds)
        except OSError:
            if not targets:
                raise


def _connect_to(stream: socket.socket, target: Any, timeout_seconds: float) -> socket.socket:
    try:
        stream.settimeout(timeout_seconds)
        stream.connect(target)
        # Dialling a free port of the ephemeral range can connect a socket to itself; that is no server.
        if stream.getsockname() == stream.getpeername():
            raise ConnectionRefusedError("Connection refused (the socket met itself)")
        tune_stream(stream)
    except OSError:
        stream.close()
        raise
    return stream


def _try_handshake(
    stream: socket.socket, address: str, secret: bytes, deadline: float, label: str, generation: int
) -> Connection | str:
    """Returns the authenticated connection, or why another attempt is worth it."""
    try:
        session, reader, proof, server = _shake_hands(
            stream, secret, generation, min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
        )
        return Connection(stream, session, reader, proof, server, address, label)
    except BaseException as error:
        with contextlib.suppress(OSError):  # something in this process may have closed its descriptor
            stream.close()
        if isinstance(error, (StreamEnded, OSError)) and not isinstance(error, RendezvousTimeout):
            return str(error)
        if isinstance(error, RendezvousTimeout):  # a server that has much to do answers later
            return _NO_ANSWER
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
    stream: socket.socket, secret: bytes, generation: int, deadline: float
) -> tuple[Session, FrameReader, bytes, ServerProcess]:
    """Runs the handshake.

    Returns:
        The session, what was read, the proof, which travels with the first message, and which process the server is.
    """
    handshake = ClientHandshake(secret, os.urandom(RANDOM_BYTES), generation)
    reader, unsent, waiter = FrameReader(), handshake.hello(), select.poll()
    while (frame := reader.next_frame()) is None:
        waiter.register(stream, select.POLLIN | select.POLLOUT if unsent else select.POLLIN)
        if not waiter.poll(_milliseconds_until(deadline)) and time.monotonic() >= deadline:
            raise RendezvousTimeout("no answer to the handshake")
        try:
            if unsent:
                unsent = unsent[stream.send(unsent) :]
            data = stream.recv(MAX_FRAME_BYTES)
        except (BlockingIOError, InterruptedError):
            continue
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        if not data:
            raise StreamEnded("connection closed by the server")
        reader.feed(data)
    proof, session = handshake.receive(frame)
    reader.limit_bytes = MAX_FRAME_BYTES
    return session, reader, proof, handshake.server

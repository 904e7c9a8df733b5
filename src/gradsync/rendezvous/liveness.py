"""Heartbeats of a client: a thread that tells the server that this rank lives, and notices when the server does not.

Sits beside `request_channel`, over `inbox` and `client_connection`. The thread needs no other one of this process:
while a rank computes, or waits elsewhere, this thread reads what the server pushes, so that a verdict is known and an
inquiry answered at once. It holds no reference to the client between two turns: a client that is forgotten is closed.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
import weakref

from gradsync.errors import GradsyncError, RendezvousError
from gradsync.machine import machine_identity
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.inbox import Inbox
from gradsync.rendezvous.messages import FrameType
from gradsync.rendezvous.self_report import SelfReport
from gradsync.rendezvous.silence import LATE_AFTER_SECONDS, Judgement, Silence
from gradsync.rendezvous.wire import UNFINISHED

# After input that another thread has read: a rank that asks one request after the other is not to wake this thread
# for each answer.
_STAND_BACK_SECONDS = 0.1
_GONE_WITHIN_SECONDS = 0.2

_log = logging.getLogger("gradsync.rendezvous")


class Liveness:
    """The heartbeats of one client, and its ear for those of the server.

    Args:
        connection: authenticated.
        inbox: reads it.
        self_report: tells how far this rank has come.
        who: the rank as messages name it, e.g. "rank 1/4".
    """

    def __init__(self, connection: ClientConnection, inbox: Inbox, self_report: SelfReport, who: str) -> None:
        self._connection = connection
        self._inbox = inbox
        self._self_report = self_report
        self._who = who
        self._silence = Silence(time.monotonic())
        self._local_pid: int | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, interval_seconds: float) -> None:
        """Starts the thread; it is silent until this rank is seated, and for its first interval."""
        args = (weakref.ref(self), self._connection.input_waiter(), self._ending, interval_seconds)
        self._thread = threading.Thread(target=_keep_alive, args=args, name="gradsync-liveness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Lets the thread end at its next turn: no heartbeat begins after this."""
        self._ending.set()

    def await_end(self) -> None:
        """Waits a moment for the thread to end; the connection has been shut down, which wakes it."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GONE_WITHIN_SECONDS)

    def beat(self, now: float, *, was_late: bool) -> None:
        """Sends a heartbeat, and looks at the server when it has been silent."""
        if self._inbox.server is None:  # not seated: the server does not expect anything yet
            self._silence.restart(now)
            return
        with contextlib.suppress(StreamEnded):  # whoever reads next finds the server gone, and what it said before
            self._connection.post_if_idle(FrameType.HEARTBEAT, self._self_report.progress())
        if was_late:
            self._silence.restart(now)
        elif self._inbox.heard_at > self._silence.heard_at and self._silence.hear(self._inbox.heard_at):
            _log.warning("%s: %s is heard of again", self._who, self._server_name())
        if self._connection.is_stuck:
            self._lose_server(f"{self._server_name()} is lost: {UNFINISHED}")
        elif now >= self._silence.due_at():
            self._look_at_server(now, self._inbox.server)

    def read(self) -> bool:
        """Reads what has come in, unless another thread does; returns whether it has read anything.

        Raises:
            GradsyncError: the server is gone.
        """
        return self._inbox.poll()

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to know any more that this rank lives."""
        return self._inbox.failure is not None

    def _look_at_server(self, now: float, server: tuple[str, int]) -> None:
        machine, pid = server
        is_local = bool(pid and machine) and machine == machine_identity()
        finding = self._connection.look_at_server(pid if is_local else None)
        self._silence.looked(now)
        judgement = self._silence.judge(now, finding)
        silent_seconds = now - self._silence.heard_at
        if judgement is Judgement.SLOW:
            _log.warning("%s: %s", self._who, finding.of_slow(self._server_name(), silent_seconds))
        elif judgement is Judgement.LOST:
            self._lose_server(finding.of_lost(self._server_name(), f"not heard of for {silent_seconds:.1f} s"))

    def _lose_server(self, text: str) -> None:
        self._inbox.give_up(RendezvousError(f"{self._who}: {text}"))
        self._connection.shut_down()  # wakes a thread that reads or writes

    def _server_name(self) -> str:
        pid = self._inbox.server[1] if self._inbox.server is not None else 0
        return f"the rendezvous server at {self._connection.address}{f' (pid {pid})' if pid else ''}"


def _keep_alive(
    reference: weakref.ReferenceType[Liveness],
    input_waiter: select.poll,
    ending: threading.Event,
    interval_seconds: float,
) -> None:
    """The thread: a beat when it is due, and in between an ear for what comes in."""
    beat_at = time.monotonic() + interval_seconds
    pause_seconds = interval_seconds
    has_input = False
    while not ending.wait(pause_seconds):
        liveness = reference()
        if liveness is None or liveness.is_over:
            return
        try:
            now = time.monotonic()
            if now >= beat_at:
                liveness.beat(now, was_late=now - beat_at > LATE_AFTER_SECONDS)
                beat_at = now + interval_seconds
            was_read = liveness.read()
        except GradsyncError:  # it sticks: the client's next call raises it
            return
        del liveness
        pause_seconds = 0.0
        if has_input and not was_read:
            pause_seconds = max(min(_STAND_BACK_SECONDS, beat_at - time.monotonic()), 0.0)
            has_input = False
        else:
            has_input = bool(input_waiter.poll(max(beat_at - time.monotonic(), 0.0) * 1000.0 + 1.0))

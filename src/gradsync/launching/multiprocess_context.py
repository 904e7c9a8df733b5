"""The ranks that `gs.spawn` has started, while they run and after: what its caller waits for and reads."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref

from gradsync.launching.failure_report import failure_text
from gradsync.launching.function_outcome import failure, raise_for_signal
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome, RankOutcome, signal_name
from gradsync.launching.rank_process import RankProcess
from gradsync.launching.signal_inbox import SignalInbox
from gradsync.launching.spawned_process import RankQueue, SpawnedProcess
from gradsync.launching.supervisor import Supervisor


class MultiprocessContext:
    """The ranks that `gs.spawn` has started.

    Args:
        job: what to run.
        joins: whether `run` is called next; else a thread watches the ranks.
        daemon: whether this program ends without waiting for them.

    Attributes:
        processes: a `SpawnedProcess` per rank.
    """

    def __init__(self, job: Job, *, joins: bool, daemon: bool) -> None:
        self._lock = threading.Lock()
        self._has_ended = False
        self._waiting: list[threading.Lock] = []  # one for each wait: Ctrl-C may leave it taken
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._takes_signals = True
        self._pid = os.getpid()
        self.processes: list[SpawnedProcess] = []
        try:
            # A Ctrl-C meanwhile waits: between two steps it would leave ranks behind that nobody watches.
            with contextlib.nullcontext() if joins else SignalInbox():
                try:
                    self._start(job, joins=joins, daemon=daemon)
                except BaseException:
                    self._has_ended = True  # nobody watches
                    raise
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _start(self, job: Job, *, joins: bool, daemon: bool) -> None:
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(SignalInbox(installs_handlers=joins))
            self._supervisor = stack.enter_context(Supervisor(job, self._signals, on_news=self._take_news))
            self._supervisor.start()
            self.processes = [SpawnedProcess(rank, daemon=daemon) for rank in self._supervisor.ranks]
            stack.callback(self._refuse_signals)
            self._resources = stack.pop_all()
        if not joins:
            # Not a daemon by default: as with multiprocessing, a program that comes to its end waits for its processes.
            thread = threading.Thread(target=self._watch, name="gradsync-supervisor", daemon=daemon)
            thread.start()
            _end_with_program(self)

    @property
    def return_queues(self) -> list[RankQueue]:
        """Per rank, a queue that gets what its function returned, as soon as it has come."""
        return [process.return_queue for process in self.processes]

    @property
    def error_queues(self) -> list[RankQueue]:
        """Per rank, a queue that gets the traceback of the exception that ended it."""
        return [process.error_queue for process in self.processes]

    @property
    def sentinels(self) -> list[int]:
        """Per rank, a descriptor that is readable once it has ended, for `multiprocessing.connection.wait`."""
        return [process.sentinel for process in self.processes]

    def pids(self) -> list[int | None]:
        """Gives the process id of each rank."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all ranks have ended. A Ctrl-C meanwhile ends them in order; a second one kills them.

        Args:
            timeout: how many seconds to wait at most.

        Returns:
            True when all have ended, False when the time is over.

        Raises:
            RankFailed: a rank failed, and all others were ended.
            KeyboardInterrupt: Ctrl-C came; all ranks have ended.
        """
        try:
            if not self._await_end(timeout):
                return False
        except KeyboardInterrupt:
            self._interrupt()
            raise
        atexit.unregister(self._tell_failure)
        self._raise_failure()
        return True

    def run(self) -> None:
        """Watches the ranks to their end in the calling thread.

        Raises:
            RankFailed, KeyboardInterrupt: as `join` does.
            SystemExit: SIGTERM or SIGHUP came.
        """
        self._watch()
        atexit.unregister(self._tell_failure)
        if self._outcome is not None:
            raise_for_signal(self._outcome)
        self._raise_failure()

    def _watch(self) -> None:
        try:
            with self._resources:
                self._outcome = self._supervisor.finish()
            if self._outcome.signal_number is None and self._outcome.root_cause is not None:
                atexit.register(self._tell_failure)
        except BaseException as error:
            self._error = error
        finally:
            for process in self.processes:
                process.end()  # one that cannot be killed, too
            del self._supervisor  # it holds this object, and together they would keep the sentinels open
            self._has_ended = True
            for waiting in tuple(self._waiting):
                waiting.release()

    def _await_end(self, timeout: float | None) -> bool:
        """Waits until all ranks have ended; returns whether they have."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        if not self._has_ended:
            waiting.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        self._waiting.remove(waiting)
        return self._has_ended

    def _take_news(self, rank: RankProcess) -> None:
        if self.processes:  # empty where not all of them could be started
            self.processes[rank.local_rank].take_news()

    def _refuse_signals(self) -> None:
        """Keeps others from the inbox, which is about to close."""
        with self._lock:
            self._takes_signals = False

    def _put_interrupt(self) -> None:
        with self._lock:
            if self._takes_signals:
                self._signals.put(signal.SIGINT)

    def _interrupt(self) -> None:
        """Ends the ranks as a Ctrl-C to them would, and waits for it."""
        while not self._has_ended:
            self._put_interrupt()
            with contextlib.suppress(KeyboardInterrupt):  # which is then put, too, and kills
                self._await_end(None)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        outcome = self._outcome
        if outcome is None or outcome.signal_number is not None:
            return
        root = outcome.root_cause
        if root is not None:
            raise failure(outcome, root, _headline(root))

    def _tell_failure(self) -> None:
        """Tells at the end of the program of a failure for which nobody has asked."""
        if self._outcome is not None:
            sys.stderr.write(failure_text(self._outcome))


_watched: weakref.WeakSet[MultiprocessContext] = weakref.WeakSet()
_is_registered = False


def _end_with_program(context: MultiprocessContext) -> None:
    """Has the context's ranks end with a program that a Ctrl-C has ended: they do not see a terminal's themselves."""
    global _is_registered
    _watched.add(context)
    if not _is_registered:
        _is_registered = True
        threading._register_atexit(_end_if_interrupted)  # type: ignore[attr-defined]


def _end_if_interrupted() -> None:
    """Called before the interpreter waits for its threads."""
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        for context in list(_watched):
            if context._pid == os.getpid():  # not in a process that was forked since
                context._put_interrupt()


def _headline(root: RankOutcome) -> str:
    if root.error is not None:
        return f"Process {root.rank} terminated with the following error:"
    if root.exit_code is None:
        return f"Process {root.rank} could not be killed; it may hang in the kernel (pid {root.pid})"
    if root.exit_code >= 0:
        return f"Process {root.rank} terminated with exit code {root.exit_code}"
    why = "" if root.memory_kill is None else f": {root.memory_kill}"
    return f"Process {root.rank} terminated with signal {signal_name(-root.exit_code)}{why}"

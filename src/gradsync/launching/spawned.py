"""What `gs.spawn` returns: the ranks as processes with sentinels and queues, like those of multiprocessing."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gradsync.launching.calls import failure, load_result, raise_for_signal
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome, RankOutcome, failure_text, signal_name
from gradsync.launching.rank_process import RankProcess
from gradsync.launching.signals import SignalInbox
from gradsync.launching.supervisor import Supervisor
from gradsync.machine import Latch


class MultiprocessContext:
    """The ranks that `gs.spawn` has started.

    Args:
        job: the job to run.
        joins: whether to wait for the end of the ranks here, and to raise what `spawn` then raises. If not, a thread
            watches them.
        daemon: whether this program, at its end, ends the ranks instead of waiting for them.

    Attributes:
        processes: a `SpawnedProcess` for each rank.
        return_queues: for each rank, a queue that gets the return value of the rank's function.
        error_queues: for each rank, a queue that gets the traceback of the exception that ended the rank.
        sentinels: for each rank, a descriptor for `multiprocessing.connection.wait`; see `SpawnedProcess.sentinel`.
    """

    def __init__(self, job: Job, *, joins: bool, daemon: bool) -> None:
        self.processes: list[SpawnedProcess] = []
        self._has_started, self._end = Latch(), Latch()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(SignalInbox(installs_handlers=joins))
            run = functools.partial(self._run, job, daemon, stack.pop_all())
        if joins:
            run()
            if self._outcome is not None:
                raise_for_signal(self._outcome)
            self._raise_failure()
            return
        # Not a daemon by default: as with multiprocessing, a program waits for its processes at its end.
        thread = threading.Thread(target=run, name="gradsync-supervisor", daemon=daemon)
        with self._ending_at_interrupt():
            with SignalInbox():  # a Ctrl-C waits until the thread runs
                thread.start()
            # The terminal does not send Ctrl-C to the ranks.
            threading._register_atexit(_end_if_interrupted, weakref.ref(self), os.getpid())  # type: ignore[attr-defined]
            self._has_started.wait()
        if not self.processes:
            self._raise_failure()

    def _run(self, job: Job, daemon: bool, resources: contextlib.ExitStack) -> None:
        """Starts the ranks, and watches them until they have ended."""
        try:
            with resources, Supervisor(job, self._signals, on_change=self._update_process) as supervisor:
                supervisor.start()
                self.processes = [SpawnedProcess(rank, daemon=daemon) for rank in supervisor.ranks]
                self.return_queues = [process.return_queue for process in self.processes]
                self.error_queues = [process.error_queue for process in self.processes]
                self.sentinels = [process.sentinel for process in self.processes]
                self._has_started.set()
                self._outcome = supervisor.finish()
            if self._outcome.signal_number is None and self._outcome.root_cause is not None:
                atexit.register(self._print_failure)
        except BaseException as error:
            self._error = error
        finally:
            for process in self.processes:
                process.update(has_ended=True)  # also a process that cannot be killed
            self._end.set()
            self._has_started.set()

    def pids(self) -> list[int | None]:
        """Returns each rank's process id; None if the rank never began. Waits until all ranks have begun or ended."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all ranks have ended. During the wait, Ctrl-C asks the ranks to end; a second Ctrl-C kills them.

        Args:
            timeout: how many seconds to wait at most.

        Returns:
            True if all ranks have ended, False at the timeout.

        Raises:
            RankFailed: a rank failed; all ranks have ended.
            KeyboardInterrupt: Ctrl-C came; all ranks have ended.
        """
        with self._ending_at_interrupt():
            if not self._end.wait(timeout):
                return False
        self._raise_failure()
        return True

    def _update_process(self, rank: RankProcess) -> None:
        if self.processes:  # the list is empty if a start failed
            self.processes[rank.rank].update()

    @contextlib.contextmanager
    def _ending_at_interrupt(self) -> Iterator[None]:
        """Ends the ranks at a Ctrl-C, and raises it when they have ended."""
        try:
            yield
        except KeyboardInterrupt:
            while not self._end.is_set:
                self._signals.put(signal.SIGINT)
                with contextlib.suppress(KeyboardInterrupt):  # the loop forwards this second Ctrl-C too
                    self._end.wait()
            raise

    def _raise_failure(self) -> None:
        atexit.unregister(self._print_failure)
        if self._error is not None:
            raise self._error
        outcome = self._outcome
        if outcome is not None and outcome.signal_number is None and (root := outcome.root_cause) is not None:
            raise failure(outcome, _headline(root))

    def _print_failure(self) -> None:
        """Prints a failure at the end of the program, unless `join` has raised it."""
        if self._outcome is not None:
            sys.stderr.write(failure_text(self._outcome))


def _end_if_interrupted(reference: weakref.ref[MultiprocessContext], pid: int) -> None:
    """Ends the ranks if Ctrl-C ends the program; called before the interpreter waits for threads."""
    context = reference()
    # A forked copy of the program leaves the ranks alone.
    if context is not None and pid == os.getpid() and getattr(sys, "last_type", None) is KeyboardInterrupt:
        context._signals.put(signal.SIGINT)


def _headline(root: RankOutcome) -> str:
    if root.error is not None:
        return f"Process {root.rank} terminated with the following error:"
    if root.exit_code is None:
        return f"Process {root.rank} could not be killed; it may hang in the kernel (pid {root.pid})"
    if root.exit_code >= 0:
        return f"Process {root.rank} terminated with exit code {root.exit_code}"
    return f"Process {root.rank} terminated with signal {signal_name(-root.exit_code)}{root.out_of_memory}"


class RankQueue:
    """A queue for one object that a rank sends.

    `get` waits for nothing that cannot come: it raises `queue.Empty` if the rank has ended without sending it, or if
    an earlier call has returned it.
    """

    _END = object()

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._things: queue.SimpleQueue[Any] = queue.SimpleQueue()  # its put() never waits, so the watching thread can
        self._convert = convert

    def settle(self, thing: Any) -> None:
        """Puts what the rank has sent, or None, into the queue. Called once."""
        if thing is not None:
            self._things.put(thing)
        self._things.put(self._END)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Returns what the rank has sent, once.

        Args:
            block: whether to wait for it.
            timeout: how many seconds to wait at most.

        Raises:
            queue.Empty: nothing arrived in time, or nothing can arrive.
        """
        thing = self._things.get(block, timeout)
        if thing is self._END:
            self._things.put(thing)
            raise queue.Empty
        return self._convert(thing)

    def empty(self) -> bool:
        """Returns whether the queue is empty now."""
        return self._things.qsize() < 2


class SpawnedProcess:
    """One rank of `gs.spawn`, with methods like those of a started `multiprocessing.Process`.

    Attributes:
        rank: the number of the rank.
        name: the name of the process, such as "gradsync-rank-1" for rank 1.
        daemon: whether this program, at its end, ends the process instead of waiting for it.
        sentinel: a descriptor for `multiprocessing.connection.wait`, readable once the process and every process that
            it has started have ended.
        return_queue: a queue that gets the return value of the function.
        error_queue: a queue that gets the traceback, as text, of the exception that ended the process.
    """

    def __init__(self, rank: RankProcess, *, daemon: bool) -> None:
        self._rank = rank
        self.rank = rank.rank
        self.name = f"gradsync-rank-{rank.rank}"
        self.daemon = daemon
        # An eventfd stays readable for any number of readers, and a copy in a forked process does no harm.
        self.sentinel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.sentinel).atexit = False
        self.return_queue = RankQueue(functools.partial(load_result, rank.rank))
        self.error_queue = RankQueue(str)
        self._begun = Latch()
        self._has_reported = False  # it has sent its result or error, or has ended

    def __repr__(self) -> str:
        state = "started" if self.is_alive() else f"stopped exitcode={self.exitcode}"
        return f"<{type(self).__name__} name={self.name!r} {state}>"

    @property
    def pid(self) -> int | None:
        """The process id; None if the process never began. It waits for the start."""
        self._begun.wait()
        return self._rank.outcome.pid or None

    @property
    def exitcode(self) -> int | None:
        """The exit code; -n if signal n killed the process; None if the process still runs or cannot be killed."""
        return None if self.is_alive() else self._rank.outcome.exit_code

    def is_alive(self) -> bool:
        """Returns whether the process, or a process that it has started, still runs."""
        return not self._has_ended(0.0)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the process, at most for `timeout` seconds."""
        self._has_ended(timeout)

    def _has_ended(self, wait_seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(None if wait_seconds is None else max(0.0, wait_seconds * 1000.0)))

    def terminate(self) -> None:
        """Sends SIGTERM to the process group of the rank: the process, and processes that it has started."""
        self._rank.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process; the guard then kills all processes that this process has started."""
        self._rank.send_signal(signal.SIGKILL)

    def update(self, *, has_ended: bool = False) -> None:
        """Puts the rank's report into its queue. Only the thread that watches the rank calls it.

        Args:
            has_ended: whether it is known that the rank has ended, or cannot be killed.
        """
        outcome = self._rank.outcome
        has_ended = has_ended or self._rank.is_reaped
        if outcome.pid or has_ended:
            self._begun.set()
        if not self._has_reported and (has_ended or outcome.result is not None or outcome.error is not None):
            self._has_reported = True
            self.return_queue.settle(outcome.result)
            self.error_queue.settle(None if outcome.error is None else outcome.error.text)
        if has_ended and self.is_alive():
            os.eventfd_write(self.sentinel, 1)

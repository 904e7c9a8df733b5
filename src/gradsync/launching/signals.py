"""Collects the signals to the launcher as bytes in a pipe, for which the supervisor's loop can wait.

Python writes a signal's number to the pipe as soon as it comes (signal.set_wakeup_fd). Handlers alone are not enough:
they run between two instructions of the main thread, so for a signal just before a wait only after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from gradsync.launching.in_rank.guard import ENDING, WARNING

_HANDLED = (*ENDING, signal.SIGTSTP)
_LAST_STANDARD_DESCRIPTOR = 2


class SignalInbox:
    """A context in which SIGINT, SIGTERM, SIGHUP and SIGTSTP have no effect, and are collected here.

    So is what schedulers send as a warning, unless the program has handlers of its own for it. A signal that nobody has
    read takes its usual effect when the block ends.

    Only the main thread can install handlers, so an inbox in another thread gets no signals. A signal that the process
    ignores (as under nohup, or in a background job) stays ignored; but SIGCHLD gets its default back: the kernel would
    discard exit codes, and a failed rank would seem to have succeeded.

    Args:
        installs_handlers: whether to install handlers. Without them, for a program that goes on while a thread watches
            the job, signals keep their usual effect, and only `put` fills the inbox.
    """

    def __init__(self, *, installs_handlers: bool = True) -> None:
        self._installs_handlers = installs_handlers
        self._writing = threading.Lock()  # `put` in another thread must not write to a descriptor that is closed here
        self._writer = -1
        self._previous: dict[signal.Signals, Callable[..., Any] | int] = {}
        self._previous_wakeup: int | None = None

    def __enter__(self) -> SignalInbox:
        _occupy_standard_descriptors()
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        _entered.append(self)
        try:
            self._install()
        except BaseException:  # an old handler of the program has raised an exception
            self.__exit__(None, None, None)
            raise
        return self

    def _install(self) -> None:
        if self._installs_handlers and threading.current_thread() is threading.main_thread():
            # The pipe is set before the handlers, and reset after them (`_restore`). A signal in between runs its old
            # handler, or is written to the pipe, or both.
            self._previous_wakeup = -1  # in case a signal handler raises during the next line
            self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in (*_HANDLED, *WARNING):
                previous = signal.getsignal(number)
                # None means that the handler was not installed from Python, and could not be restored.
                is_free = previous not in (None, signal.SIG_IGN) if number in _HANDLED else previous == signal.SIG_DFL
                if is_free and previous is not None:
                    self._previous[number] = previous
                    signal.signal(number, _do_nothing)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
                self._previous[signal.SIGCHLD] = signal.SIG_IGN
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._restore()
        finally:
            _entered.remove(self)
            unread = [number for number in self.read() if number in self._previous]
            with self._writing:
                writer, self._writer = self._writer, -1
            os.close(self.descriptor)
            os.close(writer)
            for number in unread:
                signal.raise_signal(number)

    def put(self, number: int) -> None:
        """Adds a signal as if it had come; any thread may. After the `with` block it does nothing."""
        with self._writing, contextlib.suppress(BlockingIOError):
            if self._writer >= 0:
                os.write(self._writer, bytes([number]))

    def read(self) -> list[int]:
        """Returns the signals that arrived since the last call, without waiting."""
        try:
            data = os.read(self.descriptor, 64)
        except BlockingIOError:
            return []
        ours = [number for number in data if number in _HANDLED or number in self._previous]
        if len(ours) < len(data) and self._previous_wakeup not in (None, -1):
            with contextlib.suppress(OSError):  # forward to the program's wake-up pipe, such as asyncio's
                os.write(self._previous_wakeup, bytes(number for number in data if number not in ours))
        return ours

    def _restore(self) -> None:
        with contextlib.ExitStack() as stack:  # restores all, from last to first, even if a handler raises
            if self._previous_wakeup is not None:
                stack.callback(signal.set_wakeup_fd, self._previous_wakeup)
            for number, previous in self._previous.items():
                stack.callback(signal.signal, number, previous)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler that does nothing: Python writes a signal to the pipe only if the signal has a handler."""


@contextlib.contextmanager
def no_other_fork() -> Iterator[None]:
    """Makes forks of other threads wait while this thread starts a process.

    Their children would keep copies of descriptors that this thread is about to close: of the rank's end of a pipe, by
    whose closing the launcher knows that the rank has ended, and of a pipe that `subprocess.Popen` reads to its end.
    """
    with _fork_lock:
        yield


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # a signal's handler has raised while the fork waited for it
        _fork_lock.release()


def _after_fork_in_child() -> None:
    """Restores signal handling in the child of every fork: its signals must not go into its parent's pipe."""
    global _fork_lock
    _fork_lock = threading.RLock()
    for inbox in reversed(_entered):
        inbox._restore()
    _entered.clear()


# Reentrant, because a signal handler may fork while its thread holds this lock.
_fork_lock = threading.RLock()
_entered: list[SignalInbox] = []
os.register_at_fork(
    before=lambda: _fork_lock.acquire(), after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def _occupy_standard_descriptors() -> None:
    """Opens /dev/null in place of each closed standard stream, so that no pipe gets the descriptor 0, 1 or 2."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_DESCRIPTOR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)

"""Signals to the launcher as bytes on a pipe, so that the supervisor's one loop can wait for them.

Python writes the bytes (signal.set_wakeup_fd) at the very moment at which a signal arrives. A handler in Python would
run only between two instructions of the main thread: a signal just before the loop begins to wait would not end that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)

_LAST_STANDARD_DESCRIPTOR = 2

# What other machines of the run have to say comes the same way, by numbers that no signal has.
#: The run has failed on another machine.
FAILED_ELSEWHERE = 254
#: It has failed there, as far as is known only because of a rank of another machine: that one may still tell its own.
SUFFERED_ELSEWHERE = 253
#: There is something new to look at.
NEWS_ELSEWHERE = 252

#: Descriptors of this process that end with it: a forked rank must not keep them open.
own_descriptors: set[int] = set()


class SignalInbox:
    """While entered in the main thread, collects SIGINT, SIGTERM, SIGHUP and SIGTSTP instead of letting them act.

    Other threads cannot install handlers: there the inbox stays empty. A signal that the process ignores
    (nohup, a background job) stays ignored; but for SIGCHLD, because with that ignored the kernel throws exit codes
    away, and a failed rank would look like a good one. What came and was not read acts on leaving.

    Args:
        installs_handlers: False for a job that is watched while the program goes on: signals act as ever, and the
            inbox holds only what is put there.
    """

    def __init__(self, *, installs_handlers: bool = True) -> None:
        self._installs_handlers = installs_handlers
        self._previous: dict[signal.Signals, Callable[..., Any] | int] = {}
        self._previous_wakeup: int | None = None

    def __enter__(self) -> SignalInbox:
        _occupy_standard_descriptors()
        self.descriptor, self._writer = os.pipe()
        own_descriptors.update((self.descriptor, self._writer))
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        _entered.append(self)
        try:
            self._install()
        except BaseException:  # a handler of the program's, which was not replaced yet
            self.__exit__(None, None, None)
            raise
        return self

    def _install(self) -> None:
        if self._installs_handlers and threading.current_thread() is threading.main_thread():
            # The pipe first, and in _restore last: what comes in between acts, or is in the pipe, or both.
            self._previous_wakeup = -1  # in case a handler raises before the next line has ended
            self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                # None: a handler that was not installed from Python, which we could not restore.
                if previous is not None and previous != signal.SIG_IGN:
                    self._previous[number] = previous
                    signal.signal(number, _is_in_the_pipe)
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
            for descriptor in (self.descriptor, self._writer):
                own_descriptors.discard(descriptor)
                os.close(descriptor)
            for number in unread:
                signal.raise_signal(number)

    def put(self, number: int) -> None:
        """Adds a signal as if it had come; safe in any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))

    def read(self) -> list[int]:
        """Gives the signals that came since the last call, without waiting."""
        try:
            told = os.read(self.descriptor, 64)
        except BlockingIOError:
            return []
        ours = [number for number in told if number in _SIGNALS or number >= signal.NSIG]
        if len(ours) < len(told) and self._previous_wakeup not in (None, -1):
            with contextlib.suppress(OSError):  # the program's own signals: asyncio waits for them in this way
                os.write(self._previous_wakeup, bytes(number for number in told if number not in ours))
        return ours

    def _restore(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, from the last to the first: a handler may raise at once
            if self._previous_wakeup is not None:
                stack.callback(signal.set_wakeup_fd, self._previous_wakeup)
            for number, previous in self._previous.items():
                stack.callback(signal.signal, number, previous)


def _is_in_the_pipe(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: a signal has a handler, so that Python writes it to the pipe."""


@contextlib.contextmanager
def no_other_fork() -> Iterator[None]:
    """Surrounds the start of a process by this thread: forks of other threads wait.

    Their children would hold copies of descriptors that are closed here in a moment, such as the pipe whose end tells
    `subprocess.Popen` that its program runs: it would wait for as long as such a child lives.
    """
    with _fork_lock:
        yield


@contextlib.contextmanager
def kept_in_fork(descriptors: Iterable[int]) -> Iterator[None]:
    """Surrounds a fork by this thread whose child is to have these of our descriptors."""
    global _kept
    with _fork_lock:
        _kept = threading.get_ident(), frozenset(descriptors)
        try:
            yield
        finally:
            _kept = 0, frozenset()


def _before_fork() -> None:
    _fork_lock.acquire()


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # a signal's handler has raised while _before_fork waited
        _fork_lock.release()


def _after_fork_in_child() -> None:
    """In a child of any fork, also of the user: its signals are its own, and it ends no wait of this process.

    Its copies of our descriptors would hide the end of a run from those who wait for it.
    """
    global _fork_lock
    _fork_lock = threading.RLock()
    for inbox in reversed(_entered):
        inbox._restore()
    _entered.clear()
    thread, kept = _kept
    if thread == threading.get_ident():  # a rank: what comes to it must not wake the asyncio of the program here
        signal.set_wakeup_fd(-1)
    else:
        kept = frozenset()
    for descriptor in own_descriptors - kept:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    own_descriptors.clear()


# Reentrant: `kept_in_fork` surrounds a fork, and a signal's handler may fork too.
_fork_lock = threading.RLock()
_kept: tuple[int, frozenset[int]] = (0, frozenset())
_entered: list[SignalInbox] = []
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _occupy_standard_descriptors() -> None:
    """Opens /dev/null where standard input, output or error is closed: nothing of ours must get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_DESCRIPTOR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)

"""The guard: a small process that ends all processes of one rank when the rank or the launcher ends.

Each rank process forks at its very start. The child is the rank; users see its process id. The parent becomes the
guard: it sends the rank the signals that the launcher asks for, and tells the launcher how the rank ended. It is a
child subreaper (see prctl): when a program that the rank has started ends, the children that it leaves behind become
children of the guard, also after a double fork. When the rank ends, or the launcher dies in any way, the guard kills
all processes that are left. Only helpers that remove what the rank has left in shared memory get a moment to end by
themselves.

**Each signal reaches the rank once.** The guard and the rank are each in a session of their own, so no terminal sends
the guard anything. A signal that the guard gets directly was sent to every process of the run, as `scancel`, systemd
and `pkill` do, and so the rank has it too, and the launcher, which asks for it to be forwarded. The guard waits a
moment before it forwards, and does not forward what has come, or comes meanwhile, by itself.

This module runs before anything else in a rank process, so it imports as little as possible.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from typing import NamedTuple, NoReturn

#: The guard's messages on the status pipe: what happened, a number, and the rank's peak memory in bytes.
MESSAGE = struct.Struct("<cqq")
STARTED = b"S"  # with the rank's process id
ENDED = b"E"  # with the rank's exit code, or -n if signal n ended it
GAVE_UP = b"G"  # some processes of the rank could not be ended

#: The signals that mean "end" and go to the rank's process group, as those of a terminal do.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals by which schedulers warn a program. They go to the rank alone: most programs that it starts would die.
WARNING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_TO_RANK_ALONE = (*WARNING, signal.SIGKILL)  # after SIGKILL, `_end` kills the others, but for helpers that clean up
_FORWARD_AFTER_SECONDS = 0.05
_CAME_BEFORE_SECONDS = 3.0  # how long a busy launcher may take to ask for a signal that every process got at once

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_SECONDS = 1.5  # a process that is left after this time is stuck in the kernel
_SWEEP_WAIT_SECONDS = 0.02
# Helper processes of multiprocessing (also of loky's copy) and of torch. When the last process that uses one has gone,
# its pipe closes, it removes the segments and semaphores that are left, and ends; torch's helper after 2 s.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")
_CLEAN_UP_SECONDS = 5.0


class Descriptors(NamedTuple):
    """The descriptors that a rank process gets from its launcher.

    Attributes:
        launcher: readable when the launcher has ended (a pidfd); -1 before Linux 5.3.
        command: the read end of the pipe on which the launcher writes signals, one byte each. It closes when the
            launcher has ended, or has given the rank up.
        status: the write end of the pipe for the guard's messages.
        record: a file in memory with the start record, see `rank_process.start_record`.
        report: the write end of the pipe on which the rank tells what it has put into the result file.
        result: an empty file in memory, for the rank's return value or error.
    """

    launcher: int
    command: int
    status: int
    record: int
    report: int
    result: int


def start_guard(rank: int, descriptors: Descriptors) -> None:
    """Forks this process. The child returns and is the rank; the parent guards the child and never returns."""
    import ctypes  # imported here, as below, because the launcher imports this module too and has to start fast

    libc = ctypes.CDLL(None)
    guard_pid = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, *WARNING))
    # If the launcher ignores SIGCHLD, this process does too, and would not see the end of a rank that ends before `run`
    # sets the guard's own handler.
    inherited = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # before the rank can leave a child behind
    try:
        pid = os.fork()
    except OSError as error:  # a limit of processes: the launcher tells the remedy
        raise SystemExit(f"gradsync: rank {rank} cannot start: {error.strerror}") from None
    if pid == 0:
        signal.signal(signal.SIGCHLD, inherited)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in (descriptors.launcher, descriptors.command, descriptors.status):
            if descriptor >= 0:
                os.close(descriptor)
        os.setsid()  # a new process group, so that a signal reaches all its processes
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard_pid:  # the guard died before the call of prctl
            os.kill(os.getpid(), signal.SIGKILL)
        return
    try:
        for descriptor in (descriptors.record, descriptors.report, descriptors.result):
            os.close(descriptor)
        _Guard(pid, descriptors).run(f"gradsync: guard of rank {rank} (pid {pid})")
    finally:  # in any case, this process must not continue as a second rank
        os._exit(70)


class _Guard:
    """Guards one rank, a child of this process, which reaps it only at the end; so no other process gets its id."""

    def __init__(self, rank_pid: int, descriptors: Descriptors) -> None:
        self._rank_pid = rank_pid
        self._launcher, self._command, self._status = descriptors[:3]
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._came_at: dict[int, float] = {}  # when each signal came directly for the last time
        self._forward_at: dict[int, float] = {}  # signals that the launcher has asked for, and when they are due

    def run(self, title: str) -> NoReturn:
        """Waits until the rank has ended or the launcher is gone, ends all processes of the rank, and exits."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *ENDING, *WARNING):
            signal.signal(number, lambda *_: None)  # the wake-up pipe reports these signals
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._tell(STARTED, self._rank_pid)
        _release_standard_input()
        _set_title(title)
        poll = select.poll()
        for descriptor in (self._wake, self._command, self._launcher):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        is_launcher_gone = False
        while not is_launcher_gone and not self._rank_has_ended():
            for descriptor, _ in poll.poll(self._forward_due_signals()):
                if descriptor == self._wake:
                    self._take_signals()
                else:  # a child of the launcher may hold the command pipe open, so the launcher's own end counts too
                    is_launcher_gone = descriptor == self._launcher or not self._take_commands()
        self._end()

    def _take_signals(self) -> None:
        for number in os.read(self._wake, 64):
            if self._forward_at.pop(number, None) is None:
                self._came_at[number] = time.monotonic()

    def _take_commands(self) -> bool:
        """Takes the signals that the launcher asks for; returns whether the launcher still runs."""
        numbers = os.read(self._command, 64)
        now = time.monotonic()
        for number in numbers:
            if number not in ENDING and number not in WARNING:
                self._signal_rank(number)
            elif now - self._came_at.pop(number, -_CAME_BEFORE_SECONDS) >= _CAME_BEFORE_SECONDS:
                self._forward_at.setdefault(number, now + _FORWARD_AFTER_SECONDS)
        return bool(numbers)

    def _forward_due_signals(self) -> int | None:
        """Forwards the signals whose time has come; returns the milliseconds until the next one, or None."""
        now = time.monotonic()
        for number in [number for number, due in self._forward_at.items() if due <= now]:
            del self._forward_at[number]
            self._signal_rank(number)
        return int(1000 * (min(self._forward_at.values()) - now)) + 1 if self._forward_at else None

    def _signal_rank(self, number: int) -> None:
        """Sends a signal to the rank's process group, or to the rank alone if it has not made its group yet."""
        try:
            send = os.kill if number in _TO_RANK_ALONE else os.killpg
            send(self._rank_pid, number)
        except ProcessLookupError:
            os.kill(self._rank_pid, number)
        except PermissionError:
            return  # the rank runs as a different user now
        if number == signal.SIGTERM:
            self._signal_rank(signal.SIGCONT)  # a rank that is paused (SIGSTOP) could not react

    def _rank_has_ended(self) -> bool:
        """Reaps the orphans of the rank. Returns whether the rank itself has ended; does not reap the rank."""
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            if ended.si_pid == self._rank_pid:
                return True
            os.waitpid(ended.si_pid, 0)

    def _end(self) -> NoReturn:
        """Kills the rank and all that it has started, tells how the rank ended, and exits.

        Each killed process leaves its own children to this process. A helper that cleans up is killed only if it has
        not ended in time.
        """
        self._signal_rank(signal.SIGKILL)
        now = time.monotonic()
        cleaned_up_by, deadline = now + _CLEAN_UP_SECONDS, now + _SWEEP_SECONDS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        while has_children := self._reap_all():
            now = time.monotonic()
            if now >= deadline:
                break
            for child in _children_of(os.getpid()):
                if now < cleaned_up_by and _cleans_up(child):
                    deadline = now + _SWEEP_SECONDS
                else:
                    with contextlib.suppress(PermissionError):  # one of another user, e.g. by sudo: the others go on
                        os.kill(child, signal.SIGKILL)  # a child that is not reaped: no other process has its id
            signal.sigtimedwait({signal.SIGCHLD}, _SWEEP_WAIT_SECONDS)
        if has_children:
            self._tell(GAVE_UP)
        os._exit(0)

    def _reap_all(self) -> bool:
        """Reaps all children that have ended; returns whether other children are left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._rank_pid:
                self._tell(ENDED, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)

    def _tell(self, kind: bytes, number: int = 0, peak_bytes: int = 0) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(self._status, MESSAGE.pack(kind, number, peak_bytes))


def _children_of(parent: int) -> list[int]:
    """Returns the process ids of the children of a process, without children that have ended."""
    children = []  # machine.read_stat reads the same files, but this module imports nothing of gradsync
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent_of_it = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # the process has ended
            continue
        if int(parent_of_it) == parent and state not in b"ZX":
            children.append(int(name))
    return children


def _cleans_up(pid: int) -> bool:
    """Returns whether a process is a helper that removes what its rank has left."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:  # the process has ended
        return False
    return any(name in command for name in _CLEANERS)


def _release_standard_input() -> None:
    """Replaces the guard's standard input by /dev/null, so that only the rank reads it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)


def _set_title(title: str) -> None:
    """Replaces the command line of this process, which `ps` shows, by a title."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of the file, arg_start and arg_end
    room = end - start - 1
    if start and room > 0:
        text = title.encode()[:room]
        ctypes.memmove(start, text + b"\0" * (end - start - len(text)), end - start)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"gradsync-guard", 0, 0, 0)

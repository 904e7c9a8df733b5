"""The guard: a small process that ends all processes of one rank when the rank or the launcher ends.

Each rank process forks at its very start. The child is the rank; users see its process id. The parent becomes the
guard: it forwards the launcher's signals, and reports to the launcher how the rank ended. The guard is a child
subreaper (see prctl): when a program that the rank has started ends, the children that it leaves behind become children
of the guard, also after a double fork. When the rank ends, or the launcher dies in any way, the guard kills all
processes that are left. Only helpers that remove what the rank has left in shared memory get a moment to end by
themselves.

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

#: The guard's messages on the status pipe. STARTED has the rank's process id; ENDED has the rank's exit code and its
#: peak memory in bytes.
STARTED = struct.Struct("<cq")
ENDED = struct.Struct("<ciq")
STARTED_KIND, ENDED_KIND = b"S", b"E"
#: Exit code of a guard that could not end all processes of its rank.
GAVE_UP = 71

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the signals to the guard that it forwards to the rank
_SWEEP_SECONDS = 1.5  # a process that is left after this time is stuck in the kernel
_SWEEP_WAIT_SECONDS = 0.02
# Helper processes of multiprocessing (also of loky's copy) and of torch. When the last process that uses one has gone,
# its pipe closes, it removes the segments and semaphores that are left, and ends; torch's helper after 2 s.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")
_CLEAN_UP_SECONDS = 5.0
# Only before Linux 5.3: how often the guard checks whether the launcher is alive. The end of the command pipe is not
# enough, because a child of the launcher may hold a copy of the pipe's write end.
_LOOK_FOR_LAUNCHER_MS = 500


class GuardDescriptors(NamedTuple):
    """The descriptors that a rank process gets from its launcher.

    Attributes:
        status: the write end of the pipe on which the guard reports the rank's start and end.
        command: the read end of the pipe on which the launcher writes signals, one byte each. If this pipe closes, the
            launcher has died.
        report: the write end of the pipe on which the rank sends the kind of its report, once the report is in the
            result file.
        result_file: an empty file in memory, for the rank's return value or error.
    """

    status: int
    command: int
    report: int
    result_file: int


def start_guard(rank: int, launcher_pid: int, descriptors: GuardDescriptors, record: int) -> None:
    """Forks this process. The child returns and is the rank; the parent guards the child and never returns.

    Args:
        rank: the number of the rank, which is a part of the guard's name in `ps`.
        launcher_pid: the launcher's process id; the guard ends the rank when the launcher dies.
        descriptors: the descriptors from the launcher. The guard keeps `status` and `command`; the rank keeps `report`
            and `result_file`.
        record: the descriptor of the start record, which only the rank needs.
    """
    import ctypes  # imported here, as below, because the launcher imports this module too and has to start fast

    status, command, report, result_file = descriptors
    libc = ctypes.CDLL(None)
    guard_pid = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    # If the launcher ignores SIGCHLD, this process does too, and would not see the end of a rank that ends before `run`
    # sets the guard's own handler.
    inherited = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # before the rank can leave a child behind
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, inherited)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(status)
        os.close(command)
        os.setsid()  # a new process group, so that a signal reaches all its processes
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard_pid:  # the guard died before the call of prctl
            os.kill(os.getpid(), signal.SIGKILL)
        return
    try:
        for descriptor in (report, result_file, record):
            os.close(descriptor)
        _Guard(pid, launcher_pid, status, command).run(f"gradsync: guard of rank {rank} (pid {pid})")
    finally:  # in any case, this process must not continue as a second rank
        os._exit(70)


class _Guard:
    """Guards one rank.

    Args:
        rank_pid: the process id of the rank. The rank is a child of this process, which reaps it only at the end.
        launcher_pid, status, command: see `start_guard`.
    """

    def __init__(self, rank_pid: int, launcher_pid: int, status: int, command: int) -> None:
        self._rank_pid = rank_pid
        self._status = status
        self._command = command
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._launcher_pid = launcher_pid
        self._launcher = _open_process(launcher_pid)
        self._rank_is_reaped = False

    def run(self, title: str) -> NoReturn:
        """Waits until the rank has ended or the launcher is gone, ends all processes of the rank, and exits."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *_FORWARDED):
            signal.signal(number, lambda *_: None)  # the wake-up pipe reports these signals
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._report(STARTED.pack(STARTED_KIND, self._rank_pid))
        _release_standard_input()
        _set_title(title)
        poll = select.poll()
        for descriptor in (self._wake, self._command, self._launcher):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        wait_ms = _LOOK_FOR_LAUNCHER_MS if self._launcher is None else None
        while not self._rank_has_ended():
            is_launcher_gone = False
            for descriptor, _ in poll.poll(wait_ms):
                if descriptor == self._wake:
                    self._take_signals()
                elif descriptor == self._launcher or not self._take_commands():
                    is_launcher_gone = True
            if is_launcher_gone or os.getppid() != self._launcher_pid:
                break
        self._end()

    def _take_signals(self) -> None:
        for number in os.read(self._wake, 64):
            if number in _FORWARDED:
                self._signal_rank(number)

    def _take_commands(self) -> bool:
        """Sends the rank the signals that the launcher has asked for; returns whether the launcher still runs."""
        numbers = os.read(self._command, 64)
        for number in numbers:
            self._signal_rank(number)
        return bool(numbers)

    def _signal_rank(self, number: int) -> None:
        """Sends a signal to the rank's process group, or to the rank alone if it has not made its group yet.

        SIGKILL goes to the rank alone, because the group may have helpers that clean up; `_end` kills the others.
        """
        try:
            send = os.kill if number == signal.SIGKILL else os.killpg
            send(self._rank_pid, number)
        except ProcessLookupError:
            os.kill(self._rank_pid, number)  # the rank is not reaped, so no other process has its id
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
        """Kills the rank and all that it has started, reports how the rank ended, and exits.

        Each killed process leaves its own children to this process. A helper that cleans up is killed only if it has
        not ended in time.
        """
        self._signal_rank(signal.SIGKILL)
        now = time.monotonic()
        cleaned_up_by, deadline = now + _CLEAN_UP_SECONDS, now + _SWEEP_SECONDS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        while self._reap_all() and (now := time.monotonic()) < deadline:
            for child in _children_of(os.getpid()):
                if now < cleaned_up_by and _cleans_up(child):
                    deadline = now + _SWEEP_SECONDS
                else:
                    os.kill(child, signal.SIGKILL)  # a child that is not reaped: no other process has its id
            signal.sigtimedwait({signal.SIGCHLD}, _SWEEP_WAIT_SECONDS)
        os._exit(0 if self._rank_is_reaped else GAVE_UP)

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
                self._rank_is_reaped = True
                exit_code = os.waitstatus_to_exitcode(status)
                self._report(ENDED.pack(ENDED_KIND, exit_code, usage.ru_maxrss * 1024))

    def _report(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(self._status, message)


def _open_process(pid: int) -> int | None:
    """Opens a descriptor that is readable once a process has ended.

    Returns None before Linux 5.3, and if no process has this id.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


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

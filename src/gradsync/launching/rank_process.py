"""One rank's process, as the launcher controls it: its start, signals, report and end.

A rank starts as a fresh interpreter, which calls `rank_main.main`. There the process forks: the parent guards the
child, which is the rank.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from gradsync.launching.in_rank.guard import ENDED, GAVE_UP, STARTED, STARTED_KIND, GuardDescriptors
from gradsync.launching.in_rank.result import ErrorReport, read_report
from gradsync.launching.job import Target
from gradsync.launching.outcome import RankOutcome
from gradsync.launching.signals import no_other_fork
from gradsync.machine import read_stat

# The rank must import the launcher's own gradsync, even if the current directory has a different one.
_PACKAGE_PARENT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
_SHIM = f"""\
import sys
if sys.path[:1] == ['']: del sys.path[0]
sys.path.insert(0, {_PACKAGE_PARENT!r})
from gradsync.launching.in_rank.rank_main import main
del sys.path[0]
main()"""


@contextlib.contextmanager
def start_record(target: Target, secret: bytes, *, shows_lines: bool, has_others: bool) -> Iterator[int]:
    """Yields the descriptor of an anonymous file with the start record, which every rank reads at its start.

    A pipe is not enough: when the pipe is full, the launcher would wait until a rank reads from the pipe, and could
    start no other rank.

    Args:
        target: the program of the ranks.
        secret: the secret of the run; b"" if the ranks find the secret themselves.
        shows_lines: whether the launcher shows the ranks' output line by line.
        has_others: whether other launchers have ranks of the same run.
    """
    record = target.record | {"secret": secret, "shows_lines": shows_lines, "has_others": has_others}
    with open(os.memfd_create("gradsync-start"), "wb") as file:
        file.write(marshal.dumps(record))
        file.flush()
        yield file.fileno()


class RankProcess:
    """The process of a rank, as the launcher controls it.

    Args:
        rank: the number of the rank.

    Attributes:
        rank: the number of the rank.
        outcome: the rank's process id, report and exit code, once they are known.
        status: the descriptor of the guard's status pipe. The pipe closes when the rank and all its processes have
            ended.
        sentinel: a descriptor that is readable when the guard has ended, even if another process holds the status pipe
            open; -1 if the kernel cannot make one.
        report: the descriptor of the report pipe.
        sent_kill: whether the launcher has sent SIGKILL to the rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outcome = RankOutcome(rank)
        self.sent_kill = False
        self._has_ended = False
        self.status = self.report = self.sentinel = self._command = self._result_file = -1
        self._guard: subprocess.Popen[bytes]
        self._command_lock = threading.Lock()  # one thread may signal the rank while another thread closes its pipes

    @no_other_fork()
    def start(self, target: Target, record: int, environ: dict[str, str], streams: tuple[int, ...]) -> None:
        """Starts the rank.

        Args:
            target: the program of the rank.
            record: the descriptor of the start record.
            environ: the environment variables of the rank.
            streams: the descriptors that become the rank's standard input, output and error.

        Raises:
            OSError: the system allows no more processes or open files.
        """
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        standard_input, output, error = streams
        with contextlib.ExitStack() as theirs:
            try:
                descriptors = self._open(theirs)
                numbers = ",".join(map(str, (self.rank, os.getpid(), record, *descriptors)))
                with _interrupts_blocked():
                    self._guard = subprocess.Popen(
                        [sys.executable, *flags, "-c", _SHIM, numbers, *target.command_line],
                        env=environ,
                        stdin=standard_input,
                        stdout=output,
                        stderr=error,
                        pass_fds=(record, *descriptors, *target.descriptors),
                        # In a new session the rank does not get a Ctrl-C from the terminal, but only from the launcher.
                        start_new_session=True,
                    )
            except BaseException:
                self._close()
                raise
        with contextlib.suppress(AttributeError, OSError):  # an old kernel, or too many open files
            self.sentinel = os.pidfd_open(self._guard.pid)

    def _open(self, theirs: contextlib.ExitStack) -> GuardDescriptors:
        """Opens the pipes and the result file. When `theirs` ends, this process closes the ends that the rank uses."""

        def give(descriptor: int) -> int:
            theirs.callback(os.close, descriptor)
            return descriptor

        self.status, status_writer = os.pipe()
        given = [give(status_writer)]
        command_reader, self._command = os.pipe()
        given.append(give(command_reader))
        self.report, report_writer = os.pipe()
        given.append(give(report_writer))
        self._result_file = os.memfd_create("gradsync-result", os.MFD_CLOEXEC)
        given.append(give(os.dup(self._result_file)))
        for descriptor in (self.status, self.report, self._command):
            os.set_blocking(descriptor, False)
        return GuardDescriptors(*given)

    def read_report(self) -> bool:
        """Reads the rank's report if the report has arrived; returns True if the report may still arrive."""
        outcome = self.outcome
        if outcome.result is not None or outcome.error is not None:
            return False
        try:
            message = os.read(self.report, 64)  # such a short message arrives in one piece
        except BlockingIOError:
            return True
        if message:
            report = read_report(message, self._result_file)
            if isinstance(report, ErrorReport):
                outcome.error, outcome.exit_code = report, 1
            else:
                outcome.result, self._result_file = report, -1
        return False

    def read_status(self) -> bool:
        """Reads the guard's messages; returns whether the guard still runs."""
        try:
            data = os.read(self.status, 64)  # such short messages arrive in one piece
        except BlockingIOError:
            return True
        is_open = bool(data)
        while data:
            if data[:1] == STARTED_KIND:
                (_, self.outcome.pid), data = STARTED.unpack_from(data), data[STARTED.size :]
            else:
                (_, code, self.outcome.peak_bytes), data = ENDED.unpack_from(data), data[ENDED.size :]
                self._end(code)
        return is_open

    def _end(self, code: int) -> None:
        """Records the end of the rank, whose guard may still be ending the processes that the rank started."""
        self._has_ended = True
        self.read_report()
        if self.outcome.error is None:
            self.outcome.exit_code = code

    @property
    def is_reaped(self) -> bool:
        """Whether no process of the rank is left, or the launcher has abandoned the rank."""
        return self.status < 0

    def send_signal(self, number: int) -> None:
        """Sends a signal, through the guard, to the rank's process group."""
        self.sent_kill = self.sent_kill or number == signal.SIGKILL
        with self._command_lock:
            if self._command >= 0:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    os.write(self._command, bytes([number]))
            if self.sentinel >= 0 and number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(self.sentinel, signal.SIGCONT)  # a paused guard could not end its rank

    def is_paused(self) -> bool:
        """Whether a signal such as SIGSTOP has paused the rank, so that the rank reports nothing until SIGCONT."""
        found = read_stat(self.outcome.pid)
        return found is not None and found.state == "T"

    def reap(self) -> None:
        """Handles the end of a rank whose status pipe has closed, or whose guard has ended."""
        code = self._guard.wait()
        if not self._has_ended and code != GAVE_UP:
            # The guard never began, or somebody killed the guard and the rank died with it.
            self._end(code or -signal.SIGKILL)
            if self.outcome.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.outcome.pid, signal.SIGKILL)
        self._close()

    def abandon(self) -> None:
        """Abandons a rank that could not be killed: kills its guard, so that the kernel kills the rank when it can."""
        with contextlib.suppress(PermissionError):
            self._guard.kill()
        self._close()

    def _close(self) -> None:
        with self._command_lock:
            for descriptor in (self.report, self.status, self.sentinel, self._command, self._result_file):
                if descriptor >= 0:
                    os.close(descriptor)
            self.report = self.status = self.sentinel = self._command = self._result_file = -1


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT; a rank that starts meanwhile has SIGINT blocked too, until the rank can handle this signal."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

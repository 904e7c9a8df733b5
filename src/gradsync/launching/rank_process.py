"""One rank's process, as the launcher controls it: its start, signals, report and end.

A rank starts as a fresh interpreter, which calls `rank_main.main`. There the process forks: the parent guards the
child, which is the rank. The user's wrapper (`gradsync run --wrap`) may start the interpreter: a wrapper that becomes
it, such as numactl, or one that starts it and waits, such as nsys. So the process that this module starts is the guard,
or above the guard, and lives as long as the guard.
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
from typing import NamedTuple

from gradsync.environment import SECRET_FILE, SECRET_IN_MEMORY
from gradsync.errors import InvalidArgument
from gradsync.launching.in_rank.guard import ENDED, MESSAGE, STARTED, Descriptors
from gradsync.launching.in_rank.result import ErrorReport, read_report
from gradsync.launching.job import Job, Target
from gradsync.launching.outcome import RankOutcome, signal_name
from gradsync.launching.signals import no_other_fork
from gradsync.machine import memory_file, open_process, read_stat

# The rank must import the launcher's own gradsync, even if the current directory has a different one.
_PACKAGE_PARENT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
_SHIM = f"""\
import sys
if sys.path[:1] == ['']: del sys.path[0]
sys.path.insert(0, {_PACKAGE_PARENT!r})
from gradsync.launching.in_rank.rank_main import main
del sys.path[0]
main()"""


class StartRecord(NamedTuple):
    """What every rank finds at its start, as descriptors of files in memory; see `start_record`.

    Attributes:
        program: the program of the ranks, and what they need to know of the launcher.
        secret: the secret of the run, in hexadecimal digits.
    """

    program: int
    secret: int


@contextlib.contextmanager
def start_record(job: Job, secret: bytes, *, shows_lines: bool) -> Iterator[StartRecord]:
    """Yields what every rank finds at its start.

    A pipe is not enough for the program: when it is full, the launcher would wait until a rank reads it, and could
    start no other. The secret's descriptor stays open in a rank, also when it becomes another program (exec); other
    users can open neither.

    Args:
        job, secret: those of the run.
        shows_lines: whether the launcher shows the ranks' output line by line.
    """
    launcher = {"shows_lines": shows_lines, "has_others": job.has_others, "goes_on": job.min_ranks is not None}
    with (
        _file_in_memory("gradsync-start", marshal.dumps(job.target.record | launcher)) as program,
        _file_in_memory(SECRET_IN_MEMORY, secret.hex().encode()) as secrets,
    ):
        yield StartRecord(program, secrets)


@contextlib.contextmanager
def _file_in_memory(name: str, content: bytes) -> Iterator[int]:
    with open(memory_file(name), "wb") as file:
        file.write(content)
        file.flush()
        yield file.fileno()


def interpreter() -> str:
    """Returns the path of the Python interpreter that runs ranks: multiprocessing's, by default this process's own.

    Raises:
        InvalidArgument: an application with a Python inside knows no interpreter.
    """
    spawn = sys.modules.get("multiprocessing.spawn")  # only who has imported it can have chosen another
    executable = os.fsdecode((spawn.get_executable() if spawn is not None else sys.executable) or "")
    if not os.access(executable, os.X_OK):
        raise InvalidArgument(
            f"ranks need a Python interpreter, and this process names none, but {executable!r}: name one with "
            "multiprocessing.set_executable(path)"
        )
    return executable


class RankProcess:
    """The process of a rank, as the launcher controls it.

    Attributes:
        rank: the number of the rank.
        outcome: the rank's process id, report and exit code, once they are known.
        status: the descriptor of the guard's status pipe. The pipe closes when the rank and all its processes have
            ended.
        sentinel: a descriptor that is readable when the process that this object has started has ended, even if another
            process holds the status pipe open; -1 before Linux 5.3.
        report: the descriptor of the report pipe.
        sent_kill: whether the launcher has sent SIGKILL to the rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outcome = RankOutcome(rank)
        self.sent_kill = False
        self._is_told = False  # whether the guard has told how the rank ended, or that it does not end
        self.status = self.report = self.sentinel = self._command = self._result = -1
        self._process: subprocess.Popen[bytes]
        self._command_line: list[str]
        self._command_lock = threading.Lock()  # one thread may signal the rank while another thread closes its pipes

    @no_other_fork()
    def start(self, target: Target, record: StartRecord, environ: dict[str, str], streams: tuple[int, ...]) -> None:
        """Starts the rank.

        Raises:
            OSError: the system allows no more processes or open files, or finds no wrapper of this name.
            InvalidArgument: this process knows no Python interpreter.
        """
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        self._command_line = [*target.wrapper, interpreter()]
        standard_input, output, error = streams
        passed = (record.program, record.secret, *target.descriptors)
        with contextlib.ExitStack() as theirs:
            try:
                descriptors = self._open(theirs, record.program)
                numbers = ",".join(map(str, (self.rank, *descriptors)))
                # The rank inherits the mask, and unblocks SIGINT once it can handle this signal.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    self._process = subprocess.Popen(
                        [*self._command_line, *flags, "-c", _SHIM, numbers, *target.command_line],
                        env=environ | {SECRET_FILE: f"fd:{record.secret}"},
                        stdin=standard_input,
                        stdout=output,
                        stderr=error,
                        pass_fds=[each for each in (*descriptors, *passed) if each >= 0],
                        # In a new session the guard gets no Ctrl-C from the terminal.
                        start_new_session=True,
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                self.sentinel = open_process(self._process.pid)
            except BaseException:
                self._close()
                raise

    def _open(self, theirs: contextlib.ExitStack, program: int) -> Descriptors:
        """Opens the pipes and the result file. When `theirs` ends, this process closes the ends that the rank uses."""

        def give(descriptor: int) -> int:
            if descriptor >= 0:
                theirs.callback(os.close, descriptor)
            return descriptor

        launcher = give(open_process(os.getpid()))
        self.status, status_writer = os.pipe()
        give(status_writer)
        command_reader, self._command = os.pipe()
        give(command_reader)
        self.report, report_writer = os.pipe()
        give(report_writer)
        self._result = memory_file("gradsync-result")
        for descriptor in (self.status, self.report, self._command):
            os.set_blocking(descriptor, False)
        return Descriptors(launcher, command_reader, status_writer, program, report_writer, give(os.dup(self._result)))

    def read_report(self) -> bool:
        """Reads the rank's report if the report has arrived; returns True if the report may still arrive."""
        outcome = self.outcome
        if outcome.result is not None or outcome.error is not None:
            return False
        try:
            message = os.read(self.report, 64)
        except BlockingIOError:
            return True
        if message:
            report = read_report(message, self._result)
            if isinstance(report, ErrorReport):
                outcome.error, outcome.exit_code = report, 1
            else:
                outcome.result, self._result = report, -1
        return False

    def read_status(self) -> bool:
        """Reads the guard's messages; returns whether more may come."""
        try:
            data = os.read(self.status, 4 * MESSAGE.size)  # such short messages arrive in one piece
        except BlockingIOError:
            return True
        for kind, number, peak_bytes in MESSAGE.iter_unpack(data):
            if kind == STARTED:
                self.outcome.pid = number
            else:
                self._is_told = True
                if kind == ENDED:
                    self.outcome.peak_bytes = peak_bytes
                    self._end(number)
        return bool(data)

    def _end(self, code: int) -> None:
        """Records the end of the rank, whose guard may still be ending the processes that the rank started."""
        self.read_report()
        if self.outcome.error is None:
            self.outcome.exit_code = code

    @property
    def is_reaped(self) -> bool:
        """Whether no process of the rank is left, or the launcher has abandoned the rank."""
        return self.status < 0

    def send_signal(self, number: int) -> None:
        """Sends a signal, through the guard, to the rank; see `guard.ENDING` and `guard.WARNING`."""
        self.sent_kill = self.sent_kill or number == signal.SIGKILL
        with self._command_lock:
            if self._command >= 0:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    os.write(self._command, bytes([number]))
                if number in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(PermissionError):
                        self._process.send_signal(signal.SIGCONT)  # a paused guard could not end its rank

    def is_paused(self) -> bool:
        """Whether a signal such as SIGSTOP has paused the rank, so that the rank reports nothing until SIGCONT."""
        found = read_stat(self.outcome.pid)
        return found is not None and found.state == "T"

    def reap(self) -> None:
        """Handles the end of a rank whose status pipe has closed, or whose process has ended."""
        code = self._process.wait()
        if not self._is_told:
            self._end_untold(code)
        self._close()

    def _end_untold(self, code: int) -> None:
        """Records the end of a rank whose guard has never begun, or was killed; `code` is the process's exit code."""
        pid, command = self.outcome.pid, " ".join(self._command_line)
        is_wrapped = len(self._command_line) > 1
        ended = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if not pid:
            text = f"{command} {ended} before the rank began"
            if code == 0:
                text += ": it needs to run the Python that follows, and to wait for its end"
            code = code or 1
        else:
            who = command if is_wrapped else "its guard"
            text = f"{who} (pid {self._process.pid}) {ended}, and the rank with it"
            code = min(code, 0) or -signal.SIGKILL
            if not is_wrapped:  # behind a wrapper, `pid` may be that of another pid namespace
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._end(code)
        if self.outcome.error is None:
            self.outcome.error = ErrorReport(f"gradsync: {text}\n", text)

    def abandon(self) -> None:
        """Abandons a rank that could not be killed: kills its guard, so that the kernel kills the rank when it can."""
        with contextlib.suppress(PermissionError):
            self._process.kill()
        self._close()

    def _close(self) -> None:
        with self._command_lock:
            for descriptor in (self.report, self.status, self.sentinel, self._command, self._result):
                if descriptor >= 0:
                    os.close(descriptor)
            self.report = self.status = self.sentinel = self._command = self._result = -1

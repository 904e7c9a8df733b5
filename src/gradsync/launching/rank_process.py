"""One rank's process, as the launcher sees it: start, signals, report, end."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import threading
from dataclasses import dataclass

from gradsync.launching.in_rank import report_pipe
from gradsync.launching.in_rank.guard import ENDED, GAVE_UP, STARTED, STARTED_KIND, GuardDescriptors
from gradsync.launching.return_value import ReturnValue
from gradsync.launching.signal_inbox import no_other_fork, own_descriptors
from gradsync.launching.start_methods import RankStart, StartedProcess, start_process
from gradsync.launching.targets import Target
from gradsync.launching.told import from_told
from gradsync.machine import read_stat

_READS_PER_TURN = 64  # of a report that is larger than the pipe


@dataclass(frozen=True)
class ErrorReport:
    """An exception that ended a rank, as text.

    Attributes:
        text: the traceback, without our own frames.
        summary: its last line.
        is_consequence: whether it only tells that another rank is gone.
        missed_rank: the rank that it says is gone, where it names one.
        is_unsendable: whether only the function's result could not be sent.
        is_of_silence: whether it only tells that another rank was silent, or did not come in time: that one has nothing
            to tell.
    """

    text: str
    summary: str
    is_consequence: bool
    missed_rank: int | None = None
    is_unsendable: bool = False
    is_of_silence: bool = False


def _error_told(kind: bytes, body: bytearray) -> ErrorReport:
    if kind != report_pipe.ERROR:
        return _unreadable(f"{kind!r} is no kind of report")
    try:
        return from_told(ErrorReport, body)
    except ValueError as error:
        return _unreadable(str(error))


def _unreadable(why: str) -> ErrorReport:
    """Returns what is told where a rank has reported something that it never would: what it did is not known."""
    text = f"what this rank reported cannot be read ({why}): something in it wrote to a descriptor that is not its own"
    return ErrorReport(f"gradsync: {text}\n", text, is_consequence=False)


def start_record(target: Target, secret: bytes, *, shows_lines: bool) -> int:
    """Writes what every rank reads at its start into an anonymous file.

    A pipe would fill up and make the start of one rank wait for another.

    Args:
        target: what the ranks run.
        secret: of the run.
        shows_lines: whether the launcher shows the ranks' output line by line.

    Returns:
        The file's descriptor.
    """
    record = target.record | {"secret": secret, "shows_lines": shows_lines}
    descriptor = os.memfd_create("gradsync-start")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(marshal.dumps(record))
    return descriptor


class RankProcess:
    """A started rank.

    Attributes:
        rank: its rank.
        local_rank: its number among the ranks that this launcher started.
        pid: its process id, which is also its session and process group; 0 until the guard has told it.
        status: descriptor of the guard's pipe; its end is the end of all that the rank started.
        sentinel: descriptor that is readable when the guard has ended, whoever else holds its pipe; -1 where the kernel
            has none.
        report: descriptor of the report pipe.
        result: the return value, once it came.
        error: the exception that ended the rank, once it came.
        exit_code: once it has ended; negative: the signal that killed it; None: it could not be killed.
        peak_bytes: the most memory that it, or a program that it waited for, had in use; 0 until it has ended.
        sent_kill: whether the launcher has sent it SIGKILL.
        memory_kill: how the kernel's out-of-memory killer ended it, where that is what happened.
    """

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = 0
        self.result: ReturnValue | None = None
        self.error: ErrorReport | None = None
        self.exit_code: int | None = None
        self.peak_bytes = 0
        self.sent_kill = False
        self.memory_kill: str | None = None
        self.status = self.report = self.sentinel = self._command = self._result_file = -1
        self._guard: StartedProcess | None = None
        self._command_lock = threading.Lock()  # another thread may signal a rank while this one closes its pipes

    @no_other_fork()
    def start(
        self, method: str, target: Target, record: int, environ: dict[str, str], streams: tuple[int, ...]
    ) -> None:
        """Starts it.

        Args:
            method: a start method.
            target: what it runs.
            record: descriptor of the start record.
            environ: its environment.
            streams: descriptors that become its standard input, output and error.
        """
        with contextlib.ExitStack() as theirs:
            try:
                descriptors = self._open(theirs)
                self._guard = start_process(method, RankStart(self.rank, target, record, environ, descriptors, streams))
            except BaseException:
                self._close()
                raise
        self._reader = report_pipe.FrameReader(self.report)
        self.sentinel = self._guard.sentinel
        if self.sentinel >= 0:
            own_descriptors.add(self.sentinel)

    def _open(self, theirs: contextlib.ExitStack) -> GuardDescriptors:
        """Opens the pipes and the result file; the rank's ends are closed here when the stack is left."""

        def give(descriptor: int) -> int:
            own_descriptors.add(descriptor)
            theirs.callback(_close_own, descriptor)
            return descriptor

        self.status, status_writer = os.pipe()
        given = [give(status_writer)]
        command_reader, self._command = os.pipe()
        given.append(give(command_reader))
        self.report, report_writer = os.pipe()
        given.append(give(report_writer))
        self._result_file = os.memfd_create("gradsync-result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        given.append(give(os.dup(self._result_file)))
        own_descriptors.update((self.status, self.report, self._command, self._result_file))
        for descriptor in (self.status, self.report, self._command):
            os.set_blocking(descriptor, False)
        return GuardDescriptors(*given)

    def read_report(self, limit_reads: int | None = _READS_PER_TURN) -> bool:
        """Takes what the report pipe holds now; returns whether more can come."""
        for kind, body in self._reader.read(limit_reads):
            if kind == report_pipe.RESULT:
                self._take_result(body)
            elif self.error is None:
                self.error = _error_told(kind, body)
        if self._reader.refused_bytes and self.error is None:
            self.error = _unreadable(f"it announces {self._reader.refused_bytes} bytes, for which there is no memory")
        return not self._reader.ended

    def _take_result(self, told: bytearray) -> None:
        try:
            self.result = ReturnValue(self._result_file, told)
        except (ValueError, OSError) as error:
            self.error = self.error or _unreadable(str(error))
        else:
            own_descriptors.discard(self._result_file)
            self._result_file = -1

    def read_status(self) -> bool:
        """Takes what the guard has told; returns whether it is still there."""
        try:
            told = os.read(self.status, 64)  # a write of so few bytes arrives in one piece
        except BlockingIOError:
            return True
        is_there = bool(told)
        while told:
            if told[:1] == STARTED_KIND:
                (_, self.pid), told = STARTED.unpack_from(told), told[STARTED.size :]
            else:
                (_, self.exit_code, self.peak_bytes), told = ENDED.unpack_from(told), told[ENDED.size :]
        return is_there

    @property
    def is_reaped(self) -> bool:
        """Whether nothing of it is left, or it has been given up."""
        return self.status < 0

    def send_signal(self, number: int) -> None:
        """Signals the rank and the programs that it started, through its guard."""
        self.sent_kill = self.sent_kill or number == signal.SIGKILL
        with self._command_lock:
            if self._command >= 0:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    os.write(self._command, bytes([number]))
            if self.sentinel >= 0 and number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(self.sentinel, signal.SIGCONT)  # a guard that was stopped ends nothing

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the rank, so that it says nothing until it is continued."""
        found = read_stat(self.pid)
        return found is not None and found.state == "T"

    def reap(self) -> None:
        """Takes the end of a rank whose status pipe has ended; nothing of it is left then."""
        self.read_report(None)
        code = 0 if self._guard is None else self._guard.reap()
        if self.exit_code is None and code != GAVE_UP:
            # Its guard never came to life, or was killed, and the rank with it.
            self.exit_code = code or -signal.SIGKILL
            if self.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
        self._close()

    def abandon(self) -> None:
        """Gives up a rank that could not be killed; should its guard hang, the kernel kills the rank after it."""
        if self._guard is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._guard.pid, signal.SIGKILL)  # not reaped: the number is still its own
        self._close()

    def _close(self) -> None:
        with self._command_lock:
            for descriptor in (self.report, self.status, self.sentinel, self._command, self._result_file):
                if descriptor >= 0:
                    _close_own(descriptor)
            self.report = self.status = self.sentinel = self._command = self._result_file = -1


def _close_own(descriptor: int) -> None:
    own_descriptors.discard(descriptor)
    os.close(descriptor)

"""One rank's process, as the launcher sees it: start, signals, report, end."""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.launching import report_pipe
from gradsync.launching.targets import Target

# The rank must import the launcher's own gradsync, whatever the current directory holds.
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_SHIM = f"""\
import sys
if sys.path[:1] == ['']: del sys.path[0]
sys.path.insert(0, {_PACKAGE_PARENT!r})
from gradsync.launching.rank_main import main
del sys.path[0]
main()"""


@dataclass(frozen=True)
class ErrorReport:
    """An exception that ended a rank, as text.

    Attributes:
        text: the traceback, without our own frames.
        summary: its last line.
        is_consequence: whether it only tells that another rank is gone.
        missed_rank: the rank that it says is gone, where it names one.
    """

    text: str
    summary: str
    is_consequence: bool
    missed_rank: int | None = None


def start_record(target: Target, secret: bytes) -> int:
    """Writes what every rank reads at its start into an anonymous file.

    A pipe would fill up and make the start of one rank wait for another.

    Returns:
        The file's descriptor.
    """
    record = target.record | {"secret": secret, "launcher_pid": os.getpid()}
    descriptor = os.memfd_create("gradsync-start")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(marshal.dumps(record))
    return descriptor


class RankProcess:
    """A started rank.

    Attributes:
        rank: its rank.
        pid: its process id, which is also its session and process group.
        sentinel: descriptor that becomes readable when the process has ended.
        report: descriptor of the report pipe.
        result: the pickled return value, once it came.
        error: the exception that ended the rank, once it came.
        exit_code: once it is reaped; negative: the signal that killed it.
    """

    def __init__(self, rank: int, target: Target, start: int, environ: dict[str, str]) -> None:
        self.rank = rank
        self.result: bytearray | None = None
        self.error: ErrorReport | None = None
        self.exit_code: int | None = None
        self.report, report_writer = os.pipe()
        try:
            self._process = _start(target, start, report_writer, environ)
        except BaseException:
            os.close(self.report)
            raise
        finally:
            os.close(report_writer)
        self.pid = self._process.pid
        os.set_blocking(self.report, False)
        self._reader = report_pipe.FrameReader(self.report)
        try:
            self.sentinel = _open_sentinel(self.pid)
        except BaseException:  # no descriptor left: nobody could watch it
            self._process.kill()
            self._process.wait()
            os.close(self.report)
            raise

    def read_report(self) -> bool:
        """Takes what the report pipe holds now; returns whether more can come."""
        for kind, body in self._reader.read():
            if kind == report_pipe.RESULT:
                self.result = body
            elif self.error is None:
                self.error = ErrorReport(**marshal.loads(body))
        return not self._reader.ended

    def send_signal(self, number: int) -> None:
        """Signals the rank and the processes that it started, unless it has been reaped."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """Takes the end of a process that has ended, and ends what it left in its process group.

        Returns:
            The exit code.
        """
        self.read_report()
        # Before the wait: as long as the zombie holds the number, no other group can have it.
        self.send_signal(signal.SIGKILL)
        self.exit_code = self._process.wait()
        self._close()
        return self.exit_code

    def abandon(self, timeout_seconds: float) -> None:
        """Takes the end of a process that was sent SIGKILL, if it comes in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.exit_code = self._process.wait(timeout_seconds)
        self._close()

    def _close(self) -> None:
        for descriptor in (self.report, self.sentinel):
            if descriptor >= 0:
                os.close(descriptor)
        self.report = self.sentinel = -1


def _start(target: Target, start: int, report_writer: int, environ: dict[str, str]) -> subprocess.Popen[Any]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    descriptors = f"{start},{report_writer}"
    command = [sys.executable, *flags, "-c", _SHIM, descriptors, *target.command_line]
    # The rank inherits the mask, and unblocks SIGINT where it can handle it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # A session of its own: a terminal's Ctrl-C reaches the launcher only, which forwards it once.
        return subprocess.Popen(
            command,
            env=environ,
            pass_fds=(start, report_writer, *target.descriptors),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _open_sentinel(pid: int) -> int:
    """Opens a descriptor that becomes readable when a child has ended."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # a kernel before 5.3
        reader, writer = os.pipe()
        threading.Thread(target=_close_at_end, args=(pid, writer), daemon=True).start()
        return reader


def _close_at_end(pid: int, writer: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.close(writer)

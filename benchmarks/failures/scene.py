"""The processes of one round, with their output and notes, on one clock and in one loop."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from failures.diary import FAULT, FOLDER_VARIABLE, KEPT, READY, Diary, Note
from failures.leftovers import await_end, describe_process, files_of_runs, marked_processes, open_ports

_BENCHMARKS = Path(__file__).parent.parent
_IMPORTED = (_BENCHMARKS,)  # from which a scene's processes import
_LIMIT_SECONDS = 40.0  # far above what any failure takes; a hang takes longer
_LEAVE_SECONDS = 5.0  # after the end of the run: what still exists then is left behind
_KILLED_SECONDS = 2.0  # for killed processes to end
_PRIVATE = ("tmp", "runtime")


class SceneFailed(Exception):
    """The failure could not be caused, or the run hangs."""


@dataclass(frozen=True)
class Line:
    """A line that a process printed, and when it was read."""

    at: float
    process: str
    text: str


class _Member:
    """A process that the scene started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: int) -> None:
        self.name = name
        self.process = process
        self.output = output
        self.ended_at: float | None = None
        self.begun = b""


class Scene:
    """One round. None of its processes is left when the context ends.

    Attributes:
        notes: of its processes, in order.
        lines: that they printed, in order of arrival.
        folder: for its files.
        down_at: when the run was down, if the play knows it; else the end of all processes counts.
    """

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.lines: list[Line] = []
        self.down_at: float | None = None
        self._members: dict[str, _Member] = {}
        self._cleanup = contextlib.ExitStack()
        self.folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="detection-")))
        for name in _PRIVATE:
            (self.folder / name).mkdir(mode=0o700)
        self._files_before = files_of_runs()
        self._diary = self._cleanup.enter_context(contextlib.closing(Diary(self.folder)))
        self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
        self._selector.register(self._diary, selectors.EVENT_READ, self._read_diary)

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in marked_processes(FOLDER_VARIABLE, str(self.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for member in self._members.values():
            member.process.kill()
            member.process.wait()
        self.wait_for_processes(_KILLED_SECONDS)
        self._cleanup.close()

    # -- Acting ----------------------------------------------------------------------------------------------

    def start(self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> int:
        """Starts a Python process; its temporary and runtime files go into the scene's folder. Returns its pid."""
        temporary, runtime = (str(self.folder / private) for private in _PRIVATE)
        paths = [*map(str, _IMPORTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": temporary, "XDG_RUNTIME_DIR": runtime}
        mark = {FOLDER_VARIABLE: str(self.folder)}
        output, printed_to = os.pipe()
        self._cleanup.callback(os.close, output)
        os.set_blocking(output, False)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **own, **mark, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=printed_to,
            stderr=printed_to,
        )
        os.close(printed_to)
        member = self._members[name] = _Member(name, process, output)
        self._selector.register(output, selectors.EVENT_READ, lambda: self._read_output(member))
        descriptor = os.pidfd_open(process.pid)
        self._cleanup.callback(os.close, descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._take_end(member, descriptor))
        return process.pid

    def send(self, name: str, number: int) -> None:
        """Sends a signal to a process that was started here, and notes it as the fault."""
        self.note_fault(time.monotonic())
        os.kill(self.pid(name), number)

    def end(self, name: str) -> None:
        """Asks a process to end."""
        os.kill(self.pid(name), signal.SIGTERM)

    def note_fault(self, at: float) -> None:
        """Notes the time of the failure, if no rank does."""
        self.notes.append(Note(FAULT, at, os.getpid(), -1))

    def say_go(self, times: int = 1) -> None:
        """Lets a waiting rank fail, or lets so many waiting ranks go on."""
        self._diary.say_go(times)

    # -- Waiting ---------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Reads output and notes until the condition holds.

        Raises:
            SceneFailed: it does not hold in time.
        """
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            left = deadline - time.monotonic()
            events = self._selector.select(0.0 if self._is_over() else max(0.0, left))
            if left <= 0 or not events:
                why = "all processes have ended" if self._is_over() else f"{_LIMIT_SECONDS:.0f} s have passed"
                printed = "\n".join(line.text for line in self.lines[-30:])
                raise SceneFailed(f"{why} and no {what}; printed until then:\n{printed}")
            for key, _ in events:
                key.data()

    def wait_for_ranks(self, count: int) -> None:
        """Waits until so many ranks have reached their phase."""
        self.wait_until(lambda: len(self.of(READY)) >= count, f"{count} ranks ready")

    def wait_for_end(self, *names: str) -> None:
        self.wait_until(lambda: all(self.ended_at(name) is not None for name in names), f"end of {', '.join(names)}")

    def wait_for_processes(self, seconds: float, *spared: int) -> tuple[float | None, list[str]]:
        """Waits until all processes of the scene, but for the spared ones, have ended.

        Returns:
            When the last ended, None where there was none; and which have not ended.
        """
        last_end, left = await_end(FOLDER_VARIABLE, str(self.folder), seconds, spared)
        return last_end, [describe_process(pid) for pid in left]

    def _is_over(self) -> bool:
        return all(member.ended_at is not None for member in self._members.values())

    # -- Looking ---------------------------------------------------------------------------------------------

    def of(self, what: str) -> list[Note]:
        return [note for note in self.notes if note.what == what]

    def pid(self, name: str) -> int:
        return self._members[name].process.pid

    def ended_at(self, name: str) -> float | None:
        return self._members[name].ended_at

    def exit_code(self, name: str) -> int | None:
        return self._members[name].process.returncode

    def left_behind(self) -> tuple[float, list[str]]:
        """Waits for the end of all processes; returns its time, and what is left of the run."""
        last_end, left = self.wait_for_processes(_LEAVE_SECONDS)
        self._read_diary()
        left += [f"rank {note.rank} holds {note.facts['held']}" for note in self.of(KEPT)]
        ends = [member.ended_at for member in self._members.values() if member.ended_at is not None]
        left += open_ports(note.facts["address"] for note in self.of(READY) if note.facts.get("address"))
        left += sorted(files_of_runs() - self._files_before)
        left += sorted(str(path) for name in _PRIVATE for path in (self.folder / name).iterdir())
        return max([*ends, last_end or 0.0]), left

    # -- Reading ---------------------------------------------------------------------------------------------

    def _read_diary(self) -> None:
        self.notes += self._diary.read()

    def _read_output(self, member: _Member) -> bool:
        """Reads up to a limit; returns whether there may be more."""
        try:
            chunk = os.read(member.output, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self._selector.unregister(member.output)
        *lines, member.begun = (member.begun + chunk).split(b"\n")
        now = time.monotonic()
        self.lines += [Line(now, member.name, line.decode(errors="replace")) for line in lines]
        return bool(chunk)

    def _take_end(self, member: _Member, descriptor: int) -> None:
        member.ended_at = time.monotonic()
        self._selector.unregister(descriptor)
        member.process.wait()
        while member.output in self._selector.get_map() and self._read_output(member):
            pass  # its last words

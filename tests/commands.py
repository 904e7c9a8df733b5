"""Runs `gradsync`, or a Python program, as a user would: the fixture `cli`.

    def test_a_failing_script_gives_its_exit_code(cli, script):
        path = script("raise SystemExit(3)")
        assert cli("run", "-n", 2, path).code == 3

When it has ended, the fixture looks whether any process that it started, however far down, is still there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_MARK = "STARTED_BY_TEST"  # a variable by which processes of one test are found
_PATIENCE_SECONDS = 60.0


class Result(NamedTuple):
    """How a command ended; code is minus the signal that ended it."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> tuple[int, str, str]:
        """The same, without the notice that no rank has joined another: many a script of a test need not."""
        return self.code, self.out, re.sub(r"gradsync: no rank called gs.init_process_group\(\) .*\n", "", self.err)


class Running(subprocess.Popen):  # type: ignore[type-arg]
    """A command that runs; see Commands.start."""

    def read_until(self, text: str, stream: str = "stdout") -> str:
        """Reads lines until one has the text, and gives all that it has read.

        Raises:
            AssertionError: the command ended before.
        """
        read = ""
        for line in getattr(self, stream):
            read += line
            if text in line:
                return read
        raise AssertionError(f"{text!r} did not come on {stream}: {read}")

    def result(self, timeout: float = 120.0) -> Result:
        """Waits for its end, and gives what is left of its output."""
        out, err = self.communicate(timeout=timeout)
        return Result(self.returncode, out, err)


class Commands:
    """Calls run `gradsync ARGUMENTS` to its end; see the functions."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._running: list[Running] = []

    def __call__(self, *arguments: object, typed: str | None = None, timeout: float = 120.0, **options: Any) -> Result:
        """Runs `gradsync ARGUMENTS`; `typed` is its standard input. Options: see start."""
        return self._finish(self.start(*arguments, **_with_input(typed, options)), typed, timeout)

    def python(self, *arguments: object, typed: str | None = None, timeout: float = 120.0, **options: Any) -> Result:
        """Runs `python ARGUMENTS`."""
        return self.program(sys.executable, *arguments, typed=typed, timeout=timeout, **options)

    def program(self, *arguments: object, typed: str | None = None, timeout: float = 120.0, **options: Any) -> Result:
        """Runs any program, as mpiexec."""
        return self._finish(self.start_program(*arguments, **_with_input(typed, options)), typed, timeout)

    def start(self, *arguments: object, **options: Any) -> Running:
        """Starts `gradsync ARGUMENTS` and gives it while it runs.

        Options:
            environment: variables for it, beside those of this process; None removes one.
            Any other is for subprocess.Popen.
        """
        return self.start_program(sys.executable, "-m", "gradsync", *arguments, **options)

    def start_program(
        self, *arguments: object, environment: dict[str, str | None] | None = None, **options: Any
    ) -> Running:
        """The same for any program."""
        variables = {**os.environ, **(environment or {}), _MARK: self._mark}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"} | options
        process = Running(
            [str(argument) for argument in arguments],
            env={name: value for name, value in variables.items() if value is not None},
            **options,
        )
        self._running.append(process)
        return process

    def processes(self) -> list[int]:
        """The ids of all processes that it has started, however far down, and that have not ended."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def close(self) -> None:
        """Ends what still runs.

        Raises:
            AssertionError: a command has ended, and a process of it is still there.
        """
        is_over = all(process.poll() is not None for process in self._running)
        deadline = time.monotonic() + (_PATIENCE_SECONDS if is_over else 0.0)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        names = {pid: _command_line(pid) for pid in left}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        assert not (is_over and left), f"processes are left: {names}"

    def _finish(self, process: Running, typed: str | None, timeout: float) -> Result:
        out, err = process.communicate(typed, timeout)
        return Result(process.returncode, out, err)


def refusals(
    commands: Commands, lines: dict[str, tuple[object, ...]], folder: Path
) -> Iterator[tuple[str, int, str, str]]:
    """Runs many command lines that are refused in one process, which is cheaper; gives for each its word and result."""
    program = """if True:
        import contextlib, io, json, sys
        from gradsync.cli import main  # what the command `gradsync` calls
        for line in json.loads(sys.argv[1]):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                try:
                    main(line, prog_name="gradsync")
                    code = 0
                except SystemExit as ended:
                    code = ended.code
            print(json.dumps([code, out.getvalue(), err.getvalue()]))
        """
    done = commands.python("-c", program, json.dumps([list(map(str, line)) for line in lines.values()]), cwd=folder)
    results = [json.loads(line) for line in done.out.splitlines()]
    assert len(results) == len(lines), done.err
    for word, (code, out, err) in zip(lines, results, strict=True):
        yield word, code, out, err


def _with_input(typed: str | None, options: dict[str, Any]) -> dict[str, Any]:
    return options | {"stdin": subprocess.PIPE} if typed is not None else options


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Looks until it is so, for longer than any busy machine takes."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        # Its name, in brackets before its state, may hold blanks and brackets of its own.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def cli() -> Iterator[Commands]:
    """Runs commands; see Commands."""
    commands = Commands()
    try:
        yield commands
    finally:
        commands.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """script("import gradsync as gs ...", name="script.py") writes a file and gives its path."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write

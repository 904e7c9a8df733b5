"""Runs `gradsync` as a user would, in a process of its own."""

import io
import os
import select
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr, redirect_stdout

from gradsync.cli import main

# A test run in the background of a shell ignores SIGINT, and so would everything that it starts.
_START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.argv[0] = 'gradsync'; from gradsync.cli import main; main()"
)


def write_script(folder, source, name="script.py"):
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


class Launcher(subprocess.Popen):
    """A program that is killed, and its ranks with it, when the test in its `with` fails."""

    def __exit__(self, kind, *rest):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def start(*arguments, env=os.environ, **options):
    # Buffered output leaves each rank in one piece.
    env = {name: value for name, value in env.items() if name != "PYTHONUNBUFFERED"}
    return Launcher(
        [sys.executable, "-c", _START, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        **options,
    )


def run(*arguments, typed=None, **options):
    """Runs it to its end; what is typed is its standard input."""
    if typed is not None:
        options["stdin"] = subprocess.PIPE
    with start(*arguments, **options) as process:
        out, err = process.communicate(typed)
    return process.returncode, out, err


def refused(*arguments):
    """Runs it in this process, for what is refused before a rank starts."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main([*map(str, arguments)], prog_name="gradsync")
        except SystemExit as ended:
            return ended.code, out.getvalue(), err.getvalue()
    raise AssertionError("it has come to its end")


def opened_since(descriptors):
    """Gives the descriptors of this process that are not among these, without those that are open for a moment."""
    deadline = time.monotonic() + 20
    while (opened := set(os.listdir("/proc/self/fd")).difference(descriptors)) and time.monotonic() < deadline:
        os.sched_yield()
    return opened


def is_gone(pid):
    """Whether not even a zombie is left of a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def has_ended(pid, timeout_seconds):
    """Waits for the end of a process that is not a child; None: however long it takes."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_seconds)[0])
    finally:
        os.close(descriptor)

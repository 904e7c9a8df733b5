"""Processes that a benchmark starts and ends: commands, and a rendezvous server."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def started(command: Sequence[str], *, deadline_seconds: float = 60, **options) -> Iterator[subprocess.Popen[str]]:
    """Yields the process of a command, which is killed at the end or the deadline, with all processes of its group."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(deadline_seconds, kill)
    timer.start()
    with process:
        try:
            yield process
        finally:
            timer.cancel()
            kill()


@contextmanager
def rendezvous_server(world_size: int) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yields the process of `gradsync serve`, its address, and the run's secret as hex digits."""
    secret = secrets.token_hex(32)
    command = [sys.executable, "-m", "gradsync", "serve", "--world-size", str(world_size), "--secret-file", "-"]
    with started(command, stdin=subprocess.PIPE) as server:
        server.stdin.write(f"{secret}\n")
        server.stdin.flush()
        yield server, server.stdout.readline().strip(), secret

"""Finds what a run has left behind: processes, open ports, files."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path


def marked_processes(variable: str, value: str) -> list[int]:
    """Returns the processes that were started with this variable, and their forks."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def await_end(
    variable: str, value: str, seconds: float, spared: Collection[int] = ()
) -> tuple[float | None, list[int]]:
    """Waits until the marked processes, but for the spared ones, have ended.

    Returns:
        The monotonic time at which the last ended, None where there was none; and those that have not ended.
    """
    deadline = time.monotonic() + seconds
    last_end = None
    while True:
        left = [pid for pid in marked_processes(variable, value) if pid not in spared]
        if not left or time.monotonic() > deadline:
            return last_end, left
        for pid in left:
            _await_process(pid, deadline)
        last_end = time.monotonic()


def _await_process(pid: int, deadline: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        os.close(descriptor)


def describe_process(pid: int) -> str:
    """Returns a process's id and the beginning of its command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "ended"
    return f"process {pid} ({command[:60]})"


def open_ports(addresses: Iterable[str]) -> list[str]:
    """Returns the addresses, host:port, at which a process still listens."""
    found = []
    for address in sorted(set(addresses)):
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                found.append(f"port {port} is open")
    return found


def files_of_runs(*folders: Path) -> set[str]:
    """Returns gradsync's files in these folders, and in /dev/shm, where named shared memory would be.

    What gradsync shares has no name there: a memfd lasts as long as a process that holds it, so that with the
    processes of a run its memory is gone.
    """
    return {
        str(path) for folder in (Path("/dev/shm"), *folders) for path in folder.iterdir() if "gradsync" in path.name
    }

"""This machine and its processes, as the kernel tells of them: what tells two processes whether their pids mean the
same to both, and what another process is doing.

Low in the tree: the rendezvous asks before it looks at another process, NCCL's set-up before it compares GPUs.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What /proc says of a process.

    Attributes:
        state: one letter: "R" runs, "S" sleeps, "T" is stopped, "Z" has ended and was not waited for.
        parent: its parent's pid; 0: none in this pid namespace.
        start_time: in clock ticks since the boot; tells it from an earlier process of that pid.
    """

    state: str
    parent: int
    start_time: str


def read_stat(pid: int) -> ProcessStat | None:
    """Returns what /proc says of a process; None where there is none, or /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
        return ProcessStat(fields[0].decode(), int(fields[1]), fields[19].decode())
    except (OSError, IndexError):
        return None


def boot_id() -> str:
    """Returns what tells hosts apart that were given one name; "" where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_identity() -> str:
    """Returns what is equal for two processes that see each other's pids, and "" where that cannot be known.

    A container has the boot id of its host, and pids of its own: so the pid namespace is part of it.
    """
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""

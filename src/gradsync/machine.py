"""Which machine this is: what tells two processes whether their pids mean the same to both.

Low in the tree: the rendezvous asks before it looks at another process, NCCL's set-up before it compares GPUs.
"""

from __future__ import annotations

import os


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

"""Hides from this process what Linux has and macOS has not, then runs a program: `python without_linux.py PROGRAM`.

It is no Mac: the processor, the kernel and the compiled parts of NumPy are those of this machine.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

HIDDEN: dict[Any, tuple[str, ...]] = {
    os: ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open", "posix_fallocate"),
    signal: ("sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGRTMIN", "SIGRTMAX"),
    socket: ("AF_NETLINK", "SO_PEERCRED", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    select: ("epoll",),
    time: ("CLOCK_BOOTTIME",),
}
HIDDEN_FILES = ("/proc", "/sys", "/dev/shm")


def refusing(opening: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that opens files, but none of HIDDEN_FILES."""

    def open_unless_hidden(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith(HIDDEN_FILES):
            raise FileNotFoundError(2, "No such file or directory", path)
        return opening(path, *args, **kwargs)

    return open_unless_hidden


def hide() -> None:
    """Takes all that away."""
    for module, names in HIDDEN.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = refusing(io.open)  # type: ignore[assignment]
    os.open = refusing(os.open)
    sys.platform = "darwin"


if __name__ == "__main__":
    hide()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

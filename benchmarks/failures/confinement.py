"""Control groups for a scene: one with little memory, and one whose processes cannot be killed.

Both need root, and control groups that are not read-only; the second also the freezer of version 1, where a frozen
process takes no SIGKILL, as a process does that hangs in the kernel.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_WITHIN_SECONDS = 5.0


class Unavailable(Exception):
    """This machine, or this user, has no such control group; the text says why."""


@contextlib.contextmanager
def small_memory(limit_bytes: int) -> Iterator[Path]:
    """Yields a file: a process whose id is written into it gets so much memory.

    Raises:
        Unavailable: the group cannot be made here.
    """
    for hierarchy, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        group = _ROOT / hierarchy / f"gradsync-detection-{os.getpid()}"
        with _made(group, limit, str(limit_bytes)) as is_made:
            if is_made:
                with contextlib.suppress(OSError):  # no swap, if swap is counted
                    (group / "memory.swap.max").write_text("0")
                yield group / "cgroup.procs"
                return
    raise Unavailable("no memory control group can be made here: it needs root, and groups that are not read-only")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Keeps a process from running, and from being killed, until the context ends.

    Raises:
        Unavailable: there is no freezer here.
    """
    group = _ROOT / "freezer" / f"gradsync-detection-{os.getpid()}"
    with _made(group, "freezer.state", "THAWED") as is_made:
        if not is_made:
            raise Unavailable("no process can be frozen here: it needs root and the freezer of control groups v1")
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        try:
            yield
        finally:
            (group / "freezer.state").write_text("THAWED")


@contextlib.contextmanager
def _made(group: Path, setting: str, value: str) -> Iterator[bool]:
    """Makes a group with a setting, and removes it; returns whether that was possible."""
    try:
        group.mkdir()
        (group / setting).write_text(value)
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Removes a group once its last process is gone."""
    deadline = time.monotonic() + _EMPTY_WITHIN_SECONDS
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)

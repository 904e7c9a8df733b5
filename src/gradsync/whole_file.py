"""Writing a file whole or not at all, and not waiting for ever for a file system that hangs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from gradsync.machine import run_with_timeout

_given_up: dict[Path, threading.Event] = {}  # by folder: whether the write that was given up has returned after all


def write_whole(path: Path, text: str, seconds: float) -> None:
    """Writes a file, and the folders that lead to it, so that whoever reads meanwhile finds the one before or this one.

    Args:
        path: the file.
        text: what it holds from then on.
        seconds: how long it may take. What takes longer is given up, and goes on behind the scenes.

    Raises:
        OSError: it cannot be written; TimeoutError: not in time, or one that was given up in this folder still hangs.
    """
    if path.parent in _given_up and not _given_up[path.parent].is_set():
        raise TimeoutError("the file system has not taken an earlier file yet")
    returned = threading.Event()

    def write() -> None:
        try:
            _write(path, text)
        finally:
            returned.set()

    try:
        run_with_timeout(write, "gradsync-file", seconds)
    except TimeoutError:
        if returned.is_set():  # the file system's own error
            raise
        _given_up[path.parent] = returned
        raise TimeoutError(f"the file system has not taken it within {seconds:.3g} s") from None
    except RuntimeError:  # no thread can be started: there are too many, or the interpreter ends (Python 3.12)
        write()


def _write(path: Path, text: str) -> None:
    beside = _beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.write_text(text)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """Returns where the file grows: a name of its own beside it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}")


os.register_at_fork(after_in_child=_given_up.clear)

"""The notes of a scene's processes, with times of their common clock, over a named pipe."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Names the scene's folder; also marks every process of the scene.
FOLDER_VARIABLE = "DETECTION_FOLDER"
READY, FAULT, ERROR, KEPT = "ready", "fault", "error", "kept"
_DIARY, _GO = "diary", "go"
_MAX_TEXT = 600  # characters: a line that a pipe takes at once is never mixed with another


@dataclass(frozen=True)
class Note:
    """A note of one process.

    Attributes:
        what: READY: the rank is about to reach its phase; FAULT: it is about to fail; ERROR: it caught an error;
            KEPT: it has closed everything after an error, and still holds something.
        at: monotonic seconds.
        pid: the process.
        rank: its rank, or -1.
        facts: further values.
    """

    what: str
    at: float
    pid: int
    rank: int
    facts: dict[str, Any] = field(default_factory=dict)


def note(what: str, **facts: Any) -> None:
    """Writes a note of this process; does nothing after the scene."""
    body = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "rank": int(os.environ.get("RANK", "-1"))}
    with contextlib.suppress(OSError):
        descriptor = os.open(_folder() / _DIARY, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, (json.dumps({**body, "facts": facts}) + "\n").encode())
        os.close(descriptor)


@contextlib.contextmanager
def errors_noted() -> Iterator[None]:
    """Writes a note of the exception that leaves the block."""
    try:
        yield
    except BaseException as error:
        note(ERROR, **_facts_of(error))
        raise


def _facts_of(error: BaseException) -> dict[str, Any]:
    from gradsync.errors import GradsyncError

    text = str(error)[:_MAX_TEXT]
    blamed = getattr(error, "rank", None)
    return {"type": type(error).__name__, "is_typed": isinstance(error, GradsyncError), "text": text, "blamed": blamed}


def await_go() -> None:
    """Waits for the scene's word that the fault is to happen; for one process of the scene."""
    with (_folder() / _GO).open("rb", buffering=0) as go:
        go.read(1)


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


class Diary:
    """The scene's end of the pipes: reads notes, and lets faults happen.

    Args:
        folder: of the scene, which its processes find in FOLDER_VARIABLE.
    """

    def __init__(self, folder: Path) -> None:
        for name in (_DIARY, _GO):
            os.mkfifo(folder / name)
        # Open for reading and writing, so that each pipe lasts as long as the scene.
        self._descriptor = os.open(folder / _DIARY, os.O_RDWR | os.O_NONBLOCK)
        self._go = os.open(folder / _GO, os.O_RDWR)
        self._begun = b""

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> list[Note]:
        """Returns the new notes."""
        with contextlib.suppress(BlockingIOError):
            self._begun += os.read(self._descriptor, 1 << 16)
        *lines, self._begun = self._begun.split(b"\n")
        return [Note(**json.loads(line)) for line in lines]

    def say_go(self, times: int = 1) -> None:
        os.write(self._go, b"!" * times)

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._go)

"""What the processes of a scene tell it: who did what when, over a named pipe, on the clock that all share."""

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
    """What one process did.

    Attributes:
        what: READY: the rank is about to go where it is wanted; FAULT: it is about to fail; ERROR: it caught one;
            KEPT: it has closed everything after an error, and still holds something.
        at: monotonic seconds.
        pid: the process.
        rank: its rank, or -1.
        facts: more, as the writer chose.
    """

    what: str
    at: float
    pid: int
    rank: int
    facts: dict[str, Any] = field(default_factory=dict)


def note(what: str, **facts: Any) -> None:
    """Writes down what this process does now; nowhere when the scene is over."""
    body = {"what": what, "at": time.monotonic(), "pid": os.getpid(), "rank": int(os.environ.get("RANK", "-1"))}
    with contextlib.suppress(OSError):
        descriptor = os.open(_folder() / _DIARY, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, (json.dumps({**body, "facts": facts}) + "\n").encode())
        os.close(descriptor)


@contextlib.contextmanager
def errors_noted() -> Iterator[None]:
    """Notes the exception that leaves the block, at once."""
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
    """Waits until the scene says that the fault is to happen; for one process of the scene."""
    with (_folder() / _GO).open("rb", buffering=0) as go:
        go.read(1)


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


class Diary:
    """The scene's end: reads what the processes note, and says go.

    Args:
        folder: of the scene; what its processes find in FOLDER_VARIABLE.
    """

    def __init__(self, folder: Path) -> None:
        for name in (_DIARY, _GO):
            os.mkfifo(folder / name)
        # Open for both, each pipe lives as long as the scene, whoever comes and goes.
        self._descriptor = os.open(folder / _DIARY, os.O_RDWR | os.O_NONBLOCK)
        self._go = os.open(folder / _GO, os.O_RDWR)
        self._begun = b""

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> list[Note]:
        """Gives what has been noted since."""
        with contextlib.suppress(BlockingIOError):
            self._begun += os.read(self._descriptor, 1 << 16)
        *lines, self._begun = self._begun.split(b"\n")
        return [Note(**json.loads(line)) for line in lines]

    def say_go(self, times: int = 1) -> None:
        os.write(self._go, b"!" * times)

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._go)

"""Log files: one for each rank, with the rank's output, if the user asks for logs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Container
from pathlib import Path
from typing import BinaryIO

from gradsync.errors import InvalidArgument

_LOG_NAME = re.compile(r"rank-(\d+)\.log", re.ASCII)
_ATTEMPT_NAME = re.compile(r"attempt-\d+", re.ASCII)


class RankLog:
    """The log file of one rank: the bytes of both streams, in order of arrival. Any thread may use it.

    Args:
        path: the file.
        streams: the number of streams that write to the file; each calls `close` once.
    """

    def __init__(self, path: Path, streams: int = 1) -> None:
        self._path = path
        self._writers = streams
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._failed = False

    def write(self, data: bytes) -> str | None:
        """Appends data; returns the first error in words, after which nothing more is written."""
        with self._lock:
            if self._failed:
                return None
            try:
                if self._file is None:
                    self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed at the rank's end)
                left = memoryview(data)
                while left:
                    left = left[self._file.write(left) :]
            except OSError as error:
                self._failed = True
                return f"log file {self._path} cannot be written: {error.strerror}; it is incomplete from here on"
            return None

    def close(self) -> None:
        """Closes the file, once the last of its streams has ended."""
        with self._lock:
            self._writers -= 1
            if self._writers == 0 and self._file is not None:
                self._file.close()
                self._file = None


def prepare_log_directory(log_dir: str | Path, attempt: int | None, ranks_elsewhere: Container[int] = ()) -> Path:
    """Makes the directory for the logs of a run, and removes those of an earlier run.

    This function removes files `rank-N.log`, and directories `attempt-N` that hold only such files. All others stay.

    Args:
        log_dir: the directory that the user named.
        attempt: the number of the start, in a run that may restart. Each start has a directory of its own, and the
            first start removes the directories of an earlier run.
        ranks_elsewhere: ranks of other launchers. Their logs stay, because the launchers may share the directory, and
            each launcher removes the old logs of its own ranks.

    Returns:
        The directory.

    Raises:
        InvalidArgument: the directory cannot be made, cleared, or written to.
    """
    log_dir = Path(log_dir)
    if not attempt and log_dir.is_dir():
        _clear(log_dir, attempt, ranks_elsewhere)
    directory = log_dir if attempt is None else log_dir / f"attempt-{attempt}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"log directory {str(directory)!r} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidArgument(f"log directory {str(directory)!r} cannot be written to: choose one that is yours")
    return directory


def _clear(log_dir: Path, attempt: int | None, ranks_elsewhere: Container[int]) -> None:
    """Removes the logs of an earlier run."""
    own = None if attempt is None else f"attempt-{attempt}"
    try:
        _remove_logs(log_dir, ranks_elsewhere)
        for path in list(log_dir.iterdir()):
            if _ATTEMPT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                _remove_attempt(path, ranks_elsewhere, is_own=path.name == own)
    except OSError as error:
        raise InvalidArgument(
            f"log directory {str(log_dir)!r} cannot be cleared of an earlier run's logs: {error.strerror}; "
            "choose another one"
        ) from None


def _remove_attempt(directory: Path, ranks_elsewhere: Container[int], *, is_own: bool) -> None:
    with contextlib.suppress(FileNotFoundError):  # another launcher has removed it
        if not all(map(_is_log, directory.iterdir())):
            return
        _remove_logs(directory, ranks_elsewhere)
        if not is_own:  # another launcher may have made it just now
            with contextlib.suppress(OSError):  # logs of another launcher are left in it
                directory.rmdir()


def _remove_logs(directory: Path, ranks_elsewhere: Container[int]) -> None:
    for path in list(directory.iterdir()):
        name = _LOG_NAME.fullmatch(path.name)
        if name is not None and int(name[1]) not in ranks_elsewhere and _is_log(path):
            path.unlink(missing_ok=True)


def _is_log(path: Path) -> bool:
    """Whether a file is a rank's log. A symbolic link is the user's, and stays."""
    return bool(_LOG_NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink()

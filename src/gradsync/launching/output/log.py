"""A file for each rank with all that it printed, on request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from gradsync.errors import InvalidArgument


class RankLog:
    """The log file of one rank: both streams in order of arrival, the bytes as they came.

    What the file holds already stays: a run is never the end of another run's log.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._failed = False

    def write(self, data: bytes) -> str | None:
        """Appends; returns what went wrong, once: after that the log is given up."""
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
            self.close()
            return f"log file {self._path} cannot be written: {error.strerror}; the logs are incomplete from here on"
        return None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def prepare_log_directory(log_dir: Path, attempt: int | None) -> Path:
    """Makes the directory for the logs of a run.

    Args:
        log_dir: as the user named it.
        attempt: for runs that may be restarted: which one this is; each has a directory of its own.

    Returns:
        The directory.

    Raises:
        InvalidArgument: it cannot be made, or written to.
    """
    directory = log_dir if attempt is None else log_dir / f"attempt-{attempt}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"log directory {str(directory)!r} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidArgument(f"log directory {str(directory)!r} cannot be written to: choose one that is yours")
    return directory

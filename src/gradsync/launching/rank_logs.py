"""Log files of the ranks' output, one file for each rank, if the user asks for logs."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Container
from pathlib import Path
from typing import BinaryIO

from gradsync.errors import InvalidArgument

_LOG_NAME = re.compile(r"rank-(\d+)(?:\.restart-\d+)?\.log", re.ASCII)


class RankLog:
    """The log file of one rank: the bytes of both streams, in order of arrival. Any thread may use it.

    Args:
        path: the path of the file.
        streams: the number of streams that write to the file; each calls `close` once.
    """

    def __init__(self, path: Path, streams: int = 1) -> None:
        self._path = path
        self._writers = streams
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._failed = False

    def write(self, data: bytes) -> str | None:
        """Appends data. Returns the text of the first error, or None; writes nothing more after an error."""
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


def log_name(rank: int, restart: int) -> str:
    """Returns the name of a rank's log file: "rank-0.log", or "rank-0.restart-1.log" after the first restart."""
    return f"rank-{rank}.log" if restart == 0 else f"rank-{rank}.restart-{restart}.log"


def prepare_log_directory(log_dir: str | Path, restart: int = 0, ranks_elsewhere: Container[int] = ()) -> Path:
    """Creates the directory for the logs of a run; the first start removes the logs of an earlier run.

    This function removes only files whose names have the pattern of `log_name`. All other files stay.

    Args:
        log_dir: the directory that the user named.
        restart: the number of times that the ranks have been started before this start.
        ranks_elsewhere: the ranks of other launchers. The logs of these ranks stay: launchers may share the directory,
            and each launcher removes the old logs of its own ranks.

    Returns:
        The directory.

    Raises:
        InvalidArgument: the directory cannot be made, cleared, or written to.
    """
    directory = Path(log_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"log directory {str(directory)!r} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidArgument(f"log directory {str(directory)!r} is not writable: choose one where you may write")
    try:
        for path in list(directory.iterdir()) if restart == 0 else ():
            name = _LOG_NAME.fullmatch(path.name)
            # A symbolic link stays, because the user has made it.
            if name and int(name[1]) not in ranks_elsewhere and path.is_file() and not path.is_symlink():
                path.unlink(missing_ok=True)  # another launcher may have removed it
    except OSError as error:
        raise InvalidArgument(
            f"log directory {str(directory)!r} cannot be cleared of an earlier run's logs: {error.strerror}; "
            "choose another one"
        ) from None
    return directory

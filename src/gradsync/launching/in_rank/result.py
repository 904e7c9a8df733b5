"""Inside a rank process: the return value of the user's function, or its error, as bytes for the launcher.

At its end a rank writes its report into a file in memory, which the launcher has given to it. Then the rank writes the
report's kind and its position in the file to the report pipe. An error is text in JSON. A return value is pickled with
pickle, or with cloudpickle if pickle fails, as it does for an instance of a class from a notebook. Large arrays are
copied once, from the rank's memory into the file, which the launcher maps (`rank_report`). This module imports as
little as possible, because every rank imports it at its start.
"""

from __future__ import annotations

import os
import struct
from typing import Any

#: The message on the report pipe: the kind of the report, and its start and end offsets in the result file.
REPORT = struct.Struct("<cQQ")
#: The kind of a report with a return value: a table of `BOUNDS`, with one entry for the pickled return value, then one
#: for each large array.
RESULT = b"R"
#: The kind of a report with an error: a JSON object with the attributes of `rank_report.ErrorReport`.
ERROR = b"E"

#: The start and end offsets of a part of the result file.
BOUNDS = struct.Struct("<QQ")

_ARRAY_FROM_BYTES = 256 * 1024  # smaller arrays are pickled with the rest
_ALIGNMENT_BYTES = 4096


def send_error(pipe: int, file: int, error: bytes) -> None:
    """Sends an error to the launcher.

    Args:
        pipe: the descriptor of the report pipe.
        file: the descriptor of the result file.
        error: the error as a JSON object.

    Raises:
        OSError: the launcher is gone, or the result file cannot grow.
    """
    _lift_own_limit()
    _empty(file)
    _write_all(file, error)
    os.write(pipe, REPORT.pack(ERROR, 0, len(error)))


def _write_all(file: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


class UnsendableResult(Exception):
    """The function has returned, but its result cannot be sent to the launcher."""

    def __init__(self, refusal: Exception) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class _FileRefused(BaseException):
    """The result file cannot grow. A BaseException, because the `__reduce__` of an object may catch every Exception."""


def send_result(value: Any, pipe: int, file: int) -> None:
    """Pickles the return value of the function into the result file, and sends its position to the launcher.

    Args:
        value: the return value.
        pipe: the descriptor of the report pipe.
        file: the descriptor of the result file, which is empty.

    Raises:
        UnsendableResult: the value cannot be pickled, or the result file cannot grow.
        OSError: the launcher is gone.
    """
    _lift_own_limit()
    try:
        begin, end = _write(value, file)
    except _FileRefused as refused:
        raise _unsendable(f"is too large for the memory file (memfd) that the launcher reads: {refused}") from None
    os.write(pipe, REPORT.pack(RESULT, begin, end))


class _Stream:
    """The result file, as a file object for pickle."""

    def __init__(self, file: int) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Writes bytes, or an object with a buffer; returns the number of bytes written."""
        import pickle

        content = pickle.PickleBuffer(data).raw()  # a flat view of the bytes
        try:
            _write_all(self._file, content)
        except OSError as error:
            raise _FileRefused(error.strerror) from None
        return content.nbytes


def _write(value: Any, file: int) -> tuple[int, int]:
    """Writes a pickled value, its large arrays and the table of their bounds into the file.

    Returns:
        The start and end offsets of the table in the file.
    """
    stream = _Stream(file)
    large: list[memoryview] = []
    _pickle(value, stream, file, large)
    at = os.lseek(file, 0, os.SEEK_CUR)
    bounds = BOUNDS.pack(0, at)
    for content in large:
        at = os.lseek(file, -(-at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, os.SEEK_SET)
        bounds += BOUNDS.pack(at, at + content.nbytes)
        at += stream.write(content)
    return at, at + stream.write(bounds)


def _pickle(value: Any, stream: _Stream, file: int, large: list[memoryview]) -> None:
    """Pickles a value without the contents of large arrays, and appends these contents to `large`.

    Raises:
        UnsendableResult: the value cannot be pickled.
    """
    import pickle

    def stays(buffer: Any) -> bool:
        content: memoryview = buffer.raw()
        if content.nbytes < _ARRAY_FROM_BYTES:
            return True
        large.append(content)
        return False

    try:
        pickle.dump(value, stream, pickle.HIGHEST_PROTOCOL, buffer_callback=stays)
    except Exception as error:
        _empty(file)
        large.clear()
        try:
            import cloudpickle

            cloudpickle.dump(value, stream, buffer_callback=stays)
        except Exception:  # cloudpickle is not installed, or refuses too: report the error of pickle
            refusal = f"needs to be picklable to reach the launcher, got {type(value).__name__}: {error}"
            raise _unsendable(refusal) from None


def _empty(file: int) -> None:
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)


def _lift_own_limit() -> None:
    """Raises the soft limit of the file size to the hard limit, because the user's code may have lowered it."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def _unsendable(why: str) -> UnsendableResult:
    from gradsync.errors import InvalidArgument

    return UnsendableResult(InvalidArgument(f"the return value of rank {os.environ['RANK']} {why}"))

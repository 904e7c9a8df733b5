"""Inside a rank process: what the user's function returned, as bytes for the launcher.

By pickle, and by cloudpickle where pickle refuses: a class that a notebook has defined came to the rank by value, and
goes back that way. A large result goes through a file in memory that the launcher has given the rank, and its arrays
are copied once, from the rank's memory into that: the launcher maps it. Imported by every rank at start-up, so it
imports next to nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

from gradsync.launching.in_rank import report_pipe

#: Where in the result file something begins and ends.
BOUNDS = struct.Struct("<QQ")

_ARRAY_FROM_BYTES = 256 * 1024  # what is smaller is copied with the rest
_FILED_FROM_BYTES = 1 << 20
_ALIGNMENT_BYTES = 4096


class UnsendableResult(Exception):
    """The function did its work, and only its result cannot reach the launcher."""

    def __init__(self, refusal: Exception) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class _FileRefused(BaseException):
    """The result file cannot take so much. No Exception: what pickles itself may catch those."""


class Returned:
    """What the function returned.

    Args:
        value: what it returned.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def send(self, report: int, file: int) -> None:
        """Pickles it, and sends it.

        Args:
            report: the report pipe.
            file: the result file, empty.

        Raises:
            UnsendableResult: it does not pickle.
            OSError: the launcher is gone.
        """
        try:
            stream, bounds = _pickle_to_file(self._value, file)
        except _FileRefused:
            os.ftruncate(file, 0)
            stream, bounds = _Stream(None), b""
            _pickle(self._value, stream, None)
        if bounds:
            report_pipe.write_frame(report, report_pipe.FILED_RESULT, bounds)
        else:
            report_pipe.write_frame(report, report_pipe.RESULT, stream.held)


class _Stream:
    """What pickle writes: held in memory while it is little, and then in the result file.

    Args:
        file: the result file; None: all is held.

    Attributes:
        held: what is not in the file.
        filed_bytes: how much is there.
    """

    def __init__(self, file: int | None) -> None:
        self._file = file
        self.held = bytearray()
        self.filed_bytes = 0

    def write(self, data: Any) -> None:
        """Takes bytes, or whatever has some."""
        import pickle

        content = pickle.PickleBuffer(data).raw()  # in one dimension, whatever it has
        if self._file is None or (not self.filed_bytes and len(self.held) + content.nbytes < _FILED_FROM_BYTES):
            self.held += content
        else:
            self.spill()
            self.filed_bytes += _append(self._file, content)

    def spill(self) -> None:
        """Moves what is held to the file."""
        if self.held and self._file is not None:
            self.filed_bytes += _append(self._file, memoryview(self.held))
            self.held = bytearray()

    def restart(self) -> None:
        """Forgets what was written."""
        self.held, self.filed_bytes = bytearray(), 0
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)


def _pickle_to_file(value: Any, file: int) -> tuple[_Stream, bytes]:
    """Pickles a value, into the result file where it is large; returns the bounds of what is there, if anything is."""
    stream = _Stream(file)
    large: list[memoryview] = []
    _pickle(value, stream, large)
    if large:
        stream.spill()
    bounds = BOUNDS.pack(0, stream.filed_bytes) if stream.filed_bytes else b""
    at = stream.filed_bytes
    for content in large:
        at = os.lseek(file, -(-at // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, os.SEEK_SET)
        bounds += BOUNDS.pack(at, at + content.nbytes)
        at += _append(file, content)
    return stream, bounds


def _append(file: int, content: memoryview) -> int:
    """Writes into the file, where it is; returns how much."""
    try:
        report_pipe.write_all(file, (content,))
    except OSError:
        raise _FileRefused from None
    return content.nbytes


def _pickle(value: Any, stream: _Stream, large: list[memoryview] | None) -> None:
    """Pickles a value, but for the contents of large arrays where there is a list for these.

    Raises:
        UnsendableResult: it does not pickle.
    """
    import pickle

    def stays(buffer: Any) -> bool:
        content: memoryview = buffer.raw()
        if large is None or content.nbytes < _ARRAY_FROM_BYTES:
            return True
        large.append(content)
        return False

    try:
        pickle.dump(value, stream, pickle.HIGHEST_PROTOCOL, buffer_callback=stays)
    except Exception as error:
        stream.restart()
        if large is not None:
            large.clear()
        if _pickle_by_value(value, stream, stays):
            return
        from gradsync.errors import InvalidArgument

        refusal = InvalidArgument(
            f"the return value of rank {os.environ['RANK']} needs to pickle to reach the launcher, "
            f"got {type(value).__name__}: {error}"
        )
        raise UnsendableResult(refusal) from None


def _pickle_by_value(value: Any, stream: _Stream, stays: Callable[[Any], bool]) -> bool:
    try:
        import cloudpickle

        cloudpickle.dump(value, stream, buffer_callback=stays)
    except Exception:  # not installed, or it refuses too: what pickle said is the news
        return False
    return True

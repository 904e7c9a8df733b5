"""What a rank tells its launcher at its end: the return value of a function, or the exception that ended the rank.

The rank writes it into a file in memory, which the launcher has made, and then one byte to the report pipe. A rank that
runs a script, or exits, without an exception tells nothing. A value is pickled, by cloudpickle where pickle fails; an
error is text, so that it comes even if the exception cannot be unpickled. Every rank imports this module at its start,
so it imports little.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from io import BufferedReader, BufferedWriter

_RESULT, _ERROR = b"R", b"E"  # what the result file holds


class ErrorReport(NamedTuple):
    """An exception that ended a rank, as text.

    Attributes:
        text: the traceback, without gradsync's frames at the beginning; of an error of gradsync, nor at the end.
        summary: the exception's type and the first line of its message.
        is_consequence: whether it only says that another rank is gone.
        missed_rank: that rank, if it is named.
        is_unsendable: whether the function returned, and only its result could not be sent.
        is_timeout: whether it only says that another rank was silent or late, which will report nothing.
    """

    text: str
    summary: str
    is_consequence: bool = False
    missed_rank: int | None = None
    is_unsendable: bool = False
    is_timeout: bool = False


# -- In the rank -------------------------------------------------------------------------------------------------------


class UnsendableResult(Exception):
    """The function has returned, but its result cannot be sent to the launcher. The text says why."""


class Reporter:
    """Sends the only report of a rank.

    Args:
        pipe, file: the descriptors of the report pipe and of the result file.
    """

    def __init__(self, pipe: int, file: int) -> None:
        import _thread

        self._pipe, self._file = pipe, file
        self._is_claimed = _thread.allocate_lock()

    def claim(self) -> bool:
        """Returns whether the caller may report: the first of all threads that asks may."""
        return self._is_claimed.acquire(blocking=False)

    def send_error(self, error: ErrorReport) -> None:
        """Sends an error.

        Raises:
            OSError: the launcher is gone, or the result file cannot grow.
        """
        _lift_own_limit()
        with self._emptied() as stream:
            stream.write(ascii(tuple(error)).encode())  # needs no module, which one of the user's might hide
        os.write(self._pipe, _ERROR)

    def send_result(self, value: Any) -> None:
        """Sends the return value of the function.

        Raises:
            UnsendableResult: the value cannot be pickled, or the result file cannot grow.
            OSError: the launcher is gone.
        """
        import pickle

        _lift_own_limit()
        try:
            with self._emptied() as stream:
                pickle.dump(value, stream, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC):
                why = f"is too large for the memory file (memfd) that the launcher reads: {error.strerror}"
                raise UnsendableResult(why) from None
            try:
                import cloudpickle

                with self._emptied() as stream:
                    cloudpickle.dump(value, stream)
            except Exception:  # cloudpickle refuses too: report the error of pickle
                why = f"needs to be picklable to reach the launcher, got {type(value).__name__}: {error}"
                raise UnsendableResult(why) from None
        os.write(self._pipe, _RESULT)

    def _emptied(self) -> BufferedWriter:
        """Empties the result file, and returns it as a file object."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        return open(self._file, "wb", closefd=False)


def _lift_own_limit() -> None:
    """Raises the soft limit of the file size to the hard limit, because the user's code may have lowered it."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


# -- In the launcher ---------------------------------------------------------------------------------------------------


class ReturnValue:
    """A return value in a rank's result file.

    Args:
        file: the descriptor of the file; this object closes it.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    def load(self) -> Any:
        """Returns a new copy of the value. If unpickling fails, raises its exception."""
        import pickle

        with _reading(self._file) as stream:
            return pickle.load(stream)

    def __del__(self) -> None:
        os.close(self._file)


def read_report(message: bytes, file: int) -> ReturnValue | ErrorReport:
    """Reads the report of a rank. If the report cannot be read, returns an ErrorReport that says so.

    Args:
        message: the message from the report pipe.
        file: the descriptor of the rank's result file. A returned ReturnValue owns and closes this descriptor.
    """
    from ast import literal_eval

    if message == _RESULT:
        return ReturnValue(file)
    try:
        if message != _ERROR:
            raise ValueError(f"{message[:16]!r} on the report pipe")
        with _reading(file) as stream:
            return ErrorReport(*literal_eval(stream.read().decode("ascii")))
    except (ValueError, TypeError, SyntaxError, OSError, MemoryError, RecursionError) as error:
        # Most likely other code has written to the pipe or the file.
        text = f"the report of this rank cannot be read ({error}): perhaps other code wrote to a descriptor of gradsync"
        return ErrorReport(f"gradsync: {text}\n", text)


def _reading(file: int) -> BufferedReader:
    """Opens a result file again, from its beginning; the rank and the launcher share the position of `file`."""
    return open(f"/proc/self/fd/{file}", "rb")

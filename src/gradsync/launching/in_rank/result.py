"""The report of a rank, which the rank writes and the launcher reads: the return value of a function, or an exception.

At its end a rank writes its report into a file in memory, which the launcher has given to the rank. Then the rank
writes the report's kind to the report pipe. A rank that runs a script, or exits, without an exception has no report. A
report can have any size, because a rank that writes to the file does not wait for the launcher. An error is text in
JSON. A rank pickles a return value with pickle, or with cloudpickle if pickle fails, for example for an instance of a
class from a notebook. This module imports as little as possible, because every rank imports it at its start.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from io import BufferedReader, BufferedWriter

#: The message on the report pipe if the result file holds the pickled return value.
RESULT = b"gradsync result\n"
#: The message on the report pipe if the result file holds an error: a JSON object with the attributes of `ErrorReport`.
ERROR = b"gradsync error\n"


class ErrorReport(NamedTuple):
    """An exception that ended a rank, as text.

    Attributes:
        text: the traceback, without gradsync's frames at the beginning; for an error of gradsync, also without
            gradsync's frames at the end.
        summary: the exception's type and the first line of its message.
        is_consequence: whether the exception only reports that another rank is gone.
        missed_rank: the rank that the exception reports as gone, if the exception names a rank.
        is_unsendable: whether the function returned, and only its result could not be sent.
        is_timeout: whether the exception only reports that another rank was silent or late. The silent rank will report
            no error.
    """

    text: str
    summary: str
    is_consequence: bool
    missed_rank: int | None = None
    is_unsendable: bool = False
    is_timeout: bool = False

    def to_json(self) -> bytes:
        """Returns the report as a JSON object."""
        import json

        return json.dumps(self._asdict(), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ErrorReport:
        """Returns the report of a JSON object.

        Raises:
            ValueError: the data is not a JSON object, or its attributes differ from those of a report in name or type.
        """
        import json
        from typing import get_type_hints

        try:
            value = json.loads(data)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        types = get_type_hints(cls)
        if not isinstance(value, dict) or value.keys() != types.keys():
            raise ValueError(f"needs to be an object with the attributes {sorted(types)}")
        for name, attribute in value.items():
            # isinstance(True, int) is true, but this function does not accept a bool as a number.
            if not isinstance(attribute, types[name]) or (isinstance(attribute, bool) and types[name] is not bool):
                raise ValueError(f"{name} needs to be {types[name]}, got {type(attribute).__name__}")
        return cls(**value)


# -- In the rank -------------------------------------------------------------------------------------------------------


class UnsendableResult(Exception):
    """The function has returned, but its result cannot be sent to the launcher.

    Attributes:
        refusal: the error for the caller.
    """

    def __init__(self, why: str) -> None:
        from gradsync.errors import InvalidArgument

        self.refusal = InvalidArgument(f"the return value of rank {os.environ['RANK']} {why}")
        super().__init__(self.refusal)


def send_error(pipe: int, file: int, error: ErrorReport) -> None:
    """Sends an error to the launcher.

    Args:
        pipe: the descriptor of the report pipe.
        file: the descriptor of the result file.
        error: the error.

    Raises:
        OSError: the launcher is gone, or the result file cannot grow.
    """
    _lift_own_limit()
    with _emptied(file) as stream:
        stream.write(error.to_json())
    os.write(pipe, ERROR)


def send_result(value: Any, pipe: int, file: int) -> None:
    """Pickles the return value of the function into the result file, and tells the launcher.

    Args:
        value: the return value.
        pipe: the descriptor of the report pipe.
        file: the descriptor of the result file.

    Raises:
        UnsendableResult: the value cannot be pickled, or the result file cannot grow.
        OSError: the launcher is gone.
    """
    import pickle

    _lift_own_limit()
    try:
        with _emptied(file) as stream:
            pickle.dump(value, stream, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC):
            why = f"is too large for the memory file (memfd) that the launcher reads: {error.strerror}"
            raise UnsendableResult(why) from None
        try:
            import cloudpickle

            with _emptied(file) as stream:
                cloudpickle.dump(value, stream)
        except Exception:  # cloudpickle refuses too: report the error of pickle
            why = f"needs to be picklable to reach the launcher, got {type(value).__name__}: {error}"
            raise UnsendableResult(why) from None
    os.write(pipe, RESULT)


def _emptied(file: int) -> BufferedWriter:
    """Empties the result file, and returns it as a file object."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    return open(file, "wb", closefd=False)


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
    try:
        if message == RESULT:
            return ReturnValue(file)
        if message != ERROR:
            raise ValueError(f"{message[:16]!r} is no report")
        with _reading(file) as stream:
            return ErrorReport.from_json(stream.read())
    except (ValueError, OSError, MemoryError) as error:
        # Most likely other code has written to the pipe or the file.
        text = f"the report of this rank cannot be read ({error}): perhaps other code wrote to a descriptor of gradsync"
        return ErrorReport(f"gradsync: {text}\n", text, is_consequence=False)


def _reading(file: int) -> BufferedReader:
    """Opens a result file again, from its beginning; the rank and the launcher share the position of `file`."""
    return open(f"/proc/self/fd/{file}", "rb")

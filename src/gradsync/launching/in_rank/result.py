"""The report of a rank, which the rank writes and the launcher reads: the return value of the function, or its error.

At its end a rank writes its report into a file in memory, which the launcher has given to it. Then the rank writes the
report's kind and its position in the file to the report pipe. An error is text in JSON. A return value is pickled with
pickle, or with cloudpickle if pickle fails, as it does for an instance of a class from a notebook. Large arrays are
copied once, from the rank's memory into the file, which the launcher maps. This module imports as little as possible,
because every rank imports it at its start.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import mmap

#: The message on the report pipe: the kind of the report, and its start and end offsets in the result file.
REPORT = struct.Struct("<cQQ")
#: The kind of a report with a return value: a table of `BOUNDS`, with one entry for the pickled return value, then one
#: for each large array.
RESULT = b"R"
#: The kind of a report with an error: a JSON object with the attributes of `ErrorReport`.
ERROR = b"E"

#: The start and end offsets of a part of the result file.
BOUNDS = struct.Struct("<QQ")

_ARRAY_FROM_BYTES = 256 * 1024  # smaller arrays are pickled with the rest
_ALIGNMENT_BYTES = 4096
_MAP_FIXED = 0x10  # Source: include/uapi/asm-generic/mman-common.h; the mmap module does not have it

_Record = TypeVar("_Record")


class ErrorReport(NamedTuple):
    """An exception that ended a rank, as text.

    Attributes:
        text: the traceback, without gradsync's own frames.
        summary: the last line of the traceback.
        is_consequence: whether the exception only reports that another rank is gone.
        missed_rank: the rank that the exception reports as gone, if it names one.
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


# -- In the rank -------------------------------------------------------------------------------------------------------


def send_error(pipe: int, file: int, error: ErrorReport) -> None:
    """Sends an error to the launcher.

    Args:
        pipe: the descriptor of the report pipe.
        file: the descriptor of the result file.
        error: the error.

    Raises:
        OSError: the launcher is gone, or the result file cannot grow.
    """
    content = to_json(error)
    _lift_own_limit()
    _empty(file)
    _write_all(file, content)
    os.write(pipe, REPORT.pack(ERROR, 0, len(content)))


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


# -- In the launcher ---------------------------------------------------------------------------------------------------


def read_report(message: bytes, file: int) -> ReturnValue | ErrorReport:
    """Reads the report of a rank. If the report cannot be read, returns an ErrorReport that says so.

    Args:
        message: the message from the report pipe.
        file: the descriptor of the rank's result file. A returned ReturnValue owns and closes this descriptor.
    """
    import fcntl  # imported here, like others below, to keep the start of a rank short

    try:
        if len(message) != REPORT.size or message[:1] not in (RESULT, ERROR):
            raise ValueError(f"{message[:16]!r} is no report")
        kind, begin, end = REPORT.unpack(message)
        # If the rank could make the file shorter, reading its mapping would kill this process.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        _check_bounds(file, [(begin, end)])
        content = os.pread(file, end - begin, begin)
        return from_json(ErrorReport, content) if kind == ERROR else ReturnValue(file, content)
    except (ValueError, OSError, MemoryError) as error:
        # Other code has written to the pipe or the file.
        text = f"the report of this rank cannot be read ({error}): code in the rank wrote to a descriptor of gradsync"
        return ErrorReport(f"gradsync: {text}\n", text, is_consequence=False)


def _check_bounds(file: int, bounds: list[tuple[int, int]]) -> None:
    size = os.fstat(file).st_size
    for begin, end in bounds:
        if not begin <= end <= size:
            raise ValueError(f"a result file of {size} bytes does not hold bytes {begin} to {end}")


class ReturnValue:
    """A return value in a rank's result file. Its large arrays are mapped from the file, not copied.

    Args:
        file: the descriptor of the file; this object closes it.
        table: the bounds of the pickled value in the file, then the bounds of each buffer, packed as BOUNDS.

    Raises:
        ValueError: the file is shorter than the table says, or the table is malformed; the caller must close the
            descriptor.
    """

    def __init__(self, file: int, table: bytes) -> None:
        self._file = -1
        if not table or len(table) % BOUNDS.size:
            raise ValueError(f"the table of offsets in a result file cannot have {len(table)} bytes")
        self._bounds = list(BOUNDS.iter_unpack(table))
        _check_bounds(file, self._bounds)
        self._file = file

    def load(self) -> Any:
        """Returns a new copy of the value. If unpickling fails, raises its exception."""
        import pickle

        # A private mapping: each load gives a separate value, which a process forked later does not share.
        content = memoryview(_map_privately(self._file, os.fstat(self._file).st_size))
        pickled, *buffers = [content[begin:end] for begin, end in self._bounds]
        return pickle.loads(pickled, buffers=buffers)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _map_privately(file: int, size_bytes: int) -> mmap.mmap:
    """Maps a file privately: a write to the mapping copies the page, and the file does not change.

    `mmap.mmap(file)` would keep a copy of the descriptor open until the last array in the mapping is gone.

    Args:
        file: the descriptor of the file; the caller may close it afterwards.
        size_bytes: the size of the file, at least 1.

    Raises:
        OSError: there is no room for the mapping.
    """
    import ctypes
    import mmap

    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # unmapped with its last view
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, size_bytes, protection, flags, file, 0) == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memory


# -- Records in JSON ---------------------------------------------------------------------------------------------------


def to_json(record: Any) -> bytes:
    """Returns a NamedTuple as a JSON object."""
    import json

    return json.dumps(record._asdict(), separators=(",", ":")).encode()


def from_json(kind: type[_Record], data: bytes) -> _Record:
    """Makes a NamedTuple from a JSON object with the same attributes.

    Raises:
        ValueError: the data is no JSON object, or has other attributes than `kind`; the error's text has the reason.
    """
    import json
    from typing import get_type_hints

    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    types = get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"needs to be an object with the attributes {sorted(types)}")
    for name, attribute in value.items():
        # isinstance(True, int) is true, but a bool is no number here.
        if not isinstance(attribute, types[name]) or (isinstance(attribute, bool) and types[name] is not bool):
            raise ValueError(f"{name} needs to be {types[name]}, got {type(attribute).__name__}")
    return kind(**value)

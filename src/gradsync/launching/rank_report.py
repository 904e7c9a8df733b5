"""Reports of a rank, as the launcher reads them: its return value or its error.

The module `in_rank/result` writes these reports.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from gradsync.launching.in_rank.result import BOUNDS, ERROR, REPORT, RESULT

if TYPE_CHECKING:
    import mmap

_MAP_FIXED = 0x10  # Source: include/uapi/asm-generic/mman-common.h; the mmap module does not have it

T = TypeVar("T")


@dataclass(frozen=True)
class ErrorReport:
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


def read_report(message: bytes, file: int) -> ReturnValue | ErrorReport:
    """Reads the report of a rank. If the report cannot be read, returns an ErrorReport that says so.

    Args:
        message: the message from the report pipe.
        file: the descriptor of the rank's result file. A returned ReturnValue owns and closes this descriptor.
    """
    try:
        if len(message) != REPORT.size or message[:1] not in (RESULT, ERROR):
            raise ValueError(f"{message[:16]!r} is no report")
        kind, begin, end = REPORT.unpack(message)
        # If the rank could make the file shorter, reading its mapping would kill this process.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        content = _read_part(file, begin, end)
        return from_json(ErrorReport, content) if kind == ERROR else ReturnValue(file, content)
    except (ValueError, OSError, MemoryError) as error:
        return _unreadable(str(error))


def _read_part(file: int, begin: int, end: int) -> bytes:
    """Returns the bytes from `begin` to `end` of a result file.

    Raises:
        ValueError: the file is shorter.
    """
    size = os.fstat(file).st_size
    if not begin <= end <= size:
        raise ValueError(f"a result file of {size} bytes does not hold bytes {begin} to {end}")
    content = b""
    while len(content) < end - begin:  # one call reads at most 2 GiB
        content += os.pread(file, end - begin - len(content), begin + len(content))
    return content


def _unreadable(why: str) -> ErrorReport:
    """Returns the error for a report that cannot be read because other code has written to its pipe or its file."""
    text = f"the report of this rank cannot be read ({why}): code in the rank wrote to a file descriptor of gradsync"
    return ErrorReport(f"gradsync: {text}\n", text, is_consequence=False)


class ReturnValue:
    """A return value in a rank's result file. Its large arrays are mapped from the file, not copied.

    Args:
        file: the descriptor of the file; this object closes it.
        table: the bounds of the pickled value in the file, then the bounds of each buffer, packed as BOUNDS.

    Raises:
        ValueError, OSError: the file is shorter than the table says, or the table is malformed; the caller must close
            the descriptor.
    """

    def __init__(self, file: int, table: bytes) -> None:
        size = os.fstat(file).st_size
        if not table or len(table) % BOUNDS.size:
            raise ValueError(f"the table of offsets in a result file cannot have {len(table)} bytes")
        self._bounds = list(BOUNDS.iter_unpack(table))
        for begin, end in self._bounds:
            if not begin <= end <= size:
                raise ValueError(f"a result file of {size} bytes does not hold bytes {begin} to {end}")
        self._file, self._size_bytes = file, size
        self._close = weakref.finalize(self, os.close, file)

    def load(self) -> Any:
        """Returns a new copy of the value. If unpickling fails, raises its exception."""
        import pickle  # imported here, like others below, to keep the start short

        # A private mapping: each load gives a separate value, which a process forked later does not share.
        content = memoryview(map_privately(self._file, self._size_bytes))
        pickled, *buffers = [content[begin:end] for begin, end in self._bounds]
        return pickle.loads(pickled, buffers=buffers)

    def forget(self) -> None:
        """Closes the file; after that the value cannot be loaded."""
        self._close()


def map_privately(file: int, size_bytes: int) -> mmap.mmap:
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


def from_json(kind: type[T], data: bytes) -> T:
    """Makes an object of a dataclass from a JSON object with the same attributes.

    Raises:
        ValueError: the data is no JSON object, or has other attributes than `kind`; the error's text has the reason.
    """
    import json

    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"needs to be an object, got {type(value).__name__}")
    known: tuple[Any, ...] = fields(kind)  # type: ignore[arg-type]
    types = get_type_hints(kind)
    names = {field.name for field in known}
    lacking = {field.name for field in known if field.default is MISSING} - value.keys()
    if lacking or value.keys() - names:
        raise ValueError(f"needs the attributes {sorted(names)}, got {sorted(value)}")
    for name, attribute in value.items():
        # isinstance(True, int) is true, but a bool is no number here.
        if not isinstance(attribute, types[name]) or (isinstance(attribute, bool) and types[name] is not bool):
            raise ValueError(f"{name} needs to be {types[name]}, got {type(attribute).__name__}")
    return kind(**value)

"""The launcher's own stdout and stderr, onto which the lines of all ranks go without being mixed.

Nothing here waits: what a stream cannot take now is kept, and its ranks are not read until it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
from collections.abc import Mapping
from typing import BinaryIO, Protocol, TextIO

from gradsync.launching.output.lines import begin_lines_with

_ERASE_LINE = b"\r\x1b[K"


class Screen:
    """One output of the launcher: a terminal, pipe or file, or a text stream without descriptor (a notebook).

    Args:
        stream: where to write; None, as Python has it for a closed one: nowhere.

    Attributes:
        loss: why nothing can be written any more.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._sink = _sink_of(stream)
        self._pending = b""
        self._owner: object = None  # who wrote last ...
        self._last_byte = b"\n"  # ... and how it ended
        self._bars: set[object] = set()  # who has a progress bar for its open line
        self.is_terminal = _is_terminal(stream)
        self.colour = wants_colour(self.is_terminal)
        self.loss: Exception | None = None
        self._can_erase = self.is_terminal and os.environ.get("TERM") != "dumb"

    @property
    def gone(self) -> bool:
        """Whether nothing can be written any more."""
        return self.loss is not None

    @property
    def blocked(self) -> bool:
        """Whether some of what was written still waits."""
        return bool(self._pending)

    @property
    def descriptor(self) -> int:
        """The descriptor to wait on while blocked."""
        return self._sink.descriptor

    def write(self, owner: object, prefix: bytes, data: bytes) -> None:
        """Writes lines, or a part of one, as much as goes without waiting.

        Args:
            owner: whose they are: the part of a line that one left open is continued by the same one only.
            prefix: what each line begins with.
            data: at least one byte.
        """
        continues = owner is self._owner and self._last_byte not in b"\r\n"
        lines = begin_lines_with(prefix, data, is_inside_line=continues)
        if self.gone or not lines:
            return
        if owner is not self._owner:
            self._pending += self._break_before(data)
        self._pending += lines
        self._owner, self._last_byte = owner, data[-1:]
        self._note_bar(owner, data)
        self.drain()

    def end_line(self, owner: object) -> None:
        """Ends the line that this one left open, if it stands there still."""
        if owner is self._owner and self._last_byte != b"\n" and not self.gone:
            self._pending += b"\n"
            self._last_byte = b"\n"
            self.drain()
        self._bars.discard(owner)

    def drain(self) -> None:
        """Writes what waits, as much as goes without waiting."""
        view = memoryview(self._pending)
        taken = 0
        try:
            while taken < len(view) and (count := self._sink.write(view[taken:])):
                taken += count
        except Exception as error:  # the reader has gone, the disk is full; the caller's own stream may raise anything
            self.loss = error
            taken = len(view)
        self._pending = self._pending[taken:]

    def _break_before(self, data: bytes) -> bytes:
        """Gives the newline that keeps an open line of another from being continued or overwritten."""
        if self._last_byte == b"\n":
            return b""
        if self._can_erase and self._owner in self._bars:
            return _ERASE_LINE  # its next state comes soon: a line for each would fill the terminal
        # Progress bars may overwrite each other, as they do without us: else each step would take a line.
        is_bar_after_bar = self._last_byte == b"\r" and data.endswith(b"\r") and b"\n" not in data
        return b"" if is_bar_after_bar else b"\n"

    def _note_bar(self, owner: object, data: bytes) -> None:
        r"""Remembers whose open line has been overwritten with \r, for when one of its states comes without."""
        _, newline, open_line = data.rpartition(b"\n")
        if b"\r" in open_line:
            self._bars.add(owner)
        elif newline:
            self._bars.discard(owner)


class _Sink(Protocol):
    @property
    def descriptor(self) -> int: ...

    def write(self, data: memoryview) -> int:
        """Writes some of the data; returns how many bytes, 0 when none goes without waiting."""


class _DescriptorSink:
    """Writes past Python's buffer: a thread that waits inside that would make the interpreter abort at its end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        # A descriptor cannot be made non-blocking for us alone. But a pipe that poll() calls writable takes this much.
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._most = 1 << 20 if is_file else select.PIPE_BUF

    def write(self, data: memoryview) -> int:
        if not self._poll.poll(0):
            return 0
        try:
            return os.write(self.descriptor, data[: self._most])
        except BlockingIOError:  # somebody has made it non-blocking
            return 0


class _NullSink:
    """Takes everything, as /dev/null does."""

    descriptor = -1  # never blocked

    def write(self, data: memoryview) -> int:
        return len(data)


class _BytesSink:
    """Writes to a binary stream in memory, below the text stream of a test or a capture."""

    descriptor = -1  # never blocked

    def __init__(self, stream: TextIO, buffer: BinaryIO) -> None:
        self._stream = stream
        self._buffer = buffer

    def write(self, data: memoryview) -> int:
        self._stream.flush()
        self._buffer.write(bytes(data))
        self._buffer.flush()
        return len(data)


class _TextSink:
    """Writes to a stream that takes text only, as in notebooks."""

    descriptor = -1  # never blocked

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: memoryview) -> int:
        self._stream.write(str(data, "utf-8", "replace"))
        self._stream.flush()
        return len(data)


def screens_for(stdout: TextIO | None, stderr: TextIO | None) -> tuple[Screen, Screen]:
    """Gives the screens of two streams: one and the same when both go to the same place."""
    for stream in (stdout, stderr):
        # What the launcher itself has printed comes first.
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    screen = Screen(stdout)
    same = stdout is stderr or (_place(stdout) is not None and _place(stdout) == _place(stderr))
    return screen, screen if same else Screen(stderr)


def describe_loss(error: Exception) -> str:
    """Tells why standard output is no longer written to."""
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return "the reader of standard output has gone"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"standard output cannot be written: {reason or error}"


def wants_colour(is_terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Decides on colour as Python itself does: NO_COLOR before FORCE_COLOR, before what the stream is."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def _sink_of(stream: TextIO | None) -> _Sink:
    if stream is None:
        return _NullSink()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        # A notebook's stream may have a descriptor, but that leads to the terminal of its server.
        return _TextSink(stream)
    descriptor = _descriptor_of(stream)
    return _BytesSink(stream, buffer) if descriptor is None else _DescriptorSink(descriptor)


def _descriptor_of(stream: TextIO | None) -> int | None:
    if stream is None:
        return None
    try:
        return stream.buffer.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def _place(stream: TextIO | None) -> tuple[int, int] | None:
    descriptor = _descriptor_of(stream)
    if descriptor is None:
        return None
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False

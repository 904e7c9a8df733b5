"""The output of the launcher and its ranks: lines on the launcher's own streams, with the rank before each line.

Each stream of the launcher has a thread that reads the ranks' pipes and writes to the stream. A blocked terminal blocks
this thread, and never the supervisor; ranks then wait in print(), as they would without a launcher. All output is
handled as bytes, so that bytes that are not valid text are written unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import re
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from gradsync.launching.signals import own_descriptors

if TYPE_CHECKING:
    from pathlib import Path

    from gradsync.launching.rank_logs import RankLog

#: How long the report of a failure waits for a blocked terminal, if the launcher has more to do after it.
REPORT_SECONDS = 1.0
_READ_BYTES = 64 * 1024
_TAIL_LINES = 20
# An incomplete line is shown if no more of it arrives for this long: it may be a question to the user.
_PARTIAL_LINE_SECONDS = 0.1
# The time that a thread needs to detect that its deadline has passed.
_JOIN_SECONDS = 0.1

_ERASE_LINE = b"\r\x1b[K"

# A line up to this length is written whole; a longer line is written in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 256 * 1024
_MAX_TAIL_LINE_BYTES = 4096

# Colours of terminals with 256 colours: at least 4:1 contrast on black and on white; neighbours differ in hue. There is
# no red, because readers expect it for failures.
RANK_COLOURS = (31, 130, 133, 64, 63, 162, 29, 97)

# The end of a line. An end that is followed by a lone \r does not match, because there is no text between the two.
_LINE_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?!\r(?!\n))")
_LONE_RETURNS = re.compile(rb"\r+(?!\n)")


class Notices:
    """Prints the launcher's notices; drops them without an error if the terminal is gone.

    Args:
        stream: the stream to print to; if it is None, nothing is printed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def print(self, text: str, *, wait_seconds: float = 0.0) -> None:
        """Writes lines; drops them if the stream is blocked for longer than `wait_seconds`."""
        with contextlib.suppress(OSError, ValueError):  # the stream has no reader
            if self._stream is not None and _takes_text(self._stream, wait_seconds):
                self.print_all(text)

    def print_all(self, text: str) -> None:
        """Writes lines that must not be lost, and waits for a blocked terminal as long as needed."""
        with contextlib.suppress(OSError, ValueError):  # the stream has no reader
            if self._stream is not None:
                self._stream.write(f"{text}\n")
                self._stream.flush()


def _takes_text(stream: TextIO, wait_seconds: float) -> bool:
    """Returns whether the stream accepts text without blocking; a stream without a descriptor never blocks."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(wait_seconds * 1000.0))


class OutputForwarder:
    """Writes the ranks' output to the launcher's streams, with a thread for each stream.

    Args:
        stdout: the stream to which the ranks' stdout is written. Python replaces a closed stream by None; then this
            output is dropped.
        stderr: the stream to which the ranks' stderr is written; if it is None, this output is dropped.
        prefix: whether each line begins with its rank; otherwise lines are written unchanged.
        log_dir: the folder for the ranks' log files, one for each rank; see `prepare_log_directory`.
        restart, ranks_elsewhere: see `prepare_log_directory`.

    Raises:
        InvalidArgument: log_dir cannot be made or written to.
    """

    def __init__(
        self,
        stdout: TextIO | None,
        stderr: TextIO | None,
        *,
        prefix: bool,
        log_dir: str | None = None,
        restart: int = 0,
        ranks_elsewhere: Container[int] = (),
    ) -> None:
        self._logs: Path | None = None
        self._restart = restart
        if log_dir is not None:
            from gradsync.launching.rank_logs import prepare_log_directory  # imported here to keep the start short

            self._logs = prepare_log_directory(log_dir, restart, ranks_elsewhere)
        first, last = _destinations_for(stdout, stderr)
        self._writers = [_Writer(destination, prefix, warnings=last) for destination in dict.fromkeys((first, last))]
        self._writers[0].prints_loss = True  # ranks see only that their pipe has no reader, not why
        self._tails: dict[int, Tail] = {}

    def add(self, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Adds the pipes of a rank's output; this object closes their read ends. Call this before `start`.

        Args:
            rank: the rank; add each rank only once.
            stdout_fd: the read end of the pipe for the rank's stdout.
            stderr_fd: the read end of the pipe for the rank's stderr.
        """
        log = None
        if self._logs is not None:
            from gradsync.launching.rank_logs import RankLog, log_name

            log = RankLog(self._logs / log_name(rank, self._restart), streams=2)
        tail = self._tails[rank] = Tail(_TAIL_LINES)
        for writer, descriptor in ((self._writers[0], stdout_fd), (self._writers[-1], stderr_fd)):
            writer.add(_RankStream(rank, descriptor, tail, log))

    def start(self) -> None:
        """Starts the threads."""
        for writer in self._writers:
            writer.start()

    def tail(self, rank: int) -> list[str]:
        """Returns the last lines that a rank has printed, as text."""
        return self._tails[rank].lines()

    def close(self, timeout_seconds: float) -> bool:
        """Writes all output that has arrived, and ends the threads.

        Args:
            timeout_seconds: how long to wait for a blocked terminal before the rest of the output is dropped.

        Returns:
            Whether the threads have ended. A thread that is blocked in a write ends when the write returns.
        """
        return self._end(time.monotonic() + timeout_seconds, timeout_seconds + _JOIN_SECONDS)

    def drain(self, wait_seconds: float) -> bool:
        """Writes all output that has arrived, and drops none of it: the reader may be slow. Call `close` afterwards.

        Args:
            wait_seconds: how long to wait until the threads have ended.

        Returns:
            Whether the threads have ended.
        """
        return self._end(math.inf, wait_seconds)

    def _end(self, deadline: float, wait_seconds: float) -> bool:
        for writer in self._writers:
            writer.end_by(deadline)
        until = time.monotonic() + wait_seconds
        for writer in self._writers:
            writer.join(max(0.0, until - time.monotonic()))
        return not any(writer.is_alive() for writer in self._writers)


class _RankStream:
    """One stream of one rank: the read end of its pipe, its log and its last lines."""

    def __init__(self, rank: int, descriptor: int, tail: Tail, log: RankLog | None) -> None:
        os.set_blocking(descriptor, False)
        own_descriptors.add(descriptor)
        self.rank = rank
        self.descriptor = descriptor
        self.tail = tail
        self.log = log
        self.lines = LineCutter()
        self.due: float | None = None  # when to show an incomplete line

    def read(self) -> bytes | None:
        """Returns the bytes that have arrived; b"" at the stream's end; None if there is nothing to read yet."""
        try:
            return os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # a pseudo-terminal reports its end in this way
            return b""

    def close(self) -> None:
        """Closes the read end of the pipe, so that the rank's next write fails."""
        own_descriptors.discard(self.descriptor)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        if self.log is not None:
            self.log.close()


class _Writer(threading.Thread):
    """A thread that reads the ranks' pipes and writes to one destination; only this thread waits if it is blocked.

    Attributes:
        prints_loss: whether to print the reason if nothing can be written to the destination any more.
    """

    def __init__(self, destination: Destination, prefix: bool, *, warnings: Destination) -> None:
        super().__init__(name="gradsync output", daemon=True)
        self._destination = destination
        self._has_prefix = prefix
        self._warnings = warnings
        self.prints_loss = False
        self._streams: list[_RankStream] = []  # the streams that have not ended
        self._label_width = 0
        # poll() takes any descriptor; epoll refuses files, and /dev/null.
        self._selector = selectors.PollSelector()
        self._lock = threading.Lock()  # protects the two attributes below
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_ended = False
        self._deadline: float | None = None  # None until the thread has to end
        own_descriptors.add(self._wake)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def add(self, stream: _RankStream) -> None:
        """Adds a stream; call it before the start."""
        self._streams.append(stream)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        self._label_width = max(self._label_width, len(_label(stream.rank)))

    def end_by(self, deadline: float) -> None:
        """Makes the thread end at the deadline, or earlier, once it has read all output that has arrived so far."""
        with self._lock:
            self._deadline = deadline
            if self.ident is None:
                self.start()
            if not self._has_ended:
                os.eventfd_write(self._wake, 1)  # never read, so that select returns at once from now on

    def run(self) -> None:
        """Writes lines until all streams have ended, or until the deadline."""
        for stream in self._streams:
            self._log(stream, b"")  # so that a rank that prints nothing has a log file too
        while (deadline := self._deadline) is None or (self._streams and time.monotonic() < deadline):
            ready = {key.fd: key.data for key, _ in self._selector.select(self._seconds_to_wait(deadline))}
            for stream in ready.values():
                if stream in self._streams:  # otherwise the destination was lost meanwhile
                    self._read(stream)
            for stream in list(self._streams):
                if stream.due is not None and stream.due <= time.monotonic():
                    stream.due = None
                    self._pass_on(stream, stream.lines.take_characters())
                elif deadline is not None and stream.descriptor not in ready:
                    self._end(stream)  # the stream has nothing more to read
        for stream in list(self._streams):  # a process that outlives the run holds it open, or the deadline has come
            self._forget(stream)
        self._selector.close()
        with self._lock:
            self._has_ended = True
            own_descriptors.discard(self._wake)
            os.close(self._wake)

    def _seconds_to_wait(self, deadline: float | None) -> float | None:
        if deadline is not None:
            return 0.0
        earliest = min((stream.due for stream in self._streams if stream.due is not None), default=None)
        return None if earliest is None else max(0.0, earliest - time.monotonic())

    def _read(self, stream: _RankStream) -> None:
        data = stream.read()
        if data is None:
            return
        if not data:
            self._end(stream)
            return
        stream.tail.feed(stream, data)
        complete = stream.lines.feed(data)
        stream.due = time.monotonic() + _PARTIAL_LINE_SECONDS if stream.lines.has_rest else None
        self._pass_on(stream, complete)

    def _pass_on(self, stream: _RankStream, data: bytes) -> None:
        """Writes lines to the rank's log and to the destination; closes all pipes if the destination takes no more."""
        if not data:
            return
        self._log(stream, data)
        self._destination.write(self._owner(stream), self._prefix(stream.rank), data)
        if self._destination.loss is not None:
            if self.prints_loss:
                self._warn(_describe_loss(self._destination.loss))
            for lost in list(self._streams):
                self._forget(lost)

    def _log(self, stream: _RankStream, data: bytes) -> None:
        problem = None if stream.log is None else stream.log.write(data)
        if problem is not None:
            self._warn(f"warning: {problem}")

    def _warn(self, text: str) -> None:
        self._warnings.write(self._warnings, b"", f"gradsync: {text}\n".encode("utf-8", "replace"))

    def _end(self, stream: _RankStream) -> None:
        """Writes the rest of a stream that has ended, and closes it."""
        self._pass_on(stream, stream.lines.take_rest())
        if stream in self._streams:  # otherwise the destination was lost just now
            self._forget(stream)
            is_last = not any(self._owner(other) == self._owner(stream) for other in self._streams)
            # Without prefixes, a file or a pipe gets exactly the bytes of the ranks.
            if is_last and (self._has_prefix or self._destination.is_terminal):
                self._destination.end_line(self._owner(stream))

    def _forget(self, stream: _RankStream) -> None:
        self._streams.remove(stream)
        self._selector.unregister(stream.descriptor)
        stream.close()

    def _owner(self, stream: _RankStream) -> object:
        # Without prefixes a rank's stdout may continue a line of its stderr, as it would without a launcher.
        return stream if self._has_prefix else stream.rank

    def _prefix(self, rank: int) -> bytes:
        """Returns the prefix of a rank's lines, padded to the width of the longest prefix."""
        if not self._has_prefix:
            return b""
        label = _label(rank)
        padding = b" " * (self._label_width - len(label) + 1)
        if not self._destination.colour:
            return label + padding
        return b"\x1b[38;5;%dm%s\x1b[0m%s" % (RANK_COLOURS[rank % len(RANK_COLOURS)], label, padding)


def _label(rank: int) -> bytes:
    return b"[rank %d]" % rank


class Destination:
    """One output of the launcher: a terminal, pipe or file, or a text stream without a descriptor.

    Args:
        stream: the stream to write to. Python replaces a closed stream by None; then the output is dropped.

    Attributes:
        loss: the error after which nothing can be written any more, or None.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._write = _write_to(stream)
        self._lock = threading.Lock()  # the thread of stdout also writes to stderr, to say why it has ended
        self._owner: object = None  # the owner of the last bytes
        self._last_byte = b"\n"  # the last byte of this owner
        self._bars: set[object] = set()  # owners whose incomplete line is a progress bar
        self.is_terminal = _is_terminal(stream)
        self.colour = wants_colour(self.is_terminal)
        self.loss: Exception | None = None
        self._can_erase = self.is_terminal and os.environ.get("TERM") != "dumb"

    def write(self, owner: object, prefix: bytes, data: bytes) -> None:
        """Writes lines, or a part of a line; waits for a blocked terminal as long as needed.

        Args:
            owner: the rank, or the stream of a rank, that printed the lines. Only the owner of an incomplete line
                continues it; other lines begin on a new line.
            prefix: the beginning of each line.
            data: at least one byte.
        """
        with self._lock:
            continues = owner is self._owner and self._last_byte not in b"\r\n"
            lines = begin_lines_with(prefix, data, is_inside_line=continues)
            if self.loss is not None or not lines:
                return
            if owner is not self._owner:
                lines = self._break_before(data) + lines
            self._owner, self._last_byte = owner, data[-1:]
            self._note_bar(owner, data)
            self._put(lines)

    def end_line(self, owner: object) -> None:
        """Ends the incomplete line of this owner, unless another owner has written after it."""
        with self._lock:
            if owner is self._owner and self._last_byte != b"\n" and self.loss is None:
                self._last_byte = b"\n"
                self._put(b"\n")
            self._bars.discard(owner)

    def _put(self, data: bytes) -> None:
        try:
            self._write(data)
        except Exception as error:  # e.g. no reader, or a full disk; a stream of the caller may raise any error
            self.loss = error

    def _break_before(self, data: bytes) -> bytes:
        """Returns the bytes that end another owner's incomplete line, or erase it; b"" if they are not needed."""
        if self._last_byte == b"\n":
            return b""
        if self._can_erase and self._owner in self._bars:
            return _ERASE_LINE  # the next state of the bar follows soon, and a line for each would fill the terminal
        # Progress bars may overwrite each other, as without a launcher; otherwise each state would take a line.
        is_bar_after_bar = self._last_byte == b"\r" and data.endswith(b"\r") and b"\n" not in data
        return b"" if is_bar_after_bar else b"\n"

    def _note_bar(self, owner: object, data: bytes) -> None:
        r"""Records whether the owner's incomplete line is a progress bar: whether a \r has overwritten the line."""
        _, newline, open_line = data.rpartition(b"\n")
        if b"\r" in open_line:
            self._bars.add(owner)
        elif newline:
            self._bars.discard(owner)


def _write_to(stream: TextIO | None) -> Callable[[bytes], Any]:
    """Returns a function that writes all bytes to a stream, and waits as long as needed."""
    if stream is None:
        return len
    if getattr(stream, "buffer", None) is None:
        # A notebook's text stream may have a descriptor, but it belongs to the notebook server's terminal.
        return functools.partial(_write_text, stream)
    descriptor = _descriptor_of(stream)
    return functools.partial(_write_buffer, stream) if descriptor < 0 else functools.partial(_write_all, descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    # This bypasses Python's buffer: a thread that is blocked in a buffered write makes the interpreter abort at exit.
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process has made the descriptor non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def _write_buffer(stream: TextIO, data: bytes) -> None:
    stream.flush()
    stream.buffer.write(data)
    stream.buffer.flush()


def _write_text(stream: TextIO, data: bytes) -> None:
    stream.write(data.decode("utf-8", "replace"))
    stream.flush()


def _destinations_for(stdout: TextIO | None, stderr: TextIO | None) -> tuple[Destination, Destination]:
    """Returns a destination for stdout and one for stderr; the same one twice if both streams go to the same file."""
    for stream in (stdout, stderr):
        # First write the launcher's own buffered output.
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    destination = Destination(stdout)
    same = stdout is stderr or (_file_of(stdout) is not None and _file_of(stdout) == _file_of(stderr))
    return destination, destination if same else Destination(stderr)


def _describe_loss(error: Exception) -> str:
    """Returns the reason, in words, why nothing more can be written to standard output."""
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return "the reader of standard output has gone"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"standard output cannot be written: {reason or error}"


def wants_colour(is_terminal: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether to use colour, by Python's rule: NO_COLOR first, then FORCE_COLOR, then the terminal."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def _descriptor_of(stream: TextIO | None) -> int:
    """Returns a stream's descriptor, or -1 if it has none."""
    try:
        return -1 if stream is None else stream.buffer.fileno()
    except (AttributeError, OSError, ValueError):
        return -1


def _file_of(stream: TextIO | None) -> tuple[int, int] | None:
    """Returns the device and inode of a stream's file, which identify the file; None without a descriptor."""
    descriptor = _descriptor_of(stream)
    if descriptor < 0:
        return None
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


class LineCutter:
    r"""Splits the data of one stream into lines. A line ends with \n, \r\n, or the \r of a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def has_rest(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        r"""Adds a chunk of data; returns the lines that are now complete, or the beginning of a line that is too long.

        A \r at the very end of a chunk is kept for the next chunk, because it may be half of \r\n. A \r at the
        beginning of a line is kept as a part of this line: the program overwrites its progress bar with this line.
        """
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if end == 0 and not (data and self._rest.endswith(b"\r")):
            self._rest += data
            return self.take_characters() if len(self._rest) > MAX_LINE_BYTES else b""
        lines, self._rest = self._rest + data[:end], data[end:]
        if lines == b"\r":
            lines, self._rest = b"", lines + self._rest
        return lines

    def take_characters(self) -> bytes:
        """Removes and returns the incomplete line; the bytes of an incomplete UTF-8 character at its end stay."""
        end = _end_of_characters(self._rest)
        piece, self._rest = self._rest[:end], self._rest[end:]
        return piece

    def take_rest(self) -> bytes:
        """Removes and returns the incomplete line. Call this when the stream has ended."""
        piece, self._rest = self._rest, b""
        return piece


class Tail:
    """The last lines that a rank printed, on both streams in order of arrival. Any thread may use this object.

    Args:
        size: the number of lines to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lines: deque[bytes] = deque(maxlen=size)
        self._open: dict[object, bytes] = {}  # the incomplete line of each stream
        self._lock = threading.Lock()

    def feed(self, stream: object, data: bytes) -> None:
        """Adds a chunk of a stream's data."""
        parts = data.rsplit(b"\n", self._size + 1)  # only a few: a rank may print a million lines a second
        with self._lock:
            parts[0] = self._open.pop(stream, b"") + parts[0]
            self._lines.extend(_last_state(line) for line in parts[:-1])
            if parts[-1]:
                self._open[stream] = parts[-1][-_MAX_TAIL_LINE_BYTES:]

    def lines(self) -> list[str]:
        """Returns the last lines as text, including incomplete lines."""
        with self._lock:
            lines = [*self._lines, *(_last_state(line) for line in self._open.values())]
        return [line.decode("utf-8", "replace") for line in lines[-self._size :]] if self._size else []


def begin_lines_with(prefix: bytes, data: bytes, *, is_inside_line: bool = False) -> bytes:
    r"""Puts the prefix before every line of the data.

    A \r at the beginning of a line does not end a line. A \r at the very beginning of the data is left out, because the
    cursor is already at the beginning of a line.

    Args:
        prefix: the prefix; if it is empty, the data is returned unchanged.
        data: whole lines, or a part of a line.
        is_inside_line: whether the data continues a line that already has its prefix.
    """
    if not prefix:
        return data
    if not is_inside_line and (returns := _LONE_RETURNS.match(data)):
        data = data[returns.end() :]
    if b"\r" in data:
        prefixed = _LINE_END.sub(lambda end: end[0] + prefix, data)
    else:
        prefixed = data.replace(b"\n", b"\n" + prefix)
    if data.endswith((b"\n", b"\r")):
        prefixed = prefixed[: -len(prefix)]
    return prefix + prefixed if data and not is_inside_line else prefixed


def _last_state(line: bytes) -> bytes:
    """Returns the last state of a line that a progress bar has overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][-_MAX_TAIL_LINE_BYTES:]


def _end_of_characters(data: bytes) -> int:
    """Returns the length of the data without an unfinished UTF-8 character at its end."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte >= 0xC0:  # the first byte of a character
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - length if needed > length else len(data)
        if byte < 0x80:
            break
    return len(data)

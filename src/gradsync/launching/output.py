"""What the launcher and its ranks print: line by line onto the launcher's own streams, with the rank before each line.

Ranks' lines come through pipes and a thread of its own, so that a terminal that stands still never keeps the supervisor
from its work. Ranks whose terminal stands still wait in their print(), as they would without us. Everything is bytes:
what a rank prints need not be text, and passes unharmed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import selectors
import stat
import threading
import time
from collections import deque
from collections.abc import Container, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from gradsync.errors import InvalidArgument
from gradsync.launching.rank_logs import RankLog, prepare_log_directory
from gradsync.launching.signals import own_descriptors

_TAIL_LINES = 20
# A line that has not ended is shown when nothing more of it comes for this long: it may be a question.
_PARTIAL_LINE_SECONDS = 0.1
# For the thread to notice that its time is up.
_JOIN_SECONDS = 0.1

_READ_BYTES = 64 * 1024

_ERASE_LINE = b"\r\x1b[K"

# A line up to this long stays whole; what is longer passes in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 256 * 1024
_MAX_TAIL_LINE_BYTES = 4096

# Of the 256 colours of terminals, those with at least 4:1 contrast on black and on white; neighbours differ in hue.
# No red: it looks like a failure.
RANK_COLOURS = (31, 130, 133, 64, 63, 162, 29, 97)

# Not one that a lone \r follows: between them there is no line.
_LINE_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?!\r(?!\n))")
_LONE_RETURNS = re.compile(rb"\r+(?!\n)")


class Notices:
    """Tells a person what the launcher does; never waits for a terminal that stands still, nor fails without one.

    Args:
        stream: where it is told; None tells nobody.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def tell(self, text: str, *, wait_seconds: float = 0.0) -> None:
        """Writes lines, where they are taken in time."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                if _takes_text(self._stream, wait_seconds):
                    self._stream.write(f"{text}\n")
                    self._stream.flush()

    def insist(self, text: str) -> None:
        """Writes lines, for as long as it takes: what must not be lost."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                self._stream.write(f"{text}\n")
                self._stream.flush()


def _takes_text(stream: TextIO, wait_seconds: float) -> bool:
    """Whether a write would not wait; a stream without a descriptor never does."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(wait_seconds * 1000.0))


class OutputPump:
    """Passes the output of ranks on, in a thread.

    Args:
        stdout: where what ranks print on stdout goes; None, as Python has it for a closed one: nowhere.
        stderr: the same for stderr.
        prefix: whether each line begins with its rank; without, bytes pass as they are, in whole lines.
        log_dir: where to keep a log file `rank-N.log` for each rank, see `prepare_log_directory`.
        attempt, ranks_elsewhere: see `prepare_log_directory`.

    Raises:
        InvalidArgument: log_dir cannot be made or written to.
    """

    def __init__(
        self,
        stdout: TextIO | None,
        stderr: TextIO | None,
        *,
        prefix: bool,
        log_dir: Path | None = None,
        attempt: int | None = None,
        ranks_elsewhere: Container[int] = (),
    ) -> None:
        self._log_dir = None if log_dir is None else prepare_log_directory(log_dir, attempt, ranks_elsewhere)
        self._stdout, self._stderr = screens_for(stdout, stderr)
        self._has_prefix = prefix
        self._column = PrefixColumn()
        self._streams: list[RankStream] = []  # those that have not ended
        self._blocked: set[Screen] = set()
        self._told: set[str] = set()  # kinds of trouble
        # poll() takes any descriptor; epoll refuses files, and /dev/null.
        self._selector = selectors.PollSelector()
        self._thread = threading.Thread(target=self._run, name="gradsync output", daemon=True)
        # The lock guards what other threads touch.
        self._lock = threading.Lock()
        self._ranks: dict[int, RankOutput] = {}
        self._added: list[RankOutput] = []
        self._deadline: float | None = None  # set by close() and drain()
        self._released = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        own_descriptors.add(self._wake)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Takes over the read ends of a rank's output, and closes them in the end. From any thread.

        Args:
            rank: the rank; each may come once.
            stdout_fd: read end of its stdout.
            stderr_fd: read end of its stderr.

        Raises:
            InvalidArgument: the rank was added before, or the pump is closed; the descriptors stay the caller's.
        """
        with self._lock:
            if self._deadline is not None:
                raise InvalidArgument(f"output of rank {rank}: this pump is closed; add ranks before close()")
            if rank in self._ranks:
                raise InvalidArgument(f"output of rank {rank} was added before; a restarted run needs a new pump")
            log = None if self._log_dir is None else RankLog(self._log_dir / f"rank-{rank}.log")
            entry = self._ranks[rank] = RankOutput(rank, Tail(_TAIL_LINES), log)
            entry.open_stream(stdout_fd, self._stdout)
            entry.open_stream(stderr_fd, self._stderr)
            self._column.add(rank)
            self._added.append(entry)
            os.eventfd_write(self._wake, 1)

    def tail(self, rank: int) -> list[str]:
        """Returns the last lines of a rank, both streams in order of arrival; none for one that was never added."""
        with self._lock:
            entry = self._ranks.get(rank)
        return [] if entry is None else entry.tail.lines()

    def close(self, timeout_seconds: float) -> bool:
        """Passes on what the ranks have printed until now, and ends the thread.

        Args:
            timeout_seconds: how long to wait for a terminal that stands still; then the rest is dropped.

        Returns:
            Whether the thread has ended. One inside a write to a terminal that stands still ends with that.
        """
        self._begin_closing(time.monotonic() + timeout_seconds)
        self._thread.join(timeout_seconds + _JOIN_SECONDS)
        return not self._thread.is_alive()

    def drain(self, wait_seconds: float) -> bool:
        """Like `close`, but drops nothing: a reader may be slow. To be repeated, or ended with `close`."""
        self._begin_closing(math.inf)
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()

    def _begin_closing(self, deadline: float) -> None:
        with self._lock:
            self._deadline = deadline
            if self._thread.ident is None:
                self._thread.start()
            if not self._released:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while True:
            deadline = self._deadline
            self._admit()
            if deadline is not None and (self._all_done() or time.monotonic() >= deadline):
                break
            flowing = [stream for stream in self._streams if stream.screen not in self._blocked]
            ready = self._selector.select(seconds_to_wait(flowing, deadline))
            for key, _ in ready:
                if isinstance(key.data, RankStream):
                    self._read(key.data)
                elif isinstance(key.data, Screen):
                    self._drain(key.data)
                else:
                    os.eventfd_read(self._wake)
            self._show_partial_lines()
            if deadline is not None:
                self._end_quiet(flowing, {key.fd for key, _ in ready})
        self._release()

    def _admit(self) -> None:
        """Begins to read what add() has handed over."""
        with self._lock:
            added, self._added = self._added, []
        for rank in added:
            self._streams += rank.streams
            if rank.log is not None:
                self._warn(rank.log.write(b""))  # a rank that prints nothing has a log file too
            for stream in rank.streams:
                if stream.screen.gone:
                    self._end(stream)
                elif stream.screen not in self._blocked:
                    self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def _all_done(self) -> bool:
        return not self._streams and not self._blocked

    def _read(self, stream: RankStream) -> None:
        # In this round another rank may have blocked the screen, or found that its reader has gone.
        if stream.screen in self._blocked or stream.screen.gone:
            return
        data = stream.read()
        if data is None:
            return
        if not data:
            self._end(stream)
            return
        stream.rank.tail.feed(stream, data)
        complete = stream.lines.feed(data)
        stream.due = time.monotonic() + _PARTIAL_LINE_SECONDS if stream.lines.has_rest else None
        self._pass_on(stream, complete)

    def _show_partial_lines(self) -> None:
        now = time.monotonic()
        for stream in list(self._streams):
            if stream.due is not None and stream.due <= now and stream.screen not in self._blocked:
                stream.due = None
                self._pass_on(stream, stream.lines.take_characters())

    def _pass_on(self, stream: RankStream, data: bytes) -> None:
        """Writes lines to the rank's log and to the screen."""
        if not data:
            return
        if stream.rank.log is not None:
            self._warn(stream.rank.log.write(data))
        prefix = self._column.prefix(stream.rank.rank, stream.screen.colour) if self._has_prefix else b""
        stream.screen.write(self._owner(stream), prefix, data)
        self._drain(stream.screen)

    def _owner(self, stream: RankStream) -> object:
        # Without prefixes a rank's stdout may continue what its stderr has begun, as it would without us.
        return stream if self._has_prefix else stream.rank

    def _warn(self, problem: str | None) -> None:
        """Tells the first problem with a log: the others will be the same."""
        if problem is not None:
            self._tell_once("log", f"warning: {problem}")

    def _tell_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._stderr.write(self, b"", f"gradsync: {text}\n".encode("utf-8", "replace"))
            self._drain(self._stderr)

    def _drain(self, screen: Screen) -> None:
        """Writes on; stops reading the screen's ranks while it cannot take more, and for good when it has gone."""
        screen.drain()
        mine = [stream for stream in self._streams if stream.screen is screen]
        if screen.blocked and screen not in self._blocked:
            self._blocked.add(screen)
            self._selector.register(screen.descriptor, selectors.EVENT_WRITE, screen)
            for stream in mine:
                self._selector.unregister(stream.descriptor)
        elif not screen.blocked and screen in self._blocked:
            self._blocked.discard(screen)
            self._selector.unregister(screen.descriptor)
            for stream in mine:
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        if screen.loss is not None:
            if screen is self._stdout:  # its ranks only see a pipe that nobody reads
                self._tell_once("loss", describe_loss(screen.loss))
            for stream in mine:
                self._end(stream)

    def _end_quiet(self, flowing: list[RankStream], ready: set[int]) -> None:
        """While closing: ends the streams that were asked and have nothing more now."""
        for stream in flowing:
            if stream.descriptor not in ready:
                self._end(stream)

    def _end(self, stream: RankStream) -> None:
        """Ends a stream: it has come to its end, or nobody can see it any more."""
        if stream not in self._streams:
            return
        self._forget(stream)
        self._pass_on(stream, stream.lines.take_rest())
        rank = stream.rank
        if not any(other.rank is rank for other in self._streams):
            self._end_rank(rank)

    def _end_rank(self, rank: RankOutput) -> None:
        for stream in rank.streams:
            # Without prefixes bytes for a file or a pipe pass as they are.
            if self._has_prefix or stream.screen.is_terminal:
                stream.screen.end_line(self._owner(stream))
                self._drain(stream.screen)
        rank.end()

    def _forget(self, stream: RankStream) -> None:
        self._streams.remove(stream)
        with contextlib.suppress(KeyError):  # its screen is blocked
            self._selector.unregister(stream.descriptor)
        stream.close()

    def _release(self) -> None:
        """Lets go of everything; what is left unread belongs to processes that outlive the run, or is dropped."""
        for stream in list(self._streams):
            self._forget(stream)
        for rank in self._ranks.values():
            rank.end()
        self._selector.close()
        with self._lock:
            self._released = True
            own_descriptors.discard(self._wake)
            os.close(self._wake)


class RankOutput:
    """What is known of one rank's output.

    Args:
        rank: the rank.
        tail: keeps its last lines.
        log: keeps everything, on request.
    """

    def __init__(self, rank: int, tail: Tail, log: RankLog | None) -> None:
        self.rank = rank
        self.tail = tail
        self.log = log
        self.streams: list[RankStream] = []

    def open_stream(self, descriptor: int, screen: Screen) -> None:
        """Takes over the read end of the next of its streams."""
        os.set_blocking(descriptor, False)
        own_descriptors.add(descriptor)
        self.streams.append(RankStream(self, descriptor, screen))

    def end(self) -> None:
        """Notes that nothing more comes."""
        if self.log is not None:
            self.log.close()


class RankStream:
    """One stream of one rank.

    Attributes:
        lines: cuts what comes into lines.
        due: when to show a line that has not ended.
    """

    def __init__(self, rank: RankOutput, descriptor: int, screen: Screen) -> None:
        self.rank = rank
        self.descriptor = descriptor
        self.screen = screen
        self.lines = LineCutter()
        self.due: float | None = None

    def read(self) -> bytes | None:
        """Returns what has come; nothing at the stream's end, None when it was a false alarm."""
        try:
            return os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # a pseudo-terminal says the end so
            return b""

    def close(self) -> None:
        """Closes the read end: the rank's next write fails, as it would if it wrote to the screen itself."""
        own_descriptors.discard(self.descriptor)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def seconds_to_wait(flowing: list[RankStream], deadline: float | None) -> float | None:
    """Gives how long nothing is to be done when nothing comes."""
    if deadline is not None and flowing:
        return 0.0
    times = [stream.due for stream in flowing if stream.due is not None]
    if deadline is not None:
        times.append(deadline)
    earliest = min(times, default=math.inf)
    return None if earliest == math.inf else max(0.0, earliest - time.monotonic())


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


class LineCutter:
    r"""Cuts the chunks of one stream at the ends of lines: \n, \r\n, and \r as progress bars use it."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def has_rest(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        r"""Takes a chunk; returns what is complete with it: whole lines, or a piece of one that is too long.

        A \r at the very end waits for what follows: it may be half of \r\n. So does one at the beginning: it is not the
        end of a line but goes with the state of a progress bar that follows.
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
        """Returns the line so far, without a UTF-8 character that is cut in two at its end."""
        end = _end_of_characters(self._rest)
        piece, self._rest = self._rest[:end], self._rest[end:]
        return piece

    def take_rest(self) -> bytes:
        """Returns what is left at the stream's end."""
        piece, self._rest = self._rest, b""
        return piece


class Tail:
    """The last lines that a rank printed, on both streams in order of arrival. May be read from any thread.

    Args:
        size: number of lines to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lines: deque[bytes] = deque(maxlen=size)
        self._open: dict[object, bytes] = {}  # by stream: a line that has not ended yet
        self._lock = threading.Lock()

    def feed(self, stream: object, data: bytes) -> None:
        """Takes a chunk that came on a stream."""
        parts = data.rsplit(b"\n", self._size + 1)  # never all of its lines: a rank may print a million a second
        with self._lock:
            parts[0] = self._open.pop(stream, b"") + parts[0]
            self._lines.extend(_last_state(line) for line in parts[:-1])
            if parts[-1]:
                self._open[stream] = parts[-1][-_MAX_TAIL_LINE_BYTES:]

    def lines(self) -> list[str]:
        """Returns the last lines as text, with those that have not ended."""
        with self._lock:
            lines = [*self._lines, *(_last_state(line) for line in self._open.values())]
        return [line.decode("utf-8", "replace") for line in lines[-self._size :]] if self._size else []


class PrefixColumn:
    """The column at the left that says which rank printed a line: `[rank 0] `, all as wide as the widest."""

    def __init__(self) -> None:
        self._labels: dict[int, bytes] = {}
        self._width = 0

    def add(self, rank: int) -> None:
        """Makes room for a rank."""
        self._labels[rank] = b"[rank %d]" % rank
        self._width = max(map(len, self._labels.values()))

    def prefix(self, rank: int, colour: bool) -> bytes:
        """Gives the prefix of a rank's lines."""
        label = self._labels[rank]
        padding = b" " * (self._width - len(label) + 1)
        if not colour:
            return label + padding
        number = RANK_COLOURS[rank % len(RANK_COLOURS)]
        return b"\x1b[38;5;%dm%s\x1b[0m%s" % (number, label, padding)


def begin_lines_with(prefix: bytes, data: bytes, *, is_inside_line: bool = False) -> bytes:
    r"""Puts the prefix before every line of the data.

    A \r with nothing before it is no line, and at the very beginning it is left out: it moves the cursor nowhere.

    Args:
        prefix: the prefix; where it is empty, the data passes as it is.
        data: whole lines, or a part of one.
        is_inside_line: whether the data goes on with a line that has its prefix.
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
    """Gives what a terminal would show of a line that a progress bar has overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][-_MAX_TAIL_LINE_BYTES:]


def _end_of_characters(data: bytes) -> int:
    """Gives the length of the data without an unfinished UTF-8 character at its end."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte >= 0xC0:  # the first byte of a character
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - length if needed > length else len(data)
        if byte < 0x80:
            break
    return len(data)

"""Writes the output of the launcher and its ranks to the launcher's own streams.

If the launcher shows prefixes, each line of a rank begins with the rank.

A thread reads the ranks' pipes and writes to a stream of the launcher; streams to the same terminal or file share one
thread. A blocked terminal blocks this thread, and not the supervisor's loop; ranks then wait in print(), as without a
launcher. The thread reads and writes bytes, so that bytes that are not valid text stay unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import selectors
import threading
import time
import weakref
from collections.abc import Container
from typing import TextIO

from gradsync.errors import InvalidArgument

#: How long the report of a failure waits for a blocked terminal, if the launcher has more to do after the report.
REPORT_SECONDS = 1.0
_READ_BYTES = 64 * 1024
_TAIL_BYTES = 16 * 1024
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # the bytes of UTF-8 that begin no character
# After this time the launcher shows an incomplete line, because this line may be a question to the user.
_PARTIAL_LINE_SECONDS = 0.1
# After a state of a progress bar, the launcher shows no other state for this time: tqdm draws ten states a second.
_BAR_SECONDS = 1.0

# The launcher writes a line up to this length whole, and a longer line in pieces, so that memory stays bounded.
_MAX_LINE_BYTES = 256 * 1024

# The states of a line that a later state has overwritten.
_OVERWRITTEN = re.compile(rb"^[^\n]*\r(?![\r\n])", re.MULTILINE)
_CONTROL_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_LOG_NAME = re.compile(r"rank-(\d+)(?:\.restart-\d+)?\.log", re.ASCII)


class Notices:
    """Prints the launcher's notices; drops the notices without an error if the terminal is gone.

    Args:
        stream: the stream to print to; None prints nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def print(self, text: str, *, wait_seconds: float | None = 0.0) -> None:
        """Writes lines.

        Args:
            text: the lines.
            wait_seconds: how long to wait for a blocked terminal before print() drops the lines; None means no limit.
        """
        with contextlib.suppress(OSError, ValueError):  # the stream has no reader
            if self._stream is not None and (wait_seconds is None or _takes_text(self._stream, wait_seconds)):
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
        stdout: the stream that gets the ranks' stdout. None (Python's value for a closed stream) drops this output.
        stderr: the stream that gets the ranks' stderr; None drops this output.
        prefix: whether each line begins with its rank; if False, lines stay unchanged.
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
        self._log_dir = log_dir
        self._restart = restart
        if log_dir is not None:
            prepare_log_directory(log_dir, restart, ranks_elsewhere)
        out, err = (_descriptor_of(stream) for stream in (stdout, stderr))
        # Streams that lead to the same terminal or file share a thread, so that their lines do not mix.
        descriptors = (out,) if out == err or (out >= 0 and err >= 0 and _is_same_file(out, err)) else (out, err)
        # Of standard output the loss is told: ranks see only that their pipe has no reader, not why.
        self._writers = [
            _Writer(descriptor, prefix, warnings=err, tells_loss=descriptor == out) for descriptor in descriptors
        ]
        self._ranks: dict[int, RankOutput] = {}

    def add(self, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Adds the pipes of a rank's output; this object closes their read ends. Call this method before `start`.

        Args:
            rank: the rank; add each rank only once.
            stdout_fd: the read end of the pipe for the rank's stdout.
            stderr_fd: the read end of the pipe for the rank's stderr.
        """
        log = None if self._log_dir is None else os.path.join(self._log_dir, log_name(rank, self._restart))
        output = self._ranks[rank] = RankOutput(log)
        for writer, descriptor in ((self._writers[0], stdout_fd), (self._writers[-1], stderr_fd)):
            writer.add(_RankStream(rank, descriptor, output))

    def start(self) -> None:
        """Starts the threads."""
        for writer in self._writers:
            writer.start()

    def tail(self, rank: int) -> list[str]:
        """Returns the last lines that a rank has printed, as text."""
        return self._ranks[rank].last_lines()

    def finish(self, wait_seconds: float) -> bool:
        """Writes all output that has arrived, and ends the threads. Call this method again to wait for longer.

        Args:
            wait_seconds: how long to wait for a blocked terminal or a slow reader.

        Returns:
            Whether the threads have ended. If not, the threads continue until the program ends.
        """
        for writer in self._writers:
            writer.end()
        deadline = time.monotonic() + wait_seconds
        return all(writer.has_ended(max(0.0, deadline - time.monotonic())) for writer in self._writers)


class RankOutput:
    """The last output of a rank on both of its streams, and its log file. Any thread may use this object.

    Args:
        log: the path of the log file, if the user wants one. The file gets the bytes of both streams, in order of
            arrival.
    """

    def __init__(self, log: str | None) -> None:
        self._lock = threading.Lock()
        self._tail = b""
        self._path = log
        self._log = -1
        self._problem: str | None = None
        if log is not None:
            try:
                self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                weakref.finalize(self, os.close, self._log)
            except OSError as error:  # the run does not need the log
                self._problem = self._describe(error)

    def add(self, data: bytes) -> str | None:
        """Adds a chunk of output. Returns the text of the log's first error, or None; after an error the log ends."""
        with self._lock:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            problem, self._problem = self._problem, None
            try:
                if self._log >= 0:
                    _write_all(self._log, data)
            except OSError as error:
                self._log = -1
                problem = self._describe(error)
            return problem

    def _describe(self, error: OSError) -> str:
        return f"log file {self._path} cannot be written: {error.strerror}; it is incomplete from here on"

    def last_lines(self) -> list[str]:
        """Returns the last lines as text, each as a terminal shows it."""
        with self._lock:
            tail = self._tail
        if len(tail) == _TAIL_BYTES:
            # The tail begins within a line: drops this line, or only a broken character if there is no other line.
            first, _, rest = tail.partition(b"\n")
            tail = rest or first.lstrip(_CONTINUATION_BYTES)
        lines = tail.replace(b"\r\n", b"\n").decode("utf-8", "replace").split("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in (lines if lines[-1] else lines[:-1])]


class _RankStream:
    """One stream of one rank: the read end of its pipe, and its incomplete line."""

    def __init__(self, rank: int, descriptor: int, output: RankOutput) -> None:
        os.set_blocking(descriptor, False)
        self.rank = rank
        self.descriptor = descriptor
        self.output = output
        self.rest = b""  # the part of the incomplete line that is not shown yet, or that may still change
        self.due: float | None = None  # when to show an incomplete line
        self.shown_state: bytes | None = None  # of the incomplete line
        self.next_state_at = 0.0


class _Writer(threading.Thread):
    r"""A thread that copies the ranks' pipes to one destination; a blocked destination blocks only this thread.

    With prefixes, the thread writes the states of a progress bar, which a program overwrites with \r, as lines: the
    last state, and before it at most one state a second.

    Args:
        descriptor: the descriptor to write to; -1 drops the output.
        prefix: whether each line begins with its rank.
        warnings: the descriptor that gets the warnings; -1 drops the warnings.
        tells_loss: whether to print the reason if nothing can be written to the destination any more.
    """

    def __init__(self, descriptor: int, prefix: bool, *, warnings: int, tells_loss: bool) -> None:
        super().__init__(name="gradsync output", daemon=True)
        self._descriptor = descriptor
        self._has_prefix = prefix
        self._warnings = warnings
        self._is_terminal = descriptor >= 0 and os.isatty(descriptor)
        self._tells_loss = tells_loss
        self._streams: list[_RankStream] = []  # the streams that have not ended
        self._label_width = 0
        self._open: object = None  # the rank, or the stream of a rank, whose incomplete line is the last output
        # poll() takes any descriptor; epoll refuses files, and /dev/null.
        self._selector = selectors.PollSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_ending = False
        self._selector.register(self._wake, selectors.EVENT_READ)

    def add(self, stream: _RankStream) -> None:
        """Adds a stream; call this method before the thread starts."""
        self._streams.append(stream)
        self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        self._label_width = max(self._label_width, len(_label(stream.rank)))

    def end(self) -> None:
        """Makes the thread end, once it has read all output that has arrived so far."""
        self._is_ending = True
        if self.ident is None:
            self.start()
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)  # never read, so that select returns at once from now on

    def has_ended(self, wait_seconds: float) -> bool:
        """Waits for the end of the thread; returns whether it has ended."""
        self.join(wait_seconds)
        if not self.is_alive() and self._wake >= 0:
            self._selector.close()
            os.close(self._wake)
            self._wake = -1
        return not self.is_alive()

    def run(self) -> None:
        """Writes lines until all streams have ended; after `end`, a stream ends when it has nothing more to read."""
        while self._streams:
            is_ending = self._is_ending
            ready = {key.fd: key.data for key, _ in self._selector.select(self._seconds_to_wait(is_ending))}
            for stream in ready.values():
                if stream in self._streams:  # otherwise the destination was lost meanwhile
                    self._read(stream)
            for stream in list(self._streams):
                if stream.due is not None and stream.due <= time.monotonic():
                    self._show_rest(stream)
                elif is_ending and stream.descriptor not in ready:
                    self._end(stream)  # a process that outlives the run may hold the pipe open

    def _seconds_to_wait(self, is_ending: bool) -> float | None:
        if is_ending:
            return 0.0
        earliest = min((stream.due for stream in self._streams if stream.due is not None), default=None)
        return None if earliest is None else max(0.0, earliest - time.monotonic())

    def _read(self, stream: _RankStream) -> None:
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(stream)
            return
        problem = stream.output.add(data)
        if problem is not None:
            self._warn(f"warning: {problem}")
        end = data.rfind(b"\n") + 1
        if end:
            self._write_lines(stream, stream.rest + data[:end])
            stream.rest, stream.due = b"", None
        stream.rest += data[end:]
        if len(stream.rest) > _MAX_LINE_BYTES:
            self._show_rest(stream)
        elif stream.rest and stream.due is None:
            stream.due = time.monotonic() + _PARTIAL_LINE_SECONDS
            if self._has_prefix and b"\r" in stream.rest:
                stream.due = max(stream.due, stream.next_state_at)

    def _show_rest(self, stream: _RankStream) -> None:
        """Writes an incomplete line: a state of a progress bar, a question to the user, or a part of a long line."""
        rest, stream.rest, stream.due = stream.rest, b"", None
        if not self._has_prefix or b"\r" not in rest or len(rest) > _MAX_LINE_BYTES:
            self._write(stream, rest)
            return
        state = _last_state(rest)
        if not state:
            stream.rest = b"\r"
            return
        # The program may continue this state, or overwrite it.
        stream.rest = b"\r" + state + b"\r" * rest.endswith(b"\r")
        if state != stream.shown_state:
            stream.shown_state, stream.next_state_at = state, time.monotonic() + _BAR_SECONDS
            self._begin_line()
            self._write(stream, state + b"\n")

    def _write_lines(self, stream: _RankStream, data: bytes) -> None:
        """Writes whole lines; with prefixes, of each line only its last state, unless it is shown already."""
        if self._has_prefix and b"\r" in data:
            if _OVERWRITTEN.match(data):
                self._begin_line()
                data = _OVERWRITTEN.sub(b"", data)
            first, _, others = data.partition(b"\n")
            if first.rstrip(b"\r") == stream.shown_state:
                data = others
        stream.shown_state = None
        if data:
            self._write(stream, data)

    def _begin_line(self) -> None:
        if self._open is not None:
            self._open = None
            self._put(b"\n")

    def _write(self, stream: _RankStream, data: bytes) -> None:
        """Writes whole lines, or the beginning of a line."""
        # Without prefixes a rank's stdout may continue a line of its stderr, as without a launcher.
        owner = stream if self._has_prefix else stream.rank
        if self._open is not owner:
            self._begin_line()
        if self._has_prefix:
            prefix = self._prefix(stream.rank)
            begin = b"" if self._open is owner else prefix
            data = begin + data[:-1].replace(b"\n", b"\n" + prefix) + data[-1:]
        self._open = None if data.endswith(b"\n") else owner
        self._put(data)

    def _put(self, data: bytes) -> None:
        """Writes bytes; closes all pipes if the destination takes no more."""
        try:
            if self._descriptor >= 0:
                _write_all(self._descriptor, data)
        except OSError as error:
            if self._tells_loss:
                why = "its reader has gone" if error.errno == errno.EPIPE else error.strerror
                self._warn(f"standard output cannot be written: {why}")
            for lost in list(self._streams):
                self._forget(lost)

    def _warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self._warnings >= 0:
                _write_all(self._warnings, f"gradsync: {text}\n".encode("utf-8", "replace"))

    def _end(self, stream: _RankStream) -> None:
        """Writes the rest of a stream that has ended, and closes it."""
        if self._has_prefix and _last_state(stream.rest):
            self._write_lines(stream, stream.rest + b"\n")
        elif stream.rest and not self._has_prefix:
            self._write(stream, stream.rest)
        if stream not in self._streams:  # the destination was lost just now
            return
        # Without prefixes, a file or a pipe gets exactly the bytes of the ranks.
        if self._open in (stream, stream.rank) and (self._has_prefix or self._is_terminal):
            self._begin_line()
        if stream in self._streams:
            self._forget(stream)

    def _forget(self, stream: _RankStream) -> None:
        self._streams.remove(stream)
        self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)  # the rank's next write fails

    def _prefix(self, rank: int) -> bytes:
        """Returns the prefix of a rank's lines, padded to the width of the longest prefix."""
        return _label(rank).ljust(self._label_width) + b" "


def _label(rank: int) -> bytes:
    return b"[rank %d]" % rank


def _last_state(line: bytes) -> bytes:
    """Returns what a terminal shows of an incomplete line; b"" if the program has erased the line."""
    state = line.rstrip(b"\r").rpartition(b"\r")[2]
    return state if _CONTROL_SEQUENCE.sub(b"", state).strip() else b""


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes all bytes, and waits for a blocked terminal as long as needed."""
    # This bypasses Python's buffer: a thread that is blocked in a buffered write makes the interpreter abort at exit.
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process has made the descriptor non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def _descriptor_of(stream: TextIO | None) -> int:
    """Writes the stream's buffered output; returns the stream's descriptor, or -1 if the stream is closed."""
    if stream is None:
        return -1
    with contextlib.suppress(OSError):  # the stream has no reader
        stream.flush()
    return stream.fileno()


def _is_same_file(first: int, second: int) -> bool:
    """Returns whether two descriptors lead to the same terminal, pipe or file."""
    return os.path.samestat(os.fstat(first), os.fstat(second))


def log_name(rank: int, restart: int) -> str:
    """Returns the name of a rank's log file: "rank-0.log", or "rank-0.restart-1.log" after the first restart."""
    return f"rank-{rank}.log" if restart == 0 else f"rank-{rank}.restart-{restart}.log"


def prepare_log_directory(directory: str, restart: int = 0, ranks_elsewhere: Container[int] = ()) -> None:
    """Creates the directory for the logs of a run; the first start removes the logs of an earlier run.

    This function removes only files whose names have the pattern of `log_name`. All other files stay.

    Args:
        directory: the directory that the user named.
        restart: the number of times that the ranks have been started before this start.
        ranks_elsewhere: the ranks of other launchers. The logs of these ranks stay: launchers may share the directory,
            and each launcher removes the old logs of its own ranks.

    Raises:
        InvalidArgument: the directory cannot be made, cleared, or written to.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        for entry in list(os.scandir(directory)) if restart == 0 else ():
            name = _LOG_NAME.fullmatch(entry.name)
            # A symbolic link stays, because the user has made it.
            if name and int(name[1]) not in ranks_elsewhere and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another launcher may have removed the file
                    os.unlink(entry.path)
    except OSError as error:
        raise InvalidArgument(
            f"log directory {directory!r} cannot be made, or old logs in it cannot be removed: {error.strerror}; "
            "choose another one"
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidArgument(f"log directory {directory!r} is not writable: choose one where you may write")

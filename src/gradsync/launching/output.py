r"""Shows the ranks' output on the launcher's own streams, and keeps it: log files, and the last lines for the report.

With prefixes each line begins with its rank, and a line is what a terminal shows of it in the end: of a progress bar,
which a program overwrites with \r, the last state. An unfinished line is shown after a moment, as it may be a question;
of an unfinished bar, one state a second on a terminal, and one in ten seconds in a file, such as the log of a CI.
Sequences that move the cursor are left out: they would overwrite the lines of other ranks. Without prefixes all bytes
pass unchanged.

One thread reads the ranks' pipes for each stream of the launcher, or one for both if they lead to the same terminal or
file. A blocked terminal blocks this thread, and not the supervisor; ranks then wait in print(), as without a launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import TextIO

from gradsync.errors import InvalidArgument
from gradsync.machine import start_thread

#: How long the report of a failure waits for a blocked terminal, if the launcher has more to do after it.
REPORT_SECONDS = 1.0
_READ_BYTES = 64 * 1024
_KEPT_LINES, _KEPT_BYTES = 50, 4096  # the last lines of a rank, and the end of each
_MAX_LINE_BYTES = 256 * 1024  # a longer line is shown in pieces, so that memory stays bounded
_UNFINISHED_SECONDS = 0.1
_BAR_SECONDS = {True: 1.0, False: 10.0}  # between two states of a bar: on a terminal, and in a file

_MOVE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]")  # a control sequence that is no colour
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")
# A program with several bars moves up, and down again by a newline: all this is one line that is drawn again.
_UP_AND_DOWN = re.compile(rb"\x1b\[1?A([^\n]*)\n")
_LOG_NAME = re.compile(r"rank-(\d+)(?:\.restart-\d+)?\.log", re.ASCII)


class Notices:
    """Prints the launcher's notices, and drops them if the terminal is gone.

    Args:
        stream: where to; None: nowhere.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def print(self, text: str, *, wait_seconds: float | None = 0.0) -> None:
        """Writes lines.

        Args:
            text: the lines.
            wait_seconds: how long to wait for a blocked terminal before they are dropped; None means no limit.
        """
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):  # the stream has no reader
            try:
                descriptor = self._stream.fileno()
            except (OSError, ValueError):
                print(text, file=self._stream, flush=True)
                return
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            if wait_seconds is None or poll.poll(wait_seconds * 1000.0):
                self._stream.flush()
                # Past the stream's buffer: what is left there without a reader would make the exit code 120.
                _write_all(descriptor, f"{text}\n".encode(self._stream.encoding or "utf-8", "backslashreplace"))


class OutputForwarder:
    """Shows the output of ranks, and keeps it.

    Args:
        stdout: the stream that gets the ranks' stdout. None (Python's value for a closed stream) drops this output.
        stderr: the stream that gets the ranks' stderr; None drops this output.
        prefix: whether each line begins with its rank; if False, all bytes stay unchanged.
        log_dir: the folder for the ranks' log files, one for each rank; see `_prepare_logs`.
        restart: how many times the ranks have been started before.
        ranks_elsewhere: the ranks of other launchers, whose logs in the same folder stay.

    Raises:
        InvalidArgument: log_dir cannot be made or written to.
    """

    def __init__(
        self,
        stdout: TextIO | None,
        stderr: TextIO | None,
        *,
        prefix: bool,
        log_dir: str | None,
        restart: int,
        ranks_elsewhere: Container[int],
    ) -> None:
        if log_dir is not None:
            _prepare_logs(log_dir, restart, ranks_elsewhere)
        self._log_dir, self._log_end = log_dir, f".restart-{restart}.log" if restart else ".log"
        out, err = (_descriptor_of(stream) for stream in (stdout, stderr))
        is_one = out == err or (out >= 0 and err >= 0 and os.path.samestat(os.fstat(out), os.fstat(err)))
        self._screens = [_Screen(out, err, prefix), *([] if is_one else [_Screen(err, err, prefix)])]

    def add(self, rank: int, stdout_fd: int, stderr_fd: int) -> Callable[[], list[str]]:
        """Adds the read ends of a rank's pipes, which this object closes; again for a rank that is started again.

        Returns:
            A function that returns the last lines that the rank has printed, as text.
        """
        log = None if self._log_dir is None else os.path.join(self._log_dir, f"rank-{rank}{self._log_end}")
        tail = _Tail()
        kept = _Kept(tail, log, self._screens[0].warn)
        self._screens[0].add(_Stream(rank, stdout_fd, kept))
        self._screens[-1].add(_Stream(rank, stderr_fd, kept))
        return tail.lines

    def start(self) -> None:
        """Starts the threads."""
        for screen in self._screens:
            start_thread(screen.thread)

    def finish(self, wait_seconds: float) -> bool:
        """Shows all output that has arrived, and ends the threads. Call it again to wait for longer.

        Args:
            wait_seconds: how long to wait for a blocked terminal or a slow reader.

        Returns:
            Whether the threads have ended. If not, the threads continue until the program ends.
        """
        deadline = time.monotonic() + wait_seconds
        for screen in self._screens:
            screen.end()
        for screen in self._screens:
            screen.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(screen.thread.is_alive() for screen in self._screens)


class _Tail:
    """The last lines of both streams of a rank. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._unfinished: dict[int, bytes] = {}  # by stream

    def add(self, stream: int, data: bytes) -> None:
        with self._lock:
            *lines, rest = _flat(self._unfinished.get(stream, b"") + data).split(b"\n")
            self._lines.extend(line[-_KEPT_BYTES:] for line in lines[-_KEPT_LINES:])
            self._unfinished[stream] = rest[-_KEPT_BYTES:]

    def lines(self) -> list[str]:
        with self._lock:
            lines = [*self._lines, *filter(None, self._unfinished.values())]
        return [line.decode("utf-8", "replace") for line in _lines_of(b"\n".join(lines))]


class _Kept:
    """What is kept of a rank's output, while its streams are open: the last lines, and the log file."""

    def __init__(self, tail: _Tail, log: str | None, warn: Callable[[str], None]) -> None:
        self._tail = tail
        self._lock = threading.Lock()
        self._path, self._log, self._warn = log, -1, warn
        if log is not None:
            try:
                self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                weakref.finalize(self, os.close, self._log)
            except OSError as error:
                self._lose_log(error)

    def add(self, stream: int, data: bytes) -> None:
        self._tail.add(stream, data)
        with self._lock:
            try:
                if self._log >= 0:
                    _write_all(self._log, data)
            except OSError as error:
                self._lose_log(error)

    def _lose_log(self, error: OSError) -> None:
        self._log = -1  # the run does not need the log
        self._warn(f"warning: log file {self._path} is incomplete, as it cannot be written: {error.strerror}")


class _Stream:
    """One stream of one rank: the read end of its pipe, and its unfinished line."""

    def __init__(self, rank: int, descriptor: int, kept: _Kept) -> None:
        os.set_blocking(descriptor, False)
        self.rank, self.descriptor, self.kept = rank, descriptor, kept
        self.rest = b""  # the part of the unfinished line that is not shown yet, or may be overwritten
        self.due: float | None = None  # when to show it
        self.shown: bytes | None = None  # the state of an unfinished bar that is shown already
        self.next_state_at = 0.0


class _Screen:
    """One stream of the launcher, with the thread that copies ranks' output to it.

    Args:
        descriptor, warnings: where the output goes, and where warnings go; -1 drops them.
        prefix: whether each line begins with its rank.
    """

    def __init__(self, descriptor: int, warnings: int, prefix: bool) -> None:
        self.thread = threading.Thread(target=self._run, name="gradsync output", daemon=True)
        self._descriptor, self._warnings, self._has_prefix = descriptor, warnings, prefix
        self._is_terminal = descriptor >= 0 and os.isatty(descriptor)
        self._width = 0  # of the longest prefix
        self._new: deque[_Stream] = deque()
        self._streams: list[_Stream] = []  # that have not ended
        self._open: _Stream | None = None  # the stream whose unfinished line is shown last
        self._is_ending = False
        self._selector = selectors.PollSelector()  # epoll refuses files, and /dev/null
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # not by the thread: `end` may write while the thread ends
        self._selector.register(self._wake, selectors.EVENT_READ)

    def add(self, stream: _Stream) -> None:
        """Adds a stream, before or while the thread runs."""
        self._width = max(self._width, len(_prefix(stream.rank)))
        self._new.append(stream)
        os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """Makes the thread end, once it has read all output that has arrived so far."""
        if self._is_ending:
            return
        if self.thread.ident is None:
            start_thread(self.thread)
        self._is_ending = True
        os.eventfd_write(self._wake, 1)

    def warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            if self._warnings >= 0:
                _write_all(self._warnings, f"gradsync: {text}\n".encode("utf-8", "replace"))

    # -- The thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_ending or self._new or self._streams:
            is_ending = self._is_ending
            while self._new:
                self._streams.append(stream := self._new.popleft())
                self._selector.register(stream.descriptor, selectors.EVENT_READ)
            dues = [stream.due for stream in self._streams if stream.due is not None]
            seconds = 0.0 if is_ending else max(0.0, min(dues) - time.monotonic()) if dues else None
            ready = {key.fd for key, _ in self._selector.select(seconds)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for stream in list(self._streams):
                if stream not in self._streams:
                    break  # the destination was lost
                if is_ending or stream.descriptor in ready:
                    self._read(stream)
                if stream.due is not None and stream.due <= time.monotonic():
                    self._show_unfinished(stream)
        self._selector.close()

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:  # in the end: a process that outlives the run may hold the pipe open
            data = b""
        if not data:
            self._end(stream)
            return
        stream.kept.add(stream.descriptor, data)
        if not self._has_prefix:
            self._put(stream, data)
            return
        text = _flat(stream.rest + data)
        end = text.rfind(b"\n") + 1
        stream.rest = text[end:]
        if end:
            stream.due = None
            self._show_lines(stream, text[:end])
        if len(stream.rest) > _MAX_LINE_BYTES:
            self._show_unfinished(stream)
        elif stream.rest and stream.due is None:
            state_at = stream.next_state_at if b"\r" in stream.rest else 0.0
            stream.due = max(time.monotonic() + _UNFINISHED_SECONDS, state_at)

    def _show_lines(self, stream: _Stream, text: bytes) -> None:
        """Shows whole lines."""
        if b"\r" in text or b"\x1b" in text:
            if b"\r" in text.partition(b"\n")[0].rstrip(b"\r"):
                self._begin_line()  # a bar overwrites the unfinished line
            text = b"".join([line + b"\n" for line in _lines_of(text, stream.shown)])
        stream.shown = None
        if text:
            self._write(stream, text)

    def _show_unfinished(self, stream: _Stream) -> None:
        """Shows an unfinished line: a state of a bar, a question to the user, or a piece of a long line."""
        rest, stream.rest, stream.due = stream.rest, b"", None
        if b"\r" not in rest or len(rest) > _MAX_LINE_BYTES:
            self._write(stream, rest)
            return
        # The program may continue this state, or overwrite it.
        state = rest.rstrip(b"\r").rpartition(b"\r")[2]
        stream.rest = b"\r" + state + b"\r" * rest.endswith(b"\r")
        if lines := _lines_of(stream.rest, stream.shown):
            stream.shown = lines[0]
            stream.next_state_at = time.monotonic() + _BAR_SECONDS[self._is_terminal]
            self._begin_line()
            self._write(stream, lines[0] + b"\n")

    def _end(self, stream: _Stream) -> None:
        """Shows the rest of a stream that has ended, and closes it."""
        if stream.rest:
            self._show_lines(stream, stream.rest + b"\n")
        # Without prefixes, a file or a pipe gets exactly the bytes of the ranks.
        if self._open is stream and (self._has_prefix or self._is_terminal):
            self._begin_line()
        if stream in self._streams:  # otherwise the destination was lost just now
            self._forget(stream)

    def _begin_line(self) -> None:
        if self._open is not None:
            self._put(self._open, b"\n")

    def _write(self, stream: _Stream, text: bytes) -> None:
        """Writes whole lines, or the beginning of a line, with prefixes."""
        prefix = _prefix(stream.rank).ljust(self._width)
        if self._open is not stream:
            self._begin_line()
        begin = b"" if self._open is stream else prefix
        self._put(stream, begin + text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:])

    def _put(self, stream: _Stream, data: bytes) -> None:
        """Writes bytes; if the destination takes no more, closes all pipes, so that the ranks' next write fails."""
        self._open = None if data.endswith(b"\n") else stream
        try:
            if self._descriptor >= 0:
                _write_all(self._descriptor, data)
        except OSError as error:
            if self._descriptor != self._warnings:  # ranks see only that their pipe has no reader
                self.warn(f"standard output cannot be written: {error.strerror}")
            for lost in list(self._streams):
                self._forget(lost)

    def _forget(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)


def _prefix(rank: int) -> bytes:
    return b"[rank %d] " % rank


def _flat(text: bytes) -> bytes:
    """Joins the lines of several bars that are drawn again and again to one, which has a state after the other."""
    while b"A" in text and (flat := _UP_AND_DOWN.sub(rb"\r\1\r", text)) != text:
        text = flat
    return text


def _lines_of(text: bytes, shown: bytes | None = None) -> list[bytes]:
    """Returns lines as a terminal shows them in the end; leaves out bars that were erased, and the state `shown`."""
    lines = []
    for line in text.removesuffix(b"\n").split(b"\n") if text else ():
        line = line.rstrip(b"\r")
        state = _MOVE.sub(b"", line.rpartition(b"\r")[2])
        if b"\r" not in line or (_COLOURS.sub(b"", state).strip() and state != shown):
            lines.append(state)
        shown = None
    return lines


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


def _prepare_logs(directory: str, restart: int, ranks_elsewhere: Container[int]) -> None:
    """Makes the folder for the logs of a run; the first start removes the logs of an earlier run, and no other file."""
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

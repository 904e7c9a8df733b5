"""Carries what the ranks print to the launcher's own output, line by line and with the rank before each line.

In a thread of its own, so that a terminal that stands still never keeps the supervisor from its work. Ranks whose
terminal stands still wait in their print(), as they would without us.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
import time
from collections.abc import Container
from pathlib import Path
from typing import TextIO

from gradsync.errors import InvalidArgument
from gradsync.launching.output.lines import PrefixColumn, Tail
from gradsync.launching.output.log import RankLog, prepare_log_directory
from gradsync.launching.output.screen import Screen, describe_loss, screens_for
from gradsync.launching.output.streams import RankOutput, RankStream, seconds_to_wait
from gradsync.launching.signal_inbox import own_descriptors

_TAIL_LINES = 20
# A line that has not ended is shown when nothing more of it comes for this long: it may be a question.
_PARTIAL_LINE_SECONDS = 0.1
# For the thread to notice that its time is up.
_JOIN_SECONDS = 0.1


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

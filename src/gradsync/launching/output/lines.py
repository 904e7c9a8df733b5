"""What the ranks print, as lines: cut from chunks of bytes, prefixed with the rank, and the last ones kept.

Without I/O. Everything is bytes: what a rank prints need not be text, and passes unharmed.
"""

from __future__ import annotations

import re
import threading
from collections import deque

# A line up to this long stays whole; what is longer passes in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 256 * 1024
_MAX_TAIL_LINE_BYTES = 4096

# Of the 256 colours of terminals, those with at least 4:1 contrast on black and on white; neighbours differ in hue.
# No red: it looks like a failure.
RANK_COLOURS = (31, 130, 133, 64, 63, 162, 29, 97)

# Not one that a lone \r follows: between them there is no line.
_LINE_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?!\r(?!\n))")
_LONE_RETURNS = re.compile(rb"\r+(?!\n)")


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

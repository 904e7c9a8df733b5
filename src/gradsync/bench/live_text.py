"""Text that is redrawn in its place on a terminal, and not shown anywhere else."""

from __future__ import annotations

import os
from typing import TextIO

_UP_AND_CLEAR = "\x1b[{}A\x1b[J"


class LiveText:
    """Lines on a terminal that the next ones take the place of.

    Args:
        stream: where they go; None, or what is no terminal, shows nothing.

    Attributes:
        shows: whether anything is shown.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lines = 0
        self.shows = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        """Shows text in place of what was shown before."""
        if not self.shows or self._stream is None:
            return
        size = os.get_terminal_size(self._stream.fileno())
        # A line that wraps, or scrolls away, could not be taken back. A terminal without a size says 0.
        lines = [line[: (size.columns or 80) - 1] for line in text.splitlines()][: max((size.lines or 24) - 1, 1)]
        self.clear()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._lines = len(lines)

    def clear(self) -> None:
        """Takes back what was shown."""
        if self._lines and self._stream is not None:
            self._stream.write(_UP_AND_CLEAR.format(self._lines))
            self._stream.flush()
            self._lines = 0

"""Lines of the launcher itself, for the person who started it."""

from __future__ import annotations

import contextlib
import select
from typing import TextIO


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

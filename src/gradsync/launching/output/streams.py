"""The two streams of a rank on their way from its pipes to the launcher's screens, and what is kept of them."""

from __future__ import annotations

import contextlib
import math
import os
import time

from gradsync.launching.output.lines import LineCutter, Tail
from gradsync.launching.output.log import RankLog
from gradsync.launching.output.screen import Screen
from gradsync.launching.signal_inbox import own_descriptors

_READ_BYTES = 64 * 1024


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

"""Who is inside a communicator: one collective at a time, even where Ctrl-C cuts one off.

An exception may come between any two steps: a lock would stay behind where it comes after taking it and before noting
that. Here one step, which nothing interrupts, takes the place and notes for whom: the frame of the function whose
`with` block it is. A frame that is noted and that no thread runs any more was cut off, and its place is free.
"""

from __future__ import annotations

import sys
from sys import _getframe as frame_of
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from gradsync.communicators.agreement import Agreement

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime


class Occupancy(dict[None, FrameType]):
    """The place inside: empty, or the frame that has it.

    setdefault(None, frame) takes it, and returns who has it now; clear() leaves it.
    """

    __slots__ = ()

    def cut_off(self) -> FrameType | None:
        """Returns the frame that has the place although no thread runs it any more; None where there is none."""
        frame = self.get(None)
        return None if frame is None or _is_running(frame) else frame


class Turn:
    """The context of one collective; one object serves all of a communicator, because collectives do not nest."""

    __slots__ = ("_lifetime", "agreement", "what")

    agreement: Agreement

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self.what = ""

    def __enter__(self) -> None:
        self._lifetime.enter(frame_of(1), self.what, self.agreement)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifetime.leave(error)


def _is_running(frame: FrameType) -> bool:
    for running in sys._current_frames().values():
        caller: FrameType | None = running
        while caller is not None:
            if caller is frame:
                return True
            caller = caller.f_back
    return False

"""Marks in the work of a GPU's streams, for another stream to wait for: cheap enough for one a gradient."""

from __future__ import annotations

import threading
from typing import Any

import cupy

_MAX_MARKS = 64


class WorkMarks:
    """One event for each thread and stream, recorded again and again.

    Recording an event again is safe: a stream that waits for it already waits for the earlier work, and one that
    begins to wait later comes after more work than it needs.
    """

    def __init__(self) -> None:
        # With its stream, so that the stream's handle is not given to another one. By thread, because all threads'
        # own default streams have one handle.
        self._marks: dict[tuple[int, int], tuple[Any, Any]] = {}

    def mark(self, stream: Any) -> Any:
        """Returns an event after the work that a stream, the calling thread's current one, has now.

        To be called with the stream's device current: the default stream's handle means that of the current device.
        """
        place = threading.get_ident(), stream.ptr
        found = self._marks.get(place)
        if found is None:
            if len(self._marks) >= _MAX_MARKS:
                self._marks.clear()
            found = self._marks[place] = (stream, cupy.cuda.Event(disable_timing=True))
        event = found[1]
        event.record(stream)
        return event

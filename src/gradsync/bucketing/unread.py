"""Tells a program that nobody can read a result, so that each rank trains with its own gradients.

    sync("w", g / n)  # the sum over the ranks is written into a temporary, whose future nobody keeps
    w -= lr * g

It is looked for in the first steps of a callback. A result is lost if at the next backward() its future has been
dropped unread, results() was not asked, and after the flush nobody but gradsync referred to the array. On a GPU it is
not looked for: memory may have owners that Python does not count, and launches keep arrays.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradsync.bucketing.bucket import list_of_names
from gradsync.futures import GradientFuture, Work

_log = logging.getLogger("gradsync")
_STEPS = 3
_kept = {0: object()}
_REFERENCES = sys.getrefcount(_kept[0])  # to what is in one dict only, as the argument of getrefcount


@dataclass(slots=True)
class _Result:
    """A gradient's result.

    Attributes:
        name: of the gradient.
        is_new: whether gradsync has made the array; else it is the one that was handed over.
        was_read: whether its future was read.
        future: finds the future, while somebody keeps it.
    """

    name: str
    is_new: bool
    was_read: bool = False
    future: Any = None


class _WatchedFuture(GradientFuture):
    """Notes that it was read, or may be: by a done-callback."""

    __slots__ = ("__weakref__", "_noted")

    def __init__(self, name: str, end: Work, value: Any, noted: _Result) -> None:
        super().__init__(name, end, value)
        self._noted = noted
        noted.future = weakref.ref(self)

    def result(self, timeout: float | None = None) -> Any:
        value = super().result(timeout)
        self._noted.was_read = True
        return value

    def add_done_callback(self, function: Any) -> None:
        self._noted.was_read = True
        super().add_done_callback(function)

    def _ready_value(self, what: str) -> Any:
        self._noted.was_read = True
        return super()._ready_value(what)


_WatchedFuture.__name__ = GradientFuture.__name__  # for its repr


class UnreadResults:
    """Watches the first steps of a callback on one communicator.

    Attributes:
        is_over: whether there is nothing more to look for.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._steps_left = _STEPS
        self._results: dict[Hashable, _Result] = {}  # of this step
        self._suspects: list[_Result] = []  # of the last step: only their futures can tell
        self.is_over = False

    def future(self, key: Hashable, name: str, end: Work, value: Any, *, is_new: bool) -> GradientFuture:
        """Returns the future of a gradient, which is watched."""
        self._results[key] = result = _Result(name, is_new)
        return _WatchedFuture(name, end, value, result)

    def end_step(self, values: Mapping[Hashable, Any]) -> None:
        """Looks who refers to the results of a step; nobody in bucketing may, except the dict `values`.

        Results that it lacks were not reduced.
        """
        for key, result in self._results.items():
            if key not in values:
                continue
            is_sole = result.is_new or (type(values[key]) is np.ndarray and values[key].flags.owndata)
            if (
                is_sole
                and values[key].size
                and sys.getrefcount(values[key]) <= _REFERENCES + (result.future() is not None)
            ):
                self._suspects.append(result)
        self._steps_left -= bool(values)
        self._results = {}

    def forget(self) -> None:
        """Forgets the last step: the program has asked for its results."""
        self._suspects = []

    def tell(self) -> None:
        """Warns of results of the last step that are lost; call it before the next one begins."""
        lost = [result.name for result in self._suspects if not result.was_read and result.future() is None]
        self._suspects = []
        self.is_over = bool(lost) or self._steps_left == 0
        if lost:
            _log.warning(
                "%s: nobody can read what was reduced for %s: the array was a temporary, and the future was dropped. "
                "Read sync.results() or the futures after the block, or hand over arrays that you keep: the results "
                "are written into them",
                self._label,
                list_of_names(lost),
            )

"""The gradients of a step, by their places in it; those that come again, step after step, are known again.

Most loops hand over the very arrays of the step before. What was worked out for those is taken as it is: that is what
makes a gradient cheap. An array is held from one step to the next only once it has come twice running, so that a loop
that makes new arrays each step does not have two steps' worth of memory held.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from gradsync.bucketing.claimed_memory import ClaimedMemory
from gradsync.bucketing.pending import PendingGradient, key_of
from gradsync.bucketing.plan import GradientSpec
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class Arrivals:
    """The places of a step are the order in which its gradients come.

    Attributes:
        count: how many gradients have come in this step.
        specs: of the last step's gradients by place, as far as this step has not replaced them.
        label: begins errors: which rank it is.
        has_new: whether this step has brought an array that is not known from the step before.
    """

    def __init__(self, label: str = "") -> None:
        self.count = 0
        self.label = label
        self.specs: list[GradientSpec] = []
        self.has_new = False
        self._entries: list[PendingGradient | None] = []  # by place; those of the last step where they may recur
        self._seen: list[weakref.ref[Array] | None] = []  # by place: what came in the last step for the first time
        self._new: list[int] = []  # the places to which this step has brought other arrays
        self._keys: set[Hashable] = set()
        self._memory = ClaimedMemory()

    def recurring(self, param: Any, grad: Any, arrays: ArrayKind) -> PendingGradient | None:
        """Takes a gradient whose array came for the same parameter in the last step; None where it is not known.

        Args:
            param, grad: what was handed over.
            arrays: how the communicator handles arrays.
        """
        position = self.count
        if position >= len(self._entries):
            return None
        entry = self._entries[position]
        if (
            entry is None
            or entry.gradient is not grad
            or (entry.parameter is not param and entry.key != key_of(param))
            or entry.state != arrays.state(grad)
        ):
            return None
        if self.has_new:
            self._register(entry, arrays)
        self.count = position + 1
        return entry

    def place_of(self, param: Any) -> int:
        """Returns the place of a gradient that comes now."""
        return self.count

    def has_seen(self, position: int, gradient: Array) -> bool:
        """Whether the last step had this very array at a place."""
        if position >= len(self._seen):
            return False
        seen = self._seen[position]
        return seen is not None and seen() is gradient

    def spec(self, position: int, name: str, native: Array, dtype: str) -> GradientSpec:
        """Returns what ranks must agree on about a gradient; the last step's object where it is the same.

        Raises:
            InvalidArgument: the gradient cannot have this place.
        """
        if position < len(self.specs):
            known = self.specs[position]
            if known.shape == native.shape and known.dtype == dtype and known.name == name:
                return known
        return GradientSpec(name, native.shape, dtype, native.dtype.itemsize)

    def add(self, entry: PendingGradient, arrays: ArrayKind) -> None:
        """Takes a gradient whose array is not known from the last step.

        Raises:
            InvalidArgument: the parameter has one in this step already, or its memory is another one's too.
        """
        if not self.has_new:
            for earlier in self.of_step():
                self._register(earlier, arrays)
            self.has_new = True
        self._register(entry, arrays)
        self._put(entry)
        self.count += 1

    def entry(self, position: int) -> PendingGradient:
        """Returns a gradient of this step."""
        entry = self._entries[position]
        if entry is None:
            raise AssertionError(f"no gradient has come for place {position}")
        return entry

    def of_step(self) -> list[PendingGradient]:
        """Returns the gradients of this step, by place."""
        return [self.entry(position) for position in range(self.count)]

    def end_step(self) -> None:
        """Keeps what may come again; an empty step says nothing about the next."""
        for position in self._new:
            entry = self._entries[position]
            if entry is not None and not entry.recurs:
                is_native = type(entry.gradient) is type(entry.native)
                self._seen[position] = weakref.ref(entry.gradient) if is_native else None
                self._entries[position] = None
        if self.count:
            self._cut_off()
        self._begin_step()

    def forget(self) -> None:
        """Forgets this step and the last."""
        self.count = 0
        self._cut_off()
        self._begin_step()

    def _cut_off(self) -> None:
        """Forgets the places after those of this step."""
        for of_places in (self.specs, self._entries, self._seen):
            del of_places[self.count :]

    def _begin_step(self) -> None:
        self.count = 0
        self.has_new = False
        self._new.clear()
        self._keys.clear()
        self._memory.clear()

    def _put(self, entry: PendingGradient) -> None:
        position = entry.position
        if position == len(self._entries):
            self._entries.append(entry)
            self._seen.append(None)
            self.specs.append(entry.spec)
        else:
            self._entries[position] = entry
            self.specs[position] = entry.spec
        self._new.append(position)

    def _register(self, entry: PendingGradient, arrays: ArrayKind) -> None:
        """Makes sure that no two gradients of the step have one parameter, or memory in common."""
        if entry.key in self._keys:
            raise self._twice(entry.spec.name)
        try:
            self._memory.claim(entry.native, entry.spec.name, arrays)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self.label}: {error}") from None
        self._keys.add(entry.key)

    def _twice(self, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"{self.label}: {name} was handed over twice before a flush: add its gradients up first, or end each pass "
            "with flush() or `with callback.backward()`"
        )

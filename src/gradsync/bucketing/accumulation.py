"""The gradients of local passes, added up by parameter until a step hands over their sums.

On a GPU sums are made on the current stream of each hand-over, one after the other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from gradsync.bucketing.lists import array_module
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array

_Owner = tuple[Callable[[], Any], tuple[int, int]]


class _Sum:
    """What has been added up for one parameter.

    Attributes:
        parameter: held, so that its identity stays its own.
        name: as ranks know it.
        total: the sum so far, which no caller can write to.
        mark: of the work that has added it; see Communicator.mark_work.
        given: what was handed over, and what owns that memory, with its bounds; see _owners.
    """

    __slots__ = ("given", "mark", "name", "parameter", "total")

    def __init__(self, parameter: Any, name: str, total: Array) -> None:
        self.parameter = parameter
        self.name = name
        self.total = total
        self.mark: Any = None
        self.given: list[_Owner] = []


class Accumulation:
    """The sums of one callback between two steps."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, _Sum] = {}
        self._in_pass: set[Hashable] = set()  # the parameters of the local pass that has not ended

    def __len__(self) -> int:
        return len(self._sums)

    def add(
        self,
        param: Any,
        key: Hashable,
        name: str,
        grad: Any,
        native: Array,
        communicator: Communicator,
        *,
        is_reused: bool,
    ) -> Array:
        """Adds a gradient to its parameter's sum, and returns the sum so far.

        Args:
            param, key, name: of the parameter.
            grad: what was handed over.
            native: the same, as the communicator's array.
            communicator: whose arrays these are.
            is_reused: whether an array that comes again holds a gradient of this pass alone, as the caller says.

        Raises:
            InvalidArgument: the parameter has come in this pass; or in another shape or dtype than before; or its array
                may hold an earlier gradient of the step already.
        """
        known, owners = self._sums.get(key), _owners(grad, native, communicator)
        if known is None:
            # Not in the bucket: that is the caller's to write to, and holds the last step's results.
            known = _Sum(param, name, communicator.arrays.empty_like(native))
            known.total[...] = _beside(native, known.total)
            self._sums[key] = known
        else:
            if key in self._in_pass:
                raise InvalidArgument(
                    f"{communicator.label}: {name} was handed over twice in one local pass: add its gradients up "
                    "first, or end each pass with flush(), or give each its own `with callback.accumulate()`"
                )
            self._add_to(known, native, () if is_reused else owners, communicator)
        known.mark = communicator.mark_work()
        known.given = [each for each in known.given if each[0]() is not None]
        there = {(id(owner()), bounds) for owner, bounds in known.given}
        known.given += [(owner, bounds) for owner, bounds in owners if (id(owner()), bounds) not in there]
        self._in_pass.add(key)
        return known.total

    def take(self, key: Hashable, grad: Any, native: Array, communicator: Communicator, *, is_reused: bool) -> Any:
        """Returns what a step hands over for a parameter: its sum with this last gradient; or that, without a sum."""
        known = self._sums.get(key)
        if known is None:
            return grad
        self._add_to(known, native, () if is_reused else _owners(grad, native, communicator), communicator)
        del self._sums[key]
        return known.total

    def take_rest(self, communicator: Communicator) -> list[tuple[Any, Array]]:
        """Returns the parameters that came in local passes alone, with their sums, in the order in which they came."""
        rest, self._sums = self._sums, {}
        if communicator.runs_beside_host:
            communicator.follow_work([known.mark for known in rest.values()])
        return [(known.parameter, known.total) for known in rest.values()]

    def names(self) -> list[str]:
        """Returns whose sums there are, in the order in which they came."""
        return [known.name for known in self._sums.values()]

    def end_pass(self) -> bool:
        """Ends a local pass; returns whether a gradient has come in it."""
        has_come = bool(self._in_pass)
        self._in_pass.clear()
        return has_come

    def clear(self) -> None:
        """Drops all sums."""
        self._sums.clear()
        self._in_pass.clear()

    def _add_to(self, known: _Sum, native: Array, owners: Iterable[_Owner], communicator: Communicator) -> None:
        """Adds a gradient to a sum; `owners` are those that must not have been handed over before."""
        label, total = communicator.label, known.total
        if (total.shape, total.dtype) != (native.shape, native.dtype):
            raise InvalidArgument(
                f"{label}: the gradient of {known.name} must be {total.dtype}{list(total.shape)}, as in the local "
                f"pass before, got {native.dtype}{list(native.shape)}"
            )
        if _overlap(total, native, communicator):
            raise InvalidArgument(
                f"{label}: the gradient of {known.name} lies in the memory of its sum so far: hand over the gradient "
                "of this pass alone"
            )
        if _were_given(known, owners):
            raise InvalidArgument(
                f"{label}: the gradient of {known.name} lies in memory that an earlier local pass of this step has "
                "handed over. Is it a running total, which would be added twice? Then add it up without accumulate(). "
                "Is it scratch memory, written anew in each pass? Then say accumulate(reused=True)"
            )
        if communicator.runs_beside_host:
            communicator.follow_work([known.mark])  # the pass before may have run on another stream
        with np.errstate(all="ignore"):  # what is not finite shows in the result
            total += _beside(native, total)


def _beside(native: Array, total: Array) -> Any:
    """Returns an array in the memory that its sum is in: the host's, or the device's."""
    given: Any = native
    if isinstance(native, np.ndarray) == isinstance(total, np.ndarray):
        return given
    return given.get() if isinstance(total, np.ndarray) else array_module(total).asarray(given)


def _owners(grad: Any, native: Array, communicator: Communicator) -> list[_Owner]:
    """Returns references to an array and its memory's owner: while one lives, nobody else gets that memory."""
    bounds = communicator.arrays.byte_bounds(native) if native.size else (0, 0)
    owner: Any = native
    while (base := _base(owner)) is not None:
        owner = base
    found: list[_Owner] = []
    for each in {id(each): each for each in (grad, owner)}.values():
        try:
            found.append((weakref.ref(each), bounds))
        except TypeError:  # of a class without weak references: then its owner alone tells
            if isinstance(each, bytearray):
                found.append((_Held(each), bounds))
    return found


def _base(owner: Any) -> Any:
    """Returns what an array or a memoryview shows the memory of; None where that is its own."""
    if isinstance(owner, memoryview):
        return owner.obj
    return getattr(owner, "base", None) if hasattr(owner, "dtype") else None


class _Held:
    """A reference to a bytearray, of which there are no weak ones: gives None once nobody else has it."""

    def __init__(self, owner: bytearray) -> None:
        self._owner: bytearray | None = owner

    def __call__(self) -> bytearray | None:
        if sys.getrefcount(self._owner) == 2:  # this one's, and that of the call
            self._owner = None
        return self._owner


def _were_given(known: _Sum, owners: Iterable[_Owner]) -> bool:
    """Whether memory of one of these owners was handed over before."""
    return any(
        owner() is reference() and first < end and begin < last
        for reference, (begin, end) in owners
        for owner, (first, last) in known.given
    )


def _overlap(first: Array, second: Array, communicator: Communicator) -> bool:
    if not (first.size and second.size):
        return False
    (begin, end), (other, last) = map(communicator.arrays.byte_bounds, (first, second))
    return begin < last and other < end

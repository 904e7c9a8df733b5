"""The gradients of local passes, added up by parameter until a step takes the sums.

On a GPU a sum is made on the current stream of each hand-over, one addition after the other.
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
    """The sum of one parameter.

    Attributes:
        parameter: held, so that no other object gets its id.
        name: as ranks know it.
        total: the sum so far, in memory that no caller can write to.
        mark: of the last addition; see Communicator.mark_work.
        given: the arrays that were handed over, and the owners of their memory, with its bounds; see _owners.
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
        self.by_key: dict[Hashable, _Sum] = {}
        self.is_reused = False
        self._in_pass: set[Hashable] = set()  # the parameters of the local pass that has not ended

    def add(self, param: Any, key: Hashable, name: str, grad: Any, native: Array, communicator: Communicator) -> Array:
        """Adds a gradient to its parameter's sum, and returns the sum so far.

        Args:
            param, key, name: of the parameter.
            grad: the gradient that was handed over.
            native: the same, as the communicator's array.
            communicator: of the arrays.

        Raises:
            InvalidArgument: the parameter has a gradient in this pass already, or had another shape or dtype before, or
                its array may contain an earlier gradient of the step.
        """
        known, owners = self.by_key.get(key), _owners(grad, native, communicator)
        if known is None:
            # Not in the bucket: the caller may write to it, and it holds the last step's results.
            known = _Sum(param, name, communicator._arrays.empty_like(native))
            known.total[...] = _beside(native, known.total)
            self.by_key[key] = known
        else:
            if key in self._in_pass:
                raise InvalidArgument(
                    f"{communicator.label}: {name} was handed over twice in one local pass: add its gradients up "
                    "first, or end each pass with flush(), or give each its own `with callback.accumulate()`"
                )
            self._add_to(known, native, owners, communicator)
        known.mark = communicator._mark_work()
        known.given = [each for each in known.given if each[0]() is not None]
        there = {(id(owner()), bounds) for owner, bounds in known.given}
        known.given += [(owner, bounds) for owner, bounds in owners if (id(owner()), bounds) not in there]
        self._in_pass.add(key)
        total: Array = known.total.view()
        if isinstance(total, np.ndarray):
            total.setflags(write=False)
        return total

    def take(self, key: Hashable, grad: Any, native: Array, communicator: Communicator) -> tuple[Any, Array]:
        """Returns the gradient that a step reduces for a parameter, and its native array.

        That is the last gradient, which is added to the parameter's sum if there is one.
        """
        known = self.by_key.get(key)
        if known is None:
            return grad, native
        self._add_to(known, native, _owners(grad, native, communicator), communicator)
        del self.by_key[key]
        return known.total, known.total

    def take_rest(self, communicator: Communicator) -> list[tuple[Any, Array]]:
        """Returns the parameters with gradients in local passes only, and their sums, in order of arrival."""
        rest, self.by_key = self.by_key, {}
        if communicator._runs_beside_host:
            communicator._follow_work([known.mark for known in rest.values()])
        return [(known.parameter, known.total) for known in rest.values()]

    def names(self) -> list[str]:
        """Returns the names of the parameters that have a sum, in order of arrival."""
        return [known.name for known in self.by_key.values()]

    def end_pass(self) -> bool:
        """Ends a local pass; returns whether it had a gradient."""
        has_come = bool(self._in_pass)
        self._in_pass.clear()
        return has_come

    def clear(self) -> None:
        """Drops all sums."""
        self.by_key.clear()
        self._in_pass.clear()

    def _add_to(self, known: _Sum, native: Array, owners: Iterable[_Owner], communicator: Communicator) -> None:
        """Adds a gradient to a sum; refuses one whose memory, by its owners, was handed over before."""
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
        if not self.is_reused and _were_given(known, owners):
            raise InvalidArgument(
                f"{label}: the gradient of {known.name} lies in memory that an earlier local pass of this step has "
                "handed over. Is it a running total, which would be added twice? Then add it up without accumulate(). "
                "Is it scratch memory, written anew in each pass? Then say accumulate(reused=True)"
            )
        if communicator._runs_beside_host:
            communicator._follow_work([known.mark])  # the pass before may have run on another stream
        with np.errstate(all="ignore"):  # NaN and infinity show in the result
            total += _beside(native, total)


def _beside(native: Array, total: Array) -> Any:
    """Returns an array in the same memory as its sum: the host's, or the device's."""
    given: Any = native
    if isinstance(native, np.ndarray) == isinstance(total, np.ndarray):
        return given
    return given.get() if isinstance(total, np.ndarray) else array_module(total).asarray(given)


def _owners(grad: Any, native: Array, communicator: Communicator) -> list[_Owner]:
    """Returns references to an array and to its memory's owner: while one lives, no other array gets the memory."""
    bounds = communicator._arrays.byte_bounds(native) if native.size else (0, 0)
    owner: Any = native
    while (base := _base(owner)) is not None:
        owner = base
    found: list[_Owner] = []
    for each in {id(each): each for each in (grad, owner)}.values():
        try:
            found.append((weakref.ref(each), bounds))
        except TypeError:  # a class without weak references: then only its owner identifies it
            if isinstance(each, bytearray):
                found.append((_Held(each), bounds))
    return found


def _base(owner: Any) -> Any:
    """Returns the object whose memory an array or memoryview shows; None if it owns its memory."""
    if isinstance(owner, memoryview):
        return owner.obj
    return getattr(owner, "base", None) if hasattr(owner, "dtype") else None


class _Held:
    """A reference to a bytearray, which has no weak references: returns None once it holds the last reference."""

    def __init__(self, owner: bytearray) -> None:
        self._owner: bytearray | None = owner

    def __call__(self) -> bytearray | None:
        if sys.getrefcount(self._owner) == 2:  # the attribute, and the argument of the call
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
    (begin, end), (other, last) = map(communicator._arrays.byte_bounds, (first, second))
    return begin < last and other < end

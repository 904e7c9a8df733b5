"""Sums of gradients over local passes (backward passes without communication), one sum for each parameter.

On a GPU an addition is queued on the stream that is current when the program hands the gradient over. It begins after
the earlier additions to the same sum.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.lists import array_module
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class _Memory(NamedTuple):
    """The memory of an array that was handed over: the addresses [begin, end), and the object that owns the memory.

    Attributes:
        owner: a function that returns the object that owns the memory. After this object is deleted, the function
            returns None, because a different array may then use the memory.
        begin: the address of the first byte.
        end: the address after the last byte.
    """

    owner: Callable[[], Any]
    begin: int
    end: int

    def overlaps(self, other: _Memory) -> bool:
        return self.owner() is other.owner() and self.begin < other.end and other.begin < self.end


@dataclass(slots=True, eq=False)
class _Sum:
    """The sum of one parameter's gradients.

    Attributes:
        parameter: the parameter, kept alive so that no other object gets its id.
        name: the parameter's name, the same on all ranks.
        total: the sum so far, in memory of its own.
        mark: a GPU event, recorded after the last addition; None on the CPU. See Backend.mark_work.
        handed_over: the memory of the arrays that were handed over and still exist.
    """

    parameter: Any
    name: str
    total: Array
    mark: Any = None
    handed_over: list[_Memory] = field(default_factory=list)


class Accumulation:
    """The sums of gradients that one callback holds between two steps.

    Attributes:
        by_key: a dict of the sums, by the key of the parameter, in order of arrival.
        is_reused: whether the program may hand over one array in several passes. If True, the program promises that the
            array holds only the gradient of the current pass.
    """

    def __init__(self) -> None:
        self.by_key: dict[Hashable, _Sum] = {}
        self.is_reused = False
        self._in_pass: set[Hashable] = set()  # the keys of parameters with a gradient in the current local pass

    def add(self, param: Any, key: Hashable, name: str, grad: Any, native: Array, communicator: Communicator) -> Array:
        """Adds a gradient to its parameter's sum. Returns the sum so far, which is read-only on the CPU.

        Args:
            param: the parameter.
            key: the key that identifies the parameter in this process.
            name: the parameter's name, the same on all ranks.
            grad: the gradient that was handed over.
            native: the gradient as a native array (see ArrayKind).
            communicator: the communicator that will reduce the sum.

        Raises:
            InvalidArgument: the parameter already has a gradient in this pass, its earlier gradient has a different
                shape or dtype, the array shares memory with the sum, or an earlier pass of the step handed over the
                same memory and `is_reused` is False.
        """
        known, memory = self.by_key.get(key), _memory_of(grad, native, communicator)
        if known is None:
            # The sum is not in the bucket: the bucket holds the last step's results, and the caller may write to it.
            known = _Sum(param, name, communicator._arrays.empty_like(native))
            known.total[...] = _in_memory_of(native, known.total)
            self.by_key[key] = known
        else:
            if key in self._in_pass:
                raise InvalidArgument(
                    f"{communicator.label}: {name} was handed over twice in one local pass: add its gradients up "
                    "first, or end each pass with flush(), or use one `with callback.accumulate()` for each pass"
                )
            self._add_to(known, native, memory, communicator)
        known.mark = communicator._mark_work()
        known.handed_over = [each for each in known.handed_over if each.owner() is not None]
        there = {(id(each.owner()), each[1:]) for each in known.handed_over}
        known.handed_over += [each for each in memory if (id(each.owner()), each[1:]) not in there]
        self._in_pass.add(key)
        total: Array = known.total.view()
        if isinstance(total, np.ndarray):
            total.setflags(write=False)
        return total

    def take(self, key: Hashable, grad: Any, native: Array, communicator: Communicator) -> tuple[Any, Array]:
        """Adds the gradient of the last pass to its parameter's sum; returns the sum as (array, native array).

        If the parameter has no sum, returns the gradient unchanged.
        """
        known = self.by_key.get(key)
        if known is None:
            return grad, native
        self._add_to(known, native, _memory_of(grad, native, communicator), communicator)
        del self.by_key[key]
        return known.total, known.total

    def take_rest(self, communicator: Communicator) -> list[tuple[Any, Array]]:
        """Returns the parameters without a gradient in the last pass, with their sums, in order of arrival."""
        rest, self.by_key = self.by_key, {}
        if communicator._runs_beside_host:
            communicator._follow_work([known.mark for known in rest.values()])
        return [(known.parameter, known.total) for known in rest.values()]

    def names(self) -> list[str]:
        """Returns the names of the parameters that have a sum, in order of arrival."""
        return [known.name for known in self.by_key.values()]

    def end_pass(self) -> bool:
        """Ends a local pass; returns whether the pass had a gradient."""
        has_gradients = bool(self._in_pass)
        self._in_pass.clear()
        return has_gradients

    def clear(self) -> None:
        """Drops all sums."""
        self.by_key.clear()
        self._in_pass.clear()

    def _add_to(self, known: _Sum, native: Array, memory: Sequence[_Memory], communicator: Communicator) -> None:
        """Adds a gradient to a sum; see `add` for the errors."""
        label, total = communicator.label, known.total
        if (total.shape, total.dtype) != (native.shape, native.dtype):
            raise InvalidArgument(
                f"{label}: the gradient of {known.name} must be {total.dtype}{list(total.shape)}, as in the last "
                f"local pass, got {native.dtype}{list(native.shape)}"
            )
        arrays = communicator._arrays
        if native.size:
            (begin, end), (first, last) = arrays.byte_bounds(native), arrays.byte_bounds(total)
            if begin < last and first < end:
                raise InvalidArgument(
                    f"{label}: the gradient of {known.name} shares memory with the sum of its earlier passes: hand "
                    "over only the gradient of this pass"
                )
        if not self.is_reused and any(each.overlaps(before) for each in memory for before in known.handed_over):
            raise InvalidArgument(
                f"{label}: the gradient of {known.name} lies in memory that an earlier local pass of this step has "
                "handed over. If the array is a running total, its earlier values would be added twice: add up without "
                "accumulate(). If the program overwrites the array in each pass: use accumulate(reused=True)"
            )
        if communicator._runs_beside_host:
            communicator._follow_work([known.mark])  # the pass before may have run on another stream
        with np.errstate(all="ignore"):  # no warnings: NaN and infinity are visible in the result
            total += _in_memory_of(native, total)


def _in_memory_of(native: Array, total: Array) -> Any:
    """Returns a gradient in the same kind of memory (host or device) as its sum; copies the gradient if needed."""
    array: Any = native
    if isinstance(native, np.ndarray) == isinstance(total, np.ndarray):
        return array
    return array.get() if isinstance(total, np.ndarray) else array_module(total).asarray(array)


def _memory_of(grad: Any, native: Array, communicator: Communicator) -> list[_Memory]:
    """Returns the memory of an array as up to two _Memory objects: the array as owner, and the owner of its memory.

    An owner without weak references is left out, unless it is a bytearray.
    """
    bounds = communicator._arrays.byte_bounds(native) if native.size else (0, 0)
    owner: Any = native
    while (base := _base(owner)) is not None:
        owner = base
    found: list[_Memory] = []
    for each in {id(each): each for each in (grad, owner)}.values():
        try:
            found.append(_Memory(weakref.ref(each), *bounds))
        except TypeError:  # a class without weak references: only the owner identifies the memory
            if isinstance(each, bytearray):
                found.append(_Memory(_LastReference(each), *bounds))
    return found


def _base(owner: Any) -> Any:
    """Returns the object whose memory an array or memoryview uses; None if the array owns its memory."""
    if isinstance(owner, memoryview):
        return owner.obj
    return getattr(owner, "base", None) if hasattr(owner, "dtype") else None


class _LastReference:
    """Acts as a weak reference to a bytearray, because Python has none for this class.

    A call returns the bytearray, or None if no other reference to the bytearray is left.
    """

    def __init__(self, owner: bytearray) -> None:
        self._owner: bytearray | None = owner

    def __call__(self) -> bytearray | None:
        if sys.getrefcount(self._owner) == 2:  # the attribute, and the argument of getrefcount()
            self._owner = None
        return self._owner

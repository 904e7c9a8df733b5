"""Protects gradients in flight: a lock makes NumPy arrays read-only.

The lock clears the WRITEABLE flag of a NumPy array. If an array does not own its memory, NumPy sets the flag again only
while one of the array's bases (array.base, the base of array.base, and so on) is writeable. For some arrays NumPy never
sets the flag again. So gradsync locks a gradient only if gradsync can always restore the flag. gradsync itself writes
through a view that it made before the lock, because a view keeps its own flag.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from gradsync.bucketing.gradient import GradientEntry
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array

_host = ArrayKind()
#: set_flags(gradient, writeable) is NumPy's method, because a subclass of the array may override it.
set_flags: Callable[..., None] = np.ndarray.setflags
_exhaust = deque[Any](maxlen=0).extend


class Holder(Protocol):
    """A callback that has gradients in flight.

    Attributes:
        label: the text that names this rank, for the beginning of errors.
        whose: the text that names the callback in the errors of other callbacks.
    """

    @property
    def label(self) -> str: ...

    @property
    def whose(self) -> str: ...

    def locked(self) -> list[GradientEntry]:
        """Returns the gradients that are locked now. Any thread may call it."""


class LockedGradients:
    """The locked gradients of a bucket, which are unlocked together.

    Args:
        entries: the entries of the bucket's gradients. Gradients that are not locked are ignored.
        holder: the callback that has the gradients in flight.
    """

    def __init__(self, entries: Sequence[GradientEntry], holder: Holder) -> None:
        locked = [entry for entry in entries if entry.is_locked]
        self._names = [entry.name for entry in locked]
        self._arrays = [entry.gradient for entry in locked]
        self._holder = weakref.ref(holder)  # weak, because the holder may keep this object from step to step

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def unlock(self) -> None:
        """Makes the gradients writeable again.

        NumPy refuses to make a gradient writeable if the gradient's base array has become read-only since the lock.
        Either the program has made the base array read-only, or another callback has locked the base array. In this
        case _unlock_view makes the gradient writeable.

        Raises:
            InvalidArgument: a gradient stays read-only, or another callback has the same memory in flight.
        """
        try:
            _exhaust(map(set_flags, self._arrays, repeat(True)))  # map() loops in C, because a step has many gradients
        except ValueError:
            self._unlock_one_by_one()

    def _unlock_one_by_one(self) -> None:
        failed: InvalidArgument | None = None
        for name, array in zip(self._names, self._arrays, strict=True):
            try:
                set_flags(array, True)
            except ValueError as error:
                try:
                    self._unlock_view(name, array, error)
                except InvalidArgument as refusal:
                    failed = failed or refusal
        if failed is not None:
            raise failed

    def _unlock_view(self, name: str, array: Array, error: ValueError) -> None:
        """Unlocks a view whose owner (the array with the memory) has become read-only; the owner stays read-only."""
        owner = _owner(array)
        holder = self._holder()
        what = f"{holder.label if holder else 'a deleted callback'}: the gradient of {name}"
        if owner is None or owner is array:
            raise InvalidArgument(
                f"{what} cannot be made writeable again after its reduction ({error}): hand over an array that owns "
                "its memory"
            ) from error
        was_writeable = owner.flags.writeable
        owner.setflags(write=True)
        try:
            set_flags(array, True)
        finally:
            owner.setflags(write=was_writeable)
        refuse_in_flight(array, what, holder)


_holders: dict[int, weakref.ref[Any]] = {}  # the holders of this process, by id


def register(holder: Holder) -> None:
    """Registers a callback, so that other callbacks can find its gradients in flight; keeps only a weak reference."""
    key = id(holder)
    _holders[key] = weakref.ref(holder, lambda _: _holders.pop(key, None))


def can_lock(gradient: Array, name: str, holder: Holder) -> bool:
    """Whether gradsync locks a gradient: only if gradsync can always restore the gradient's WRITEABLE flag.

    Args:
        gradient: a NumPy array, of any subclass.
        name: the gradient's name.
        holder: the callback that takes the gradient.

    Raises:
        InvalidArgument: another callback has the gradient in flight.
    """
    owner = _owner(gradient)
    if owner is None:
        return False
    if not (gradient.flags.writeable and owner.flags.writeable):
        refuse_in_flight(gradient, f"{holder.label}: the gradient of {name}", holder)
        return False
    return gradient.size > 0  # an empty array cannot be written to


def refuse_in_flight(array: Array, who: str, holder: Holder | None = None) -> None:
    """Refuses an array that another callback has in flight: that callback will make the array writeable again.

    Args:
        array: a read-only array, or a view of read-only memory.
        who: the beginning of the error text, which names this rank and the array.
        holder: the callback that checks the array; None if the caller is not a callback.

    Raises:
        InvalidArgument: the array is in flight.
    """
    others = [reference() for reference in list(_holders.values())]
    for other in others:
        if other is None or other is holder:
            continue
        for entry in other.locked():
            if _host.share_memory(array, entry.gradient):
                raise InvalidArgument(
                    f"{who} is in flight already: {other.whose} has it as the gradient of {entry.name} and has "
                    "not reduced it yet: flush that callback first, or hand over a copy"
                )


def _owner(array: Array) -> Array | None:
    """Returns the NumPy array at the end of a chain of views, if it owns the memory; else None."""
    while not array.flags.owndata:
        base = array.base
        if not isinstance(base, np.ndarray):
            return None
        array = base
    return array

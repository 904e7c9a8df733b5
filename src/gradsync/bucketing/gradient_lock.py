"""Gradients in flight are read-only: which can be locked, how their flag is put back, and who has one in flight.

NumPy sets the WRITEABLE flag of an array that does not own its memory only while an array of its base chain is
writeable, or never. So a gradient is locked only where its flag can surely be put back. What gradsync itself writes
through are views made before: a view keeps its flag.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradsync.communicators.host_arrays import HostArrays
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array

_host = HostArrays()


class Lock(NamedTuple):
    """One gradient's flag.

    Attributes:
        set_writeable: the array's own setflags, bound: the cheapest way, twice for each gradient of a step.
        array: what was handed over.
        name: of the gradient, as ranks know it.
    """

    set_writeable: Callable[[bool], None]
    array: Array
    name: str


class Holder(Protocol):
    """A callback's gradients in flight.

    Attributes:
        label: begins errors: which rank it is.
        whose: names the callback in errors of others.
    """

    label: str
    whose: str

    def locked(self) -> list[Lock]:
        """Returns the gradients that are locked now; any thread may ask."""


_holders: dict[int, weakref.ref[Any]] = {}  # of this process, by id


def register(holder: Holder) -> None:
    """Has others find what a callback has in flight, for as long as the holder lives."""
    key = id(holder)
    _holders[key] = weakref.ref(holder, lambda _: _holders.pop(key, None))


def lock_of(gradient: Array, name: str, holder: Holder, *, is_on: bool) -> Lock | None:
    """Returns what locks a gradient; None where its flag could not surely be put back, or is not to be touched.

    Args:
        gradient: a NumPy array, of any subclass.
        name: of the gradient.
        holder: of the callback that takes it.
        is_on: whether the callback locks gradients.

    Raises:
        InvalidArgument: another callback has it in flight.
    """
    owner = _owner(gradient)
    if owner is None:
        return None
    if not (gradient.flags.writeable and owner.flags.writeable):
        refuse_in_flight(gradient, f"{holder.label}: the gradient of {name}", holder)
        return None
    if not is_on or not gradient.size:  # there is nothing to write to in an empty one
        return None
    return Lock(np.ndarray.setflags.__get__(gradient), gradient, name)


def refuse_in_flight(array: Array, who: str, holder: Holder | None = None) -> None:
    """Raises where another callback has an array in flight: it must not be taken for a read-only one.

    Args:
        array: which is read-only, or a view of memory that is.
        who: begins the error.
        holder: of the callback that asks; None for other functions.

    Raises:
        InvalidArgument: it is in flight.
    """
    for other in _others(holder):
        for lock in other.locked():
            if _host.share_memory(array, lock.array):
                raise InvalidArgument(
                    f"{who} is in flight already: {other.whose} has it as the gradient of {lock.name} and has not "
                    "reduced it yet: flush that callback first, or hand over a copy"
                )


def put_back(locks: Iterable[Lock], holder: Holder) -> None:
    """Makes gradients writeable again, each of them, also where NumPy refuses at first.

    It does so where the array that a gradient is a view of has become read-only meanwhile: by the program, or because
    another callback has that in flight.

    Raises:
        InvalidArgument: a gradient stays read-only, or another callback has the same memory in flight.
    """
    failed: InvalidArgument | None = None
    for lock in locks:
        try:
            lock.set_writeable(True)
        except ValueError as error:
            try:
                _put_back_view(lock, holder, error)
            except InvalidArgument as refusal:
                failed = failed or refusal
    if failed is not None:
        raise failed


def _put_back_view(lock: Lock, holder: Holder, error: ValueError) -> None:
    owner = _owner(lock.array)
    what = f"{holder.label}: the gradient of {lock.name}"
    if owner is None or owner is lock.array:
        raise InvalidArgument(
            f"{what} stays read-only after its reduction ({error}): hand over an array that owns its memory, or use "
            "AllreduceCallback(lock_gradients=False)"
        ) from error
    was_writeable = owner.flags.writeable
    owner.setflags(write=True)
    try:
        lock.set_writeable(True)
    finally:
        owner.setflags(write=was_writeable)
    refuse_in_flight(lock.array, what, holder)


def _owner(array: Array) -> Array | None:
    """Returns the array that owns an array's memory; None where that does not belong to a NumPy array."""
    while not array.flags.owndata:
        base = array.base
        if not isinstance(base, np.ndarray):
            return None
        array = base
    return array


def _others(holder: Holder | None) -> list[Holder]:
    found = [reference() for reference in list(_holders.values())]
    return [other for other in found if other is not None and other is not holder]

"""The state of plain objects as a value: equal for states that cannot be told apart by what happens next.

Times are told from now: the core compares them and adds to them, so that a state an hour later is the same state. The
order in which a dict was filled is left out: it decides no more than the order of messages to different connections.
"""

from __future__ import annotations

import enum
import hashlib
import marshal
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

from gradsync.rendezvous.store import Request

_ATOMS = frozenset({int, str, bytes, bool, type(None)})
_FORGOTTEN_AFTER_MS = 10_000  # no clock of the core looks further back than the longest silence that it tells of


def fingerprint(root: Any, now: float) -> bytes:
    """Returns 16 bytes that stand for the state.

    Args:
        root: the object from which all of it can be reached.
        now: the time of the state, which floats are taken to be times beside.
    """
    walk = _Walk(now)
    walk.add(root)
    return hashlib.blake2b(marshal.dumps(walk.told, 2), digest_size=16).digest()


class _Walk:
    """One pass over an object graph, told as a flat list; an object that comes again is told by its number."""

    def __init__(self, now: float) -> None:
        self.told: list[Any] = []
        self._now = now
        self._numbers: dict[int, int] = {}

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self.told.append(value)
        elif kind is float:
            self.told.append(("time", max(round((value - self._now) * 1000), -_FORGOTTEN_AFTER_MS)))
        elif kind is tuple or kind is list:
            self._add_all("list", value)
        elif isinstance(value, dict):
            self._add_all("dict", [part for key in _in_order(value) for part in (key, value[key])])
        elif kind is set:
            self._add_all("set", _in_order(value))
        elif kind is range:
            self._add_all("list", tuple(value))
        elif isinstance(value, enum.Enum):
            self.told.append(value.name)
        else:
            self._add_object(kind, value)

    def _add_all(self, what: str, values: Collection[Any]) -> None:
        told = self.told
        told.append(what)
        told.append(len(values))
        for value in values:
            if type(value) in _ATOMS:  # nearly all are: a call for each would double the time
                told.append(value)
            else:
                self.add(value)

    def _add_object(self, kind: type, value: Any) -> None:
        number = self._numbers.get(id(value))
        if number is not None:
            self._add_all("again", (number,))
            return
        self._numbers[id(value)] = len(self._numbers)
        fields = _FIELDS_OF.get(kind)
        if fields is None:
            fields = _FIELDS_OF[kind] = _reader_of(value)
        self._add_all(kind.__name__, fields(value))


def _in_order(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # members of groups are tuples or ranges
        return sorted(values, key=repr)


def _reader_of(value: Any) -> Callable[[Any], Collection[Any]]:
    """Returns what reads all attributes of such an object."""
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    names = sorted(slots or vars(value))
    if len(names) < 2:
        return lambda value: [getattr(value, name) for name in names]
    return operator.attrgetter(*names)


def _fields_of_request(request: Request) -> list[Any]:
    """When a request came means nothing once it waits."""
    return [request.connection, request.rank, request.sequence]


_FIELDS_OF: dict[type, Callable[[Any], Collection[Any]]] = {Request: _fields_of_request}

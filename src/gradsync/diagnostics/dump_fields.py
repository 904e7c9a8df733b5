"""The fields of a dump, each checked before it is used, and refused by its place in the file.

A dump may have been cut, mixed up on its way, or edited by hand: what is JSON need not be a dump.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

E = TypeVar("E")


class DamagedError(ValueError):
    """A field is missing, or not what it has to be; the text says which, what it needs to be, and what is there."""


class Rule(NamedTuple):
    """What a field has to be.

    Attributes:
        needed: in words that follow "needs to be".
        accepts: whether a value is that.
    """

    needed: str
    accepts: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_moment(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**40  # so that sums of several stay exact and finite


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _or_none(rule: Rule) -> Rule:
    return Rule(f"{rule.needed}, or null", lambda value: value is None or rule.accepts(value))


def _list_of(rule: Rule, which: str) -> Rule:
    return Rule(f"a list of {which}", lambda value: isinstance(value, list) and all(map(rule.accepts, value)))


TEXT = Rule("a text", lambda value: isinstance(value, str))
TEXTS = _list_of(TEXT, "texts")
TRUTH = Rule("true or false", lambda value: isinstance(value, bool))
INTEGER = Rule("an integer of at least 0", _is_integer)
INTEGERS = _list_of(INTEGER, "integers of at least 0")
INTEGER_OR_NONE = _or_none(INTEGER)
# Below 0, in dumps from before 0.2: several buckets that were reduced as one.
BUCKET = Rule("an integer", lambda value: type(value) is int and abs(value) < 2**63)
MOMENT = Rule("a moment in seconds", _is_moment)
MOMENT_OR_NONE = _or_none(MOMENT)
STATE = Rule("'runs', 'ended' or 'failed'", lambda value: value in ("runs", "ended", "failed"))
DIGEST = Rule("16 hexadecimal digits", lambda value: re.fullmatch("[0-9a-f]{16}", value) is not None)
PLAIN = Rule(
    "a text, a number, or a list of them",
    lambda value: all(map(_is_plain, value)) if isinstance(value, list) else _is_plain(value),
)
_ANYTHING = Rule("anything", lambda _: True)
_LIST = Rule("a list", lambda value: isinstance(value, list))


class Fields:
    """An object of a dump.

    Args:
        value: what stands where the object should.
        place: where that is, from the top of the file; "" for the whole.

    Raises:
        DamagedError: it is none; as all methods do where a field is not what it has to be.
    """

    def __init__(self, value: Any, place: str = "") -> None:
        self._place = place
        if not isinstance(value, dict):
            raise DamagedError(f"{place or 'it'} needs to be an object, got {reprlib.repr(value)}")
        self._values: dict[str, Any] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, rule: Rule) -> Any:
        """Returns a field that has to be there."""
        if name not in self._values:
            raise DamagedError(f"{self._place or 'it'} has no {name!r}")
        value = self._values[name]
        if not rule.accepts(value):
            raise self.refused(name, rule.needed, value)
        return value

    def fields(self, name: str) -> Fields:
        """Returns an object within this one."""
        return Fields(self.get(name, _ANYTHING), self._at(name))

    def list_of_fields(self, name: str) -> list[Fields]:
        """Returns a list of objects."""
        return [Fields(value, f"{self._at(name)}[{place}]") for place, value in enumerate(self.get(name, _LIST))]

    def fields_by_name(self, rule: Rule) -> dict[str, Fields]:
        """Returns this object's fields, which are objects themselves, by their names, which have to be of a kind."""
        for name in self._values:
            if not rule.accepts(name):
                raise DamagedError(f"{self._place} needs {rule.needed} as each name, got {reprlib.repr(name)}")
        return {name: self.fields(name) for name in self._values}

    def rows(self, name: str, kind: Callable[..., E], rules: Sequence[Rule]) -> tuple[E, ...]:
        """Returns a list of events, each of which is a list of its fields, in the order of the rules."""
        rows = self.get(name, _LIST)
        for place, row in enumerate(rows):  # half a million at most: no text is made but for the one that is refused
            if not isinstance(row, list) or len(row) != len(rules):
                raise self.refused(f"{name}[{place}]", f"a list of {len(rules)} fields", row)
            for column, (rule, value) in enumerate(zip(rules, row, strict=True)):
                if not rule.accepts(value):
                    raise self.refused(f"{name}[{place}][{column}]", rule.needed, value)
        return tuple([kind(*row) for row in rows])

    def plain(self) -> dict[str, Any]:
        """Returns all of it, of which nothing may be nested any deeper than a list."""
        return {name: self.get(name, PLAIN) for name in self._values}

    def refused(self, name: str, needed: str, value: Any) -> DamagedError:
        """Returns the error for a field that is not what is needed."""
        return DamagedError(f"{self._at(name)} needs to be {needed}, got {reprlib.repr(value)}")

    def _at(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

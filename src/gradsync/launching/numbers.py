"""The numbers that a launch is given: checked in one place and refused in the same words.

The command line and the ranks' `launcher` import this file, so it imports next to nothing.
"""

from __future__ import annotations

from typing import Any

from gradsync.errors import InvalidArgument
from gradsync.variable_values import LARGEST_PORT

#: Between asking ranks to end and killing them.
DEFAULT_GRACE_SECONDS = 5.0


def check_integer(who: str, name: str, value: Any, lowest: int, highest: int | None = None) -> None:
    """Checks that a value is an integer in its range; True and False are none.

    Args:
        who: was given it, for the error.
        name: of the value.
        value: what was given.
        lowest: the least that it may be.
        highest: the most; None is any.

    Raises:
        InvalidArgument: it is not.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < lowest or (highest is not None and value > highest):
        range_text = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise InvalidArgument(f"{who} needs {name} to be an integer of {range_text}, got {value!r}")


def check_port(who: str, name: str, value: Any) -> None:
    """Checks a port, where 0 takes a free one.

    Raises:
        InvalidArgument: it is none.
    """
    check_integer(who, name, value, 0, LARGEST_PORT)


def check_seconds(who: str, name: str, value: Any) -> None:
    """Checks that a value is a number of seconds, from 0, and finite.

    Raises:
        InvalidArgument: it is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        raise InvalidArgument(f"{who} needs {name} to be a number of seconds, 0 or more, got {value!r}")

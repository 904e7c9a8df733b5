"""One environment variable at a time: its text, an integer, a rank below its size. Errors name the variable."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradsync.errors import InvalidArgument

LARGEST_PORT = 65535


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """Gives a variable's text; an empty one counts as not set."""
    return environ.get(name, "").strip() or None


def read_integer(environ: Mapping[str, str], name: str) -> int:
    """Reads an integer.

    Raises:
        InvalidArgument: the variable holds something else.
    """
    text = environ[name].strip()
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise InvalidArgument(f"{name} needs to be an integer, got {text!r}")
    return int(text)


def read_pair(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Reads a rank and the size that bounds it.

    Raises:
        InvalidArgument: one of them is missing, malformed or out of range.
    """
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if value_of(environ, name) is None:
            raise InvalidArgument(f"{other}={environ[other]!r} is set, but {name} is not; set both or neither")
    size = read_integer(environ, size_name)
    if size < 1:
        raise InvalidArgument(f"{size_name} needs to be at least 1, got {size}")
    rank = read_integer(environ, rank_name)
    if not 0 <= rank < size:
        raise InvalidArgument(f"{rank_name} needs to be 0 to {size_name} - 1 = {size - 1}, got {rank}")
    return rank, size


def read_below(environ: Mapping[str, str], name: str, limit: int) -> int:
    """Reads an integer of 0 .. limit - 1.

    Raises:
        InvalidArgument: the variable holds something else.
    """
    value = read_integer(environ, name)
    if not 0 <= value < limit:
        raise InvalidArgument(f"{name} needs to be 0 to {limit - 1}, got {value}")
    return value


def read_port(environ: Mapping[str, str], name: str) -> int | None:
    """Reads a port, or None where the variable is not set.

    Raises:
        InvalidArgument: the variable holds something else.
    """
    text = value_of(environ, name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= LARGEST_PORT:
        raise InvalidArgument(f"{name} needs to be a port of 1 to {LARGEST_PORT}, got {text!r}")
    return int(text)

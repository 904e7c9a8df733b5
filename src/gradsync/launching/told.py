"""What another process has told in JSON, as the dataclass that it is meant to be: a buggy one may tell anything."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def from_told(kind: type[T], data: bytes | bytearray) -> T:
    """Returns a dataclass from a JSON object with its attributes.

    Raises:
        ValueError: it is no such object; the text says what is wrong with it.
    """
    try:
        told = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(told, dict):
        raise ValueError(f"needs to be an object, got {type(told).__name__}")
    known: tuple[Any, ...] = fields(kind)  # type: ignore[arg-type]
    types = get_type_hints(kind)
    names = {field.name for field in known}
    lacking = {field.name for field in known if field.default is MISSING} - told.keys()
    if lacking or told.keys() - names:
        raise ValueError(f"needs the attributes {sorted(names)}, got {sorted(told)}")
    for name, value in told.items():
        # A bool is an int to Python, and not here.
        if not isinstance(value, types[name]) or (isinstance(value, bool) and types[name] is not bool):
            raise ValueError(f"{name} needs to be {types[name]}, got {type(value).__name__}")
    return kind(**told)

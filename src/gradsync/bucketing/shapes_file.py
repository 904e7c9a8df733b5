"""Shapes files: a file lists the names, shapes and dtypes of gradients, in the order in which they are handed over.

AllreduceCallback.dump_shapes writes a shapes file, and `gradsync bench thresholds --model` reads it. The file is JSON:
a list of [name, shape] or [name, shape, dtype].
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gradsync.bucketing.plan import GradientSpec
from gradsync.errors import InvalidArgument
from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp

DEFAULT_DTYPE = "float32"
_DTYPES = [name for name, operations in OPERATIONS_BY_DTYPE.items() if ReduceOp.SUM in operations]
_EXAMPLE = '[["layer.weight", [64, 3], "float32"], ["layer.bias", [64]]]'


def write_shapes(path: str | Path, specs: Iterable[GradientSpec]) -> None:
    """Writes gradients to a file, one per line; an existing file is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    entries = (json.dumps([spec.label, spec.shape, spec.dtype]) for spec in specs)
    Path(path).write_text("[\n" + ",\n".join(f"  {entry}" for entry in entries) + "\n]\n", encoding="utf-8")


def read_shapes(path: str | Path) -> list[GradientSpec]:
    """Returns the gradients of a file, in the file's order; gradients without a dtype are float32.

    Raises:
        InvalidArgument: the file cannot be read, is not a list of gradients, is empty, or has a dtype that cannot be
            reduced. The text gives the index of the wrong entry, from 0.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"the shapes file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise _malformed(path, f"is not JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        got = "an empty list" if entries == [] else f"one {type(entries).__name__}"
        raise _malformed(path, f"needs a list of at least one gradient, got {got}")
    return [_spec(path, number, entry) for number, entry in enumerate(entries)]


def itemsize_of(dtype: str) -> int:
    """Returns the bytes of one element, also of bfloat16, which NumPy itself does not have."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _spec(path: str | Path, number: int, entry: Any) -> GradientSpec:
    if not isinstance(entry, list) or len(entry) not in (2, 3):
        raise _malformed(
            path, f"entry {number} needs to be [name, shape] or [name, shape, dtype], got {reprlib.repr(entry)}"
        )
    name, shape, dtype = entry if len(entry) == 3 else (*entry, None)
    if not isinstance(name, str):
        raise _malformed(path, f"entry {number} needs a string as name, got {reprlib.repr(name)}")
    if not isinstance(shape, list) or not all(_is_dimension(length) for length in shape):
        raise _malformed(
            path, f"entry {number}, {reprlib.repr(name)}, needs a shape of integers >= 0, got {reprlib.repr(shape)}"
        )
    dtype = DEFAULT_DTYPE if dtype is None else dtype
    if dtype not in _DTYPES:
        raise _malformed(
            path, f"entry {number}, {reprlib.repr(name)}, has dtype {reprlib.repr(dtype)}: use {', '.join(_DTYPES)}"
        )
    return GradientSpec(repr(name), tuple(shape), dtype, itemsize_of(dtype))


def _is_dimension(length: Any) -> bool:
    return isinstance(length, int) and not isinstance(length, bool) and length >= 0


def _malformed(path: str | Path, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"the shapes file {str(path)!r} {what}; it looks like {_EXAMPLE}, and callback.dump_shapes(path) writes one"
    )

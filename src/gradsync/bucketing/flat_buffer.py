"""Packing arrays into a flat buffer, and splitting them back out by offsets.

NumPy or CuPy is taken from the arrays, so that one text serves both devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from gradsync.arguments import integer_of
from gradsync.errors import InvalidArgument

Shape = Sequence[int]


def get_offsets(shapes: Sequence[Shape | None]) -> list[int]:
    """Returns where each array begins and ends in the flat buffer that holds them one after the other.

    Args:
        shapes: the shapes, in order. The shape () of a 0-d array counts as one element; None is (1,).

    Returns:
        [begin0, end0, begin1, end1, ...] in elements.

    Raises:
        InvalidArgument: no shape, or a dimension that is negative or no integer.
    """
    offsets: list[int] = []
    end = 0
    for shape in shapes:
        begin, end = end, end + prod(_checked_shape("get_offsets", shape))
        offsets += (begin, end)
    return offsets


def param_pack_concat(
    inputs: Sequence[Any], offsets: Any, offsets_val: Sequence[int] | None = None, *, out: Any = None
) -> Any:
    """Concatenates arrays of one dtype into one flat array.

    Args:
        inputs: arrays of any shape and layout, all of one dtype and one device; elements go in index (C) order.
        offsets: what get_offsets gave for their shapes; may be an array on the device.
        offsets_val: the same on the host, where `offsets` is on a device; taken in its place.
        out: 1-D contiguous array of that dtype with room for all elements; a new one when None.

    Returns:
        1-D array of offsets[-1] elements (`out`, or its beginning when it is larger).

    Raises:
        InvalidArgument: no inputs, mixed dtypes, offsets that do not fit the inputs, or an unfit `out`.
    """
    if not inputs:
        raise InvalidArgument("param_pack_concat needs at least one array, got none")
    bounds = [int(offset) for offset in (offsets if offsets_val is None else offsets_val)]
    dtype = inputs[0].dtype
    for array in inputs:
        if array.dtype != dtype:
            raise InvalidArgument(f"param_pack_concat needs one dtype, got {dtype} and {array.dtype}")
    _check_offsets("param_pack_concat", bounds, [array.size for array in inputs])
    xp = array_module(inputs[0])
    total = bounds[-1]
    if out is None:
        out = xp.empty(total, dtype)
    elif out.dtype != dtype or out.ndim != 1 or out.size < total or not out.flags.c_contiguous:
        raise InvalidArgument(
            f"param_pack_concat needs out as a contiguous 1-D array of at least {total} elements of {dtype}, "
            f"got shape {out.shape} of {out.dtype}"
        )
    flat = out[:total]
    xp.concatenate([array.reshape(-1) for array in inputs], out=flat)
    return flat


def param_pack_split(flat: Any, offsets: Any, shapes: Sequence[Shape | None]) -> list[Any]:
    """Splits a flat array into views of the given shapes: the inverse of param_pack_concat.

    Args:
        flat: 1-D contiguous array.
        offsets: what get_offsets gave for the shapes.
        shapes: the shapes, in order; None is (1,).

    Returns:
        One view into `flat` for each shape; writing to a view writes to `flat`.

    Raises:
        InvalidArgument: no shape, offsets that do not fit the shapes, or a `flat` that is too short or not flat.
    """
    bounds = [int(offset) for offset in offsets]
    checked = [_checked_shape("param_pack_split", shape) for shape in shapes]
    _check_offsets("param_pack_split", bounds, [prod(shape) for shape in checked])
    if flat.ndim != 1 or not flat.flags.c_contiguous or (bounds and flat.size < bounds[-1]):
        raise InvalidArgument(
            f"param_pack_split needs a contiguous 1-D array of at least {bounds[-1] if bounds else 0} elements, "
            f"got shape {flat.shape}"
        )
    return [
        flat[begin:end].reshape(shape) for begin, end, shape in zip(bounds[::2], bounds[1::2], checked, strict=True)
    ]


def _checked_shape(who: str, shape: Shape | None) -> tuple[int, ...]:
    if shape is None:
        return (1,)
    try:
        lengths = [integer_of(length) for length in shape]
    except TypeError:
        lengths = [None]
    checked = tuple([length for length in lengths if length is not None and length >= 0])
    if len(checked) < len(lengths):
        raise InvalidArgument(f"{who} needs shapes of integers >= 0, got {shape!r}")
    return checked


def _check_offsets(who: str, bounds: Sequence[int], sizes: Sequence[int]) -> None:
    ends = list(accumulate(sizes))
    expected = [bound for pair in zip([0, *ends], ends, strict=False) for bound in pair]
    if list(bounds) != expected:
        raise InvalidArgument(f"{who} needs the offsets of its shapes {expected}, got {list(bounds)}")


def array_module(array: Any) -> Any:
    """Returns the module whose functions work on `array`: numpy, or cupy for an array that is one of its own."""
    namespace = type(array).__module__.partition(".")[0]
    if namespace == "cupy":
        import cupy

        return cupy
    return np

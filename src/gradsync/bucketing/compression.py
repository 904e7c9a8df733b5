"""Compression and scales: gradients travel in half precision, scaled before and after the reduction.

    gradients -> encode: times prescale, rounded to the wire's dtype, packed -> all-reduce -> decode: times postscale

The dtype in which values are added up, and so the rounding, depends on the communicator. Shared memory, and MPI among
up to 16 ranks, add half precision up in float32, in rank order, and round the sum once. NCCL adds in the wire's own
dtype, in each step of its algorithm: sums over many ranks lose more there. float16 overflows beyond 65504, in the sum
too; a prescale of 1 / world_size with op "sum" keeps it within range. bfloat16 has the range of float32, but 8 bits of
precision; float16 has 11.

Over shared memory the backend scales and rounds the values while it copies them (Wire of reduction.py). In bucket
views, and over MPI, gradients without compression are scaled where they lie (Scaled), unless they are tiny.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsync.bucketing.lists import array_module
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import BackendUnavailable, InvalidArgument, UnsupportedDtype
from gradsync.reduction import OPERATIONS_BY_DTYPE, Array, ReduceOp, Wire, dtype_name

COMPRESSIONS = (None, "float16", "bfloat16")

# Arrays of a smaller average size are packed before they are converted.
_SMALL_ELEMENTS = 2**13
# And of this average size, before they are scaled: for float32 and float64 one call for each array costs little.
_TINY_ELEMENTS = 2**8
# Complex numbers, integers and half precision travel as they are.
_COMPRESSED = ("float32", "float64")


def validate_compression(name: Any) -> str | None:
    """Returns the name of the dtype in which gradients travel; None for their own.

    Raises:
        InvalidArgument: anything but None, "float16" or "bfloat16".
    """
    if name is None or (isinstance(name, str) and name in COMPRESSIONS):
        return name
    raise InvalidArgument(f"compression must be one of {', '.join(map(repr, COMPRESSIONS))}, got {name!r}")


class WireFormat:
    """The dtype and the scales in which gradients travel. Each callback has one, with memory for the packed values.

    Args:
        dtype_name: "float16" or "bfloat16": the dtype that float32 and float64 gradients travel in; None: their own.
        prescale: factor of the values before the reduction; finite and not 0.
        postscale: factor of the results, likewise.

    Attributes:
        dtype_name, prescale, postscale: see above.
        is_plain: whether no gradient is changed on its way, of whatever dtype.

    Raises:
        InvalidArgument: another compression, or a scale that is 0, not finite or no number.
        BackendUnavailable: bfloat16 without ml_dtypes.

    Source: prescale and postscale as horovod.allreduce's prescale_factor and postscale_factor.
    """

    def __init__(self, dtype_name: str | None = None, prescale: float = 1.0, postscale: float = 1.0) -> None:
        self.dtype_name = validate_compression(dtype_name)
        self.prescale = _checked_scale("prescale", prescale)
        self.postscale = _checked_scale("postscale", postscale)
        self.is_plain = self.dtype_name is None and self.prescale == self.postscale == 1.0
        self._dtype = None if self.dtype_name is None else _half_precision(self.dtype_name)
        self._memory: dict[np.dtype[Any], Array] = {}

    def settings(self) -> dict[str, str]:
        """Returns the options on which ranks must agree, and their values; none if nothing is changed."""
        settings = {"compression": self.dtype_name} if self.dtype_name else {}
        scales = {"prescale": self.prescale, "postscale": self.postscale}
        return settings | {name: str(scale) for name, scale in scales.items() if scale != 1.0}

    def __repr__(self) -> str:
        return f"WireFormat({self.dtype_name!r}, prescale={self.prescale}, postscale={self.postscale})"

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype in which gradients of a dtype travel."""
        return self._dtype if self._dtype is not None and dtype_name(dtype) in _COMPRESSED else dtype

    def changes(self, dtype: np.dtype[Any]) -> bool:
        """Whether gradients of a dtype are scaled or converted; if not, they travel as they are."""
        return self.prescale != 1.0 or self.postscale != 1.0 or self.wire_dtype(dtype) != dtype

    def for_backend(self, dtype: np.dtype[Any]) -> Wire:
        """Returns the form in which gradients of a dtype travel, for a backend that converts them itself.

        Raises:
            UnsupportedDtype: see check.
        """
        self.check(dtype)
        return Wire(self.wire_dtype(dtype), self.prescale, self.postscale)

    def only_scales(self, dtype: np.dtype[Any]) -> bool:
        """Whether gradients of a dtype travel in their own, multiplied by a scale."""
        return self.wire_dtype(dtype) == dtype and self.changes(dtype)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Refuses a gradient that cannot be scaled.

        Args:
            dtype: the gradient's dtype.

        Raises:
            UnsupportedDtype: a scale other than 1 for integers or bools.
        """
        name = dtype_name(dtype)
        if (self.prescale, self.postscale) == (1.0, 1.0) or ReduceOp.MEAN in OPERATIONS_BY_DTYPE.get(name, ()):
            return
        raise UnsupportedDtype(
            f"prescale {self.prescale} and postscale {self.postscale} need a floating or complex dtype, got "
            f"{name}: convert it with astype first, or leave both at 1"
        )

    def forget_memory(self) -> None:
        """Forgets the memory: the arrays of another communicator may be on another device."""
        self._memory.clear()

    def encode(self, sources: Sequence[Array], arrays: ArrayKind) -> Array:
        """Packs gradients one after the other, scaled and rounded, into memory that grows to the largest list.

        On a GPU this is work on the current stream. Encode, the reduction and decode must be on one stream, because the
        next list of the same dtype is packed into the same memory.

        Args:
            sources: 1-D arrays of one dtype on the communicator's device, at least one; see check.
            arrays: how the communicator handles arrays.

        Returns:
            1-D contiguous array of all elements in the wire's dtype, valid until the next call of encode.

        Raises:
            UnsupportedDtype: see check.
        """
        dtype = sources[0].dtype
        self.check(dtype)
        wire = self.wire_dtype(dtype)
        total = sum([source.size for source in sources])
        memory = self._memory.get(wire)
        if memory is None or memory.size < total:
            memory = self._memory[wire] = arrays.scratch(total, wire)
        flat: Array = memory[:total]
        if _are_small(sources, _SMALL_ELEMENTS):
            same = flat if wire == dtype else None
            together = array_module(flat).concatenate(sources, out=same)
            arrays.multiply(together, self.prescale, flat)
            return flat
        begin = 0
        for source in sources:
            end = begin + source.size
            arrays.multiply(source, self.prescale, flat[begin:end])
            begin = end
        return flat

    def decode(self, flat: Array, targets: Sequence[Array], arrays: ArrayKind) -> None:
        """Splits a reduced flat array into the gradients' own arrays and dtype, times postscale.

        Args:
            flat: the result of encode, reduced.
            targets: 1-D arrays of the sources' sizes, which may be the sources.
            arrays: how the communicator handles arrays.
        """
        scale, begin = self.postscale, 0
        if _are_small(targets, _SMALL_ELEMENTS):
            whole = flat if flat.dtype == targets[0].dtype else arrays.scratch(flat.size, targets[0].dtype)
            arrays.multiply(flat, scale, whole)
            for target in targets:
                end = begin + target.size
                target[...] = whole[begin:end]
                begin = end
            return
        for target in targets:
            end = begin + target.size
            arrays.multiply(flat[begin:end], scale, target)
            begin = end


class Compressed:
    """Packs gradients in the wire's format before their reduction; see Stage of for_bucketing.py.

    Args:
        wire: the format.
        targets: the arrays for the gradients' results.
        arrays: how the communicator handles arrays.
    """

    def __init__(self, wire: WireFormat, targets: Sequence[Array], arrays: ArrayKind) -> None:
        self._wire = wire
        self._targets = targets
        self._arrays = arrays

    def before(self, given: Sequence[Array]) -> Sequence[Array]:
        """Packs the gradients."""
        return [self._wire.encode(given, self._arrays)]

    def after(self, results: Sequence[Array]) -> Sequence[Array]:
        """Splits them into the targets."""
        self._wire.decode(results[0], self._targets, self._arrays)
        return self._targets


class Scaled:
    """Scales gradients where they lie, before their reduction and after it; see Stage of for_bucketing.py.

    This takes half the memory traffic of a scaled copy, and the reduction then finds the gradients in the cache. A
    read-only gradient is scaled into its target, so that all ranks reduce lists of equal sizes: the messages over MPI
    depend on them.

    Args:
        wire: the scales.
        targets: the arrays for the gradients' results; None if the gradients themselves get the results.
        arrays: how the communicator handles arrays.
    """

    def __init__(self, wire: WireFormat, targets: Sequence[Array] | None, arrays: ArrayKind) -> None:
        self._wire = wire
        self._targets = targets
        self._arrays = arrays

    def before(self, given: Sequence[Array]) -> Sequence[Array]:
        """Multiplies the gradients by prescale."""
        targets = self._targets
        if targets is None:
            return self._multiplied(given, self._wire.prescale)
        for source, target in zip(given, targets, strict=True):
            self._arrays.multiply(source, self._wire.prescale, target)
        return targets

    def after(self, results: Sequence[Array]) -> Sequence[Array]:
        """Multiplies the results by postscale."""
        return self._multiplied(results, self._wire.postscale)

    def _multiplied(self, flats: Sequence[Array], scale: float) -> Sequence[Array]:
        if scale != 1.0:
            self._arrays.multiply_in_place(flats, scale)
        return flats


def worth_packing(flats: Sequence[Array]) -> bool:
    """Whether it costs less to pack arrays, and scale them at once, than to scale each where it lies."""
    return _are_small(flats, _TINY_ELEMENTS if dtype_name(flats[0].dtype) in _COMPRESSED else _SMALL_ELEMENTS)


def _are_small(flats: Sequence[Array], elements: int) -> bool:
    return len(flats) > 1 and sum([flat.size for flat in flats]) < len(flats) * elements


def _checked_scale(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        scale = float(value) if is_number else math.nan
    except OverflowError:  # an integer beyond float64
        scale = math.inf
    if not math.isfinite(scale) or scale == 0.0:
        raise InvalidArgument(f"{name} must be a finite number other than 0, got {value!r}")
    return scale


def _half_precision(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise BackendUnavailable(
            f'compression="bfloat16" needs ml_dtypes, which gives NumPy and CuPy that dtype: pip install ml_dtypes '
            f"({error})"
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype

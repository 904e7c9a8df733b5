"""The options of an AllreduceCallback; also the compression and the scales of the gradients that are sent.

    gradients -> encode (prescale, round to half precision, pack) -> all-reduce -> decode (postscale, convert back)

The communicator decides in which dtype the values are added up, and so how they are rounded. Shared memory and MPI add
half-precision values up in float32, and round the sum once. NCCL may round in each step of its algorithm, so NCCL's
sums over many ranks are less accurate. float16 overflows beyond 65504, also in the sum; a prescale of 1 / world_size
with op "sum" keeps the sum within range. bfloat16 has the range of float32, but only 8 bits of precision, while float16
has 11 bits.

This module scales and rounds the values before and after the all-reduce (classes Scaled and Compressed), except over
shared memory: that backend scales and rounds the values while it copies them (see the class Wire in reduction.py). But
if gradients live in buckets and are only scaled, this module scales them over shared memory too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradsync.arguments import is_number
from gradsync.bucketing.lists import array_module
from gradsync.bucketing.values import POLICIES
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import BackendUnavailable, InvalidArgument, UnsupportedDtype
from gradsync.reduction import OPERATIONS_BY_DTYPE, Array, ReduceOp, Wire, check_operation, dtype_name

# Arrays whose average size is below this number of elements are packed before they are converted or scaled.
_SMALL_ELEMENTS = 2**13
# The dtypes that are compressed. Gradients of other dtypes are sent in their own dtype.
_COMPRESSED = ("float32", "float64")


class WireFormat:
    """The wire format of gradients: the dtype in which they are sent, and their scales.

    Each callback has one WireFormat, with memory for the packed values.

    Args:
        dtype_name: the dtype in which float32 and float64 gradients are sent, "float16" or "bfloat16"; None sends them
            in their own dtype.
        prescale: the factor by which values are multiplied before the reduction; finite and not 0.
        postscale: the factor by which results are multiplied after the reduction; finite and not 0.

    Attributes:
        dtype_name, prescale, postscale: see Args.

    Raises:
        InvalidArgument: the dtype name is unknown, or a scale is 0, not finite or not a number.
        BackendUnavailable: the dtype is bfloat16, and ml_dtypes is not installed.

    Source: prescale and postscale are the prescale_factor and postscale_factor of horovod.allreduce.
    """

    def __init__(self, dtype_name: str | None = None, prescale: float = 1.0, postscale: float = 1.0) -> None:
        if dtype_name is not None and (not isinstance(dtype_name, str) or dtype_name not in ("float16", "bfloat16")):
            raise InvalidArgument(f"compression must be one of None, 'float16', 'bfloat16', got {dtype_name!r}")
        self.dtype_name = dtype_name
        self.prescale = _checked_scale("prescale", prescale)
        self.postscale = _checked_scale("postscale", postscale)
        self._dtype = None if self.dtype_name is None else _half_precision(self.dtype_name)
        self._memory: dict[np.dtype[Any], Array] = {}

    def settings(self) -> dict[str, str]:
        """Returns the options of the wire format that differ from their defaults, with their values as text."""
        settings = {"compression": self.dtype_name} if self.dtype_name else {}
        scales = {"prescale": self.prescale, "postscale": self.postscale}
        return settings | {name: str(scale) for name, scale in scales.items() if scale != 1.0}

    def wire_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Returns the dtype in which gradients of the given dtype are sent."""
        return self._dtype if self._dtype is not None and dtype_name(dtype) in _COMPRESSED else dtype

    def changes(self, dtype: np.dtype[Any]) -> bool:
        """Whether gradients of a dtype are scaled or converted; if not, they are sent unchanged."""
        return self.prescale != 1.0 or self.postscale != 1.0 or self.wire_dtype(dtype) != dtype

    def for_backend(self, dtype: np.dtype[Any]) -> Wire:
        """Returns the wire dtype and the scales of gradients of a dtype, for a backend that converts them itself."""
        return Wire(self.wire_dtype(dtype), self.prescale, self.postscale)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Refuses a gradient that cannot be scaled.

        Args:
            dtype: the gradient's dtype.

        Raises:
            UnsupportedDtype: the dtype is an integer or bool, and a scale is not 1.
        """
        name = dtype_name(dtype)
        if (self.prescale, self.postscale) == (1.0, 1.0) or ReduceOp.MEAN in OPERATIONS_BY_DTYPE.get(name, ()):
            return
        raise UnsupportedDtype(
            f"prescale {self.prescale} and postscale {self.postscale} need a floating or complex dtype, got "
            f"{name}: convert the gradients with astype first, or leave both scales at 1"
        )

    def forget_memory(self) -> None:
        """Forgets the memory of packed values, because a new communicator may need memory on a different device."""
        self._memory.clear()

    def encode(self, sources: Sequence[Array], arrays: ArrayKind, memory: Array | None = None) -> Array:
        """Scales and rounds gradients, and packs them one after the other.

        On a GPU this work is queued on the current stream. Encode, the reduction and decode must use the same stream,
        because the next list of the same dtype is packed into the same memory.

        Args:
            sources: at least one 1-D array; all are of one dtype and on the communicator's device.
            arrays: the communicator's functions for arrays.
            memory: an array of the size of all sources together, in the dtype in which they are sent; or the only
                source itself. None takes memory that later calls use again.

        Returns:
            A 1-D contiguous array of all elements, in the dtype in which they are sent: `memory` or, if it is None, an
            array that is valid until the next call of encode.
        """
        dtype = sources[0].dtype
        wire = self.wire_dtype(dtype)
        flat = self._own_memory(sum([source.size for source in sources]), wire, arrays) if memory is None else memory
        if flat is sources[0] and self.prescale == 1.0:
            return flat
        if are_small(sources):
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

    def _own_memory(self, size: int, wire: np.dtype[Any], arrays: ArrayKind) -> Array:
        memory = self._memory.get(wire)
        if memory is None or memory.size < size:
            memory = self._memory[wire] = arrays.scratch(size, wire)
        own: Array = memory[:size]
        return own

    def decode(self, flat: Array, targets: Sequence[Array], arrays: ArrayKind) -> None:
        """Splits a reduced flat array into the gradients' own arrays; converts the dtype and multiplies by postscale.

        Args:
            flat: the reduced values, in the dtype in which they were sent; it may be the only target itself.
            targets: 1-D arrays with the sizes of the sources; they may be the sources themselves.
            arrays: the communicator's functions for arrays.
        """
        scale, begin = self.postscale, 0
        if flat is targets[0] and scale == 1.0:
            return
        if are_small(targets):
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
    """Converts, scales and packs gradients before their reduction; see the class Stage in for_bucketing.py.

    Args:
        wire: the format in which the gradients are sent.
        targets: the arrays that receive the reduced gradients.
        arrays: the communicator's functions for arrays.
    """

    def __init__(self, wire: WireFormat, targets: Sequence[Array], arrays: ArrayKind) -> None:
        self._wire = wire
        self._targets = targets
        self._arrays = arrays

    def before(self, given: Sequence[Array]) -> Sequence[Array]:
        """Packs the gradients."""
        return [self._wire.encode(given, self._arrays)]

    def after(self, results: Sequence[Array]) -> Sequence[Array]:
        """Converts and scales the reduced values, and copies them into the targets."""
        self._wire.decode(results[0], self._targets, self._arrays)
        return self._targets


class Scaled:
    """Scales gradients in place, before and after their reduction; see the class Stage in for_bucketing.py.

    Scaling in place needs less memory traffic than a scaled copy. If a gradient is read-only, its scaled values are
    written into its target. So all ranks reduce lists of equal sizes, even if only some ranks have read-only gradients:
    over MPI, lists of different sizes would need different messages.

    Args:
        wire: the wire format, which has the scales.
        targets: the arrays that receive the reduced gradients; None if the results overwrite the gradients.
        arrays: the communicator's functions for arrays.
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


def are_small(flats: Sequence[Array]) -> bool:
    """Whether packing arrays and converting them together costs less than converting each array."""
    return len(flats) > 1 and sum([flat.size for flat in flats]) < len(flats) * _SMALL_ELEMENTS


def _checked_scale(name: str, value: Any) -> float:
    try:
        scale = float(value) if is_number(value) else math.nan
    except OverflowError:  # an integer too large for float64
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


# -- All options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The options of a callback. Attributes that are not listed are arguments of AllreduceCallback.

    The constructor checks the options, except the sizes and `parameters`, which Planner and known_parameters() check.

    Attributes:
        op: the operator of the reduction: sum or mean.
        wire: the wire format that the options compression, prescale and postscale give.
    """

    op: ReduceOp
    threshold_bytes: Any
    first_bucket_bytes: Any
    parameters: Any
    missing: str
    gradient_as_bucket_view: bool
    wire: WireFormat
    nonfinite: str
    clip_norm: float | None
    lock_gradients: bool
    _accepted: set[np.dtype[Any]] = field(default_factory=set)  # dtypes that were checked before

    def __post_init__(self) -> None:
        _check_word("missing", self.missing, ("error", "zero"))
        _check_word("nonfinite", self.nonfinite, POLICIES)
        if not isinstance(self.lock_gradients, bool):
            raise InvalidArgument(f"lock_gradients must be True or False, got {self.lock_gradients!r}")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise InvalidArgument(
                f"clip_norm must be a number above 0, or None for no clipping, got {self.clip_norm!r}"
            )
        if self.parameters is None and self.gradient_as_bucket_view:
            raise InvalidArgument(
                "gradient_as_bucket_view=True needs parameters=..., such as a mapping of names to (shape, dtype), "
                "because each gradient lives in its own part of a bucket"
            )
        if self.parameters is None and self.missing == "zero":
            raise InvalidArgument('missing="zero" needs parameters=..., which names the gradients of each step')

    def threshold_or(self, default_bytes: int) -> Any:
        """Returns the option `threshold_bytes` unchecked, or the default if the option is None."""
        return default_bytes if self.threshold_bytes is None else self.threshold_bytes

    def settings(self) -> dict[str, str]:
        """Returns the options, except reduce_method, that must be equal on all ranks, with their values as text.

        The digests of the buckets and of the flush depend on these options. Options with default values are left out.
        """
        settings = self.wire.settings()
        if self.missing == "zero":
            settings["missing"] = '"zero"'
        if self.gradient_as_bucket_view:
            settings["gradient_as_bucket_view"] = ""
        if self.nonfinite != "off":
            settings["nonfinite"] = f'"{self.nonfinite}"'
        if self.clip_norm is not None:
            settings["clip_norm"] = str(float(self.clip_norm))
        return settings

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Refuses gradients of a dtype that cannot be reduced with these options.

        Raises:
            UnsupportedDtype: the dtype does not fit the options: e.g. integers cannot be averaged, scaled or clipped.
        """
        if dtype in self._accepted:
            return
        check_operation(self.op, dtype)
        self.wire.check(dtype)
        name = dtype_name(dtype)
        if self.clip_norm not in (None, math.inf) and ReduceOp.MEAN not in OPERATIONS_BY_DTYPE[name]:
            raise UnsupportedDtype(
                f"clip_norm {self.clip_norm} needs a floating or complex dtype, got {name}: convert the gradients with "
                'astype first; clip_norm=float("inf") computes the norm alone'
            )
        self._accepted.add(dtype)


def _check_word(name: str, word: Any, known: tuple[str, ...]) -> None:
    if not isinstance(word, str) or word not in known:
        raise InvalidArgument(f"{name} must be {' or '.join(map(repr, known))}, got {word!r}")

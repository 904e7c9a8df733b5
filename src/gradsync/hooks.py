"""`gs.hooks`: compressed reductions of gradient buckets, which move fewer bytes than an all-reduce.

Both hooks use error feedback: each rank keeps the error that compression has made in a step, and adds it to the
gradients of the next step. So over many steps the results add up to the true sum or mean, but for one step's error.
Sources: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs", Interspeech 2014 (section 3.1). On the rate of convergence, which stays that of SGD: Karimireddy et al.,
"Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.

A hook keeps one error for each bucket, so each callback needs its own hook. If the gradients of a bucket change (in the
first steps, or with another threshold), its error is reset. NaN and infinity affect the result of their own step, and
no later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gradsync.arguments import integer_of
from gradsync.bucketing.bucket_hook import BucketHook as BucketHook
from gradsync.bucketing.bucket_hook import GradientBucket as GradientBucket
from gradsync.bucketing.lists import array_module
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, dtype_name

_Signature = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], np.dtype[Any], type]

__all__ = ["BucketHook", "GradientBucket", "Int8Hook", "PowerSGDHook"]

_RENAMED = {"EightBitHook": "Int8Hook", "LowRankHook": "PowerSGDHook"}


def __getattr__(name: str) -> NoReturn:
    if name in _RENAMED:
        raise InvalidArgument(f"gs.hooks.{name} was renamed: use gs.hooks.{_RENAMED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_REAL = ("float16", "bfloat16", "float32", "float64")
_BLOCK_ELEMENTS = 256
_LARGEST = 127  # the largest absolute value in an int8
_INT8, _UINT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.float32)


class Int8Hook:
    """Sends gradients as int8, with one float32 scale for each 256 elements: about a quarter of float32's bytes.

    Each rank divides every block by 1/127 of its largest absolute value and rounds. All ranks gather these numbers, and
    add them up in rank order in float32 (float64 gradients in float64), so every rank gets the same bits. The error of
    one step is at most 1/254 of the block's largest value on each rank.

    With p ranks, each rank receives (p - 1) / 4 times the bytes of the gradients; an all-reduce moves about twice their
    bytes. So the hook saves bytes on up to 8 ranks, most on two. Integers and complex numbers are all-reduced without
    compression.

    Source: blocks with scales as in QSGD (Alistarh et al., NeurIPS 2017, section 4), rounded to nearest, with error
    feedback.
    """

    def __init__(self) -> None:
        self._errors: dict[int, tuple[_Signature, Array]] = {}

    def reset(self) -> None:
        """Resets the kept errors to zero."""
        self._errors.clear()

    def __call__(self, bucket: GradientBucket) -> Any:
        """Returns the reduced values in `bucket.flat`. Every rank must call it, for the same buckets in one order.

        Args:
            bucket: gradients of any floating dtype, on the host or a GPU; its flat buffer is overwritten.
        """
        flat, communicator = bucket.flat, bucket.communicator
        if not _is_compressible(bucket):
            return communicator.asynchronous.all_reduce(flat, bucket.op)
        xp, wide = array_module(flat), accumulation_dtype(flat.dtype)
        n, blocks = flat.size, -(-flat.size // _BLOCK_ELEMENTS)
        signature, error = self._errors.get(bucket.index, (None, None))
        if error is None or signature != _signature(bucket):
            error = xp.zeros((blocks, _BLOCK_ELEMENTS), wide)
            self._errors[bucket.index] = _signature(bucket), error
        message = xp.empty(blocks * (_FLOAT32.itemsize + _BLOCK_ELEMENTS), _UINT8)
        with np.errstate(all="ignore"):  # NaN and infinity show in the result
            error.reshape(-1)[:n] += flat
            own = _views(message, blocks)
            for some in _stretches(blocks, xp):
                _quantise(error[some], own.scales[some], own.steps[some], xp)
            gathered = communicator.all_gather(message).reshape(communicator.world_size, -1)
            parts = [_views(part, blocks) for part in gathered]
            for some in _stretches(blocks, xp):
                total = xp.zeros(error[some].shape, wide)
                for part in parts:
                    total += part.steps[some].astype(wide) * part.scales[some]
                begin, end = some.start * _BLOCK_ELEMENTS, min(some.stop * _BLOCK_ELEMENTS, n)
                _deliver(total.reshape(-1)[: end - begin], flat[begin:end], bucket, is_mean=False)
        return flat


class _Blocks(NamedTuple):
    """Views of a message: the scales, float32 of shape (blocks, 1), and the steps, int8 of shape (blocks, 256)."""

    scales: Array
    steps: Array


def _views(message: Array, blocks: int) -> _Blocks:
    end = blocks * _FLOAT32.itemsize  # the scales come first, because they need alignment
    return _Blocks(message[:end].view(_FLOAT32).reshape(-1, 1), message[end:].view(_INT8).reshape(blocks, -1))


def _stretches(blocks: int, xp: Any) -> list[slice]:
    """Returns the blocks to process at a time: on a GPU all, on the host as many as fit a core's cache."""
    step = 128 if xp is np else blocks
    return [slice(begin, min(begin + step, blocks)) for begin in range(0, blocks, step)]


def _quantise(values: Array, scales: Array, steps: Array, xp: Any) -> None:
    """Rounds blocks to steps of their scales, and leaves the rounding errors in `values`."""
    scales[...] = abs(values).max(axis=1).reshape(-1, 1) / _LARGEST
    # A block of zeros has scale 0, and subnormal scales are too coarse for 127 steps. A block with NaN or infinity has
    # such a scale too, so its product is not finite either, on all ranks.
    usable = xp.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)
    rounded = values / xp.where(usable, scales, _FLOAT32.type(np.inf))
    xp.rint(rounded, out=rounded)
    steps[...] = rounded.astype(_INT8)
    rounded *= scales
    values -= rounded
    values[...] = xp.where(xp.isfinite(values), values, values.dtype.type(0))


@dataclass(eq=False, slots=True)
class _LowRankState:
    """The state of one bucket.

    Attributes:
        signature: the bucket's gradients, see _signature.
        error: the kept error, as a square matrix, padded with zeros.
        begin: the initial right factor.
        right: the right factor of the last step.
    """

    signature: _Signature
    error: Array
    begin: Array
    right: Array


class PowerSGDHook:
    """PowerSGD: sends a bucket, as a square matrix, as two thin factors of `rank` columns each.

    One step of power iteration improves the factors of the step before towards the matrix's largest singular vectors:
    P = M Q, averaged and made orthonormal; Q = M^T P, averaged; the result is P Q^T. Every rank gets the same bits if
    all ranks have the same processor and libraries. For n elements, 2 rank sqrt(n) are sent. If that is more than half
    of them, or the numbers are integers or complex, the bucket is all-reduced without compression.

    Args:
        rank: columns of the factors; more columns give a smaller error, and are slower.
        start_after: number of steps before compression begins, because gradients change most in the first steps.

    Raises:
        InvalidArgument: rank below 1, start_after below 0, or not integers.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, algorithm 1, with error feedback and warm start; on whole buckets, as PyTorch's
    batched_powerSGD_hook.
    """

    def __init__(self, rank: int = 4, start_after: int = 0) -> None:
        self.rank = _natural("rank", rank, 1)
        self.start_after = _natural("start_after", start_after, 0)
        self._states: dict[int, _LowRankState] = {}
        self._steps: dict[int, int] = {}
        self.settings = f"PowerSGDHook(rank={rank}, start_after={start_after})"  # must be equal on all ranks

    def reset(self) -> None:
        """Resets the kept errors, the factors and the number of steps."""
        self._states.clear()
        self._steps.clear()

    def __call__(self, bucket: GradientBucket) -> Any:
        """Returns the reduced values in `bucket.flat`. Every rank must call it, for the same buckets in one order.

        Args:
            bucket: gradients of any floating dtype, on the host or a GPU; its flat buffer is overwritten.
        """
        flat, communicator = bucket.flat, bucket.communicator
        step = self._steps[bucket.index] = self._steps.get(bucket.index, 0) + 1
        side = isqrt(max(flat.size - 1, 0)) + 1
        saves = 4 * side * self.rank <= flat.size
        if step <= self.start_after or not saves or not _is_compressible(bucket):
            return communicator.asynchronous.all_reduce(flat, bucket.op)
        xp, state = array_module(flat), self._state_of(bucket, side)
        with np.errstate(all="ignore"):  # NaN and infinity show in the result
            matrix = state.error
            matrix.reshape(-1)[: flat.size] += flat
            left = xp.matmul(matrix, state.right)
            communicator.all_reduce(left, ReduceOp.MEAN)
            left = xp.ascontiguousarray(xp.linalg.qr(left)[0])
            right = xp.matmul(matrix.T, left)
            communicator.all_reduce(right, ReduceOp.MEAN)
            result = xp.matmul(left, right.T)
            matrix -= result
            matrix.reshape(-1)[flat.size :] = 0
            matrix[...] = xp.where(xp.isfinite(matrix), matrix, matrix.dtype.type(0))
            state.right = xp.where(xp.isfinite(right), right, state.begin)
            _deliver(result.reshape(-1)[: flat.size], flat, bucket, is_mean=True)
        return flat

    def _state_of(self, bucket: GradientBucket, side: int) -> _LowRankState:
        flat = bucket.flat
        state = self._states.get(bucket.index)
        if state is None or state.signature != _signature(bucket):
            xp, wide = array_module(flat), accumulation_dtype(flat.dtype)
            begin = xp.asarray(_seeded((side, self.rank), bucket.index).astype(wide))
            state = _LowRankState(_signature(bucket), xp.zeros((side, side), wide), begin, begin)
            self._states[bucket.index] = state
        return state


def _signature(bucket: GradientBucket) -> _Signature:
    """Returns a bucket's names, shapes, dtype and array type; if they change, the kept error is reset."""
    return bucket.names, bucket.shapes, bucket.flat.dtype, type(bucket.flat)


def _is_compressible(bucket: GradientBucket) -> bool:
    return bucket.communicator.world_size > 1 and bucket.flat.size > 0 and dtype_name(bucket.flat.dtype) in _REAL


def _deliver(reduced: Array, target: Array, bucket: GradientBucket, *, is_mean: bool) -> None:
    """Writes a mean or sum into the bucket, converted to the bucket's operator."""
    world_size = bucket.communicator.world_size
    if is_mean and bucket.op is ReduceOp.SUM:
        reduced *= world_size
    elif not is_mean and bucket.op is ReduceOp.MEAN:
        bucket.communicator._arrays.divide(reduced, world_size)
    bucket.communicator._arrays.multiply(reduced, 1.0, target)


def _seeded(shape: tuple[int, int], seed: int) -> Array:
    """Returns numbers from -1 to 1, the same on every rank and in any version of NumPy.

    Source: NumPy's NEP 19, which guarantees the bits of PCG64, but not the results of distributions.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed])).random_raw(shape[0] * shape[1])
    numbers: Array = (bits.astype(np.float64) / 2**63 - 1).reshape(shape)
    return numbers


def _natural(name: str, value: Any, least: int) -> int:
    number = integer_of(value)
    if number is None or number < least:
        raise InvalidArgument(f"PowerSGDHook needs {name} to be an integer of at least {least}, got {value!r}")
    return number

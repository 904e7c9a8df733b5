"""`gs.hooks`: compressed reductions of gradient buckets, which can move fewer bytes than an all-reduce.

Both hooks use error feedback: each rank stores the error that compression makes in a step (the compression error), and
adds this error to the gradients of the next step. So over many steps, the sum of the results differs from the true sum
only by the error of one step. Source: Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014 (section 3.1). Karimireddy et al., "Error feedback
fixes SignSGD and other gradient compression schemes", ICML 2019, prove that SGD with error feedback converges at the
same rate as SGD, under their assumptions.

A hook stores the compression error of each bucket, so each callback needs its own hook. If the gradients in a bucket
change (in the first steps, or with a new bucket size), the hook sets the bucket's compression error to zero.
NaN and infinity affect the result of the step in which they occur, and no later result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from gradsync.arguments import check_integer
from gradsync.bucketing.lists import array_module
from gradsync.bucketing.reducer import BucketHook as BucketHook
from gradsync.bucketing.reducer import GradientBucket as GradientBucket
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, dtype_name

_Signature = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], np.dtype[Any], type]

__all__ = ["BucketHook", "GradientBucket", "Int8Hook", "PowerSGDHook"]

_REAL = ("float16", "bfloat16", "float32", "float64")
_BLOCK_ELEMENTS = 256
_LARGEST = 127  # the largest absolute value in an int8
_INT8, _UINT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.float32)


class Int8Hook:
    """Sends gradients as int8, with one float32 scale for each 256 elements: about a quarter of the bytes of float32.

    Each rank first adds its stored compression errors to its gradients. The scale of a block of 256 sums is 1/127 of
    their largest absolute value. Each rank divides each block by its scale, and rounds the quotients to int8. Every
    rank gathers the int8 values and scales of all ranks, multiplies each value by its scale, and adds the products in
    rank order. So every rank gets the same bits. The hook adds in float32, or in float64 for float64 gradients. The
    rounding error of a value is at most about 1/254 of the largest absolute value in its block.

    With p ranks, each rank receives about (p - 1) / 4 times the bytes of float32 gradients. In an all-reduce, each rank
    receives 2 (p - 1) / p times these bytes. So the hook moves fewer bytes than an all-reduce only with fewer than 8
    ranks. With 2 ranks, the hook moves about a quarter of the bytes of an all-reduce. The hook all-reduces integers and
    complex numbers without compression.

    Source: QSGD (Alistarh et al., NeurIPS 2017, section 4) also divides gradients into blocks with one scale each.
    Unlike QSGD, this hook rounds to the nearest integer, and uses error feedback.
    """

    def __init__(self) -> None:
        self._errors: dict[int, tuple[_Signature, Array]] = {}

    def reset(self) -> None:
        """Sets the stored compression errors to zero."""
        self._errors.clear()

    def __call__(self, bucket: GradientBucket) -> Any:
        """Returns `bucket.flat` with the reduced values, or the future of an all-reduce into `bucket.flat`.

        Every rank must call the hook for the same buckets in the same order.

        Args:
            bucket: a bucket of gradients, on the host or a GPU. The hook overwrites `bucket.flat`.
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
        with np.errstate(all="ignore"):  # NaN and infinity are visible in the result
            error.reshape(-1)[:n] += flat
            own = _views(message, blocks)
            for some in _block_ranges(blocks, xp):
                _quantise(error[some], own.scales[some], own.quotients[some], xp)
            gathered = communicator.all_gather(message).reshape(communicator.world_size, -1)
            parts = [_views(part, blocks) for part in gathered]
            for some in _block_ranges(blocks, xp):
                total = xp.zeros(error[some].shape, wide)
                for part in parts:
                    total += part.quotients[some].astype(wide) * part.scales[some]
                begin, end = some.start * _BLOCK_ELEMENTS, min(some.stop * _BLOCK_ELEMENTS, n)
                _write_result(total.reshape(-1)[: end - begin], flat[begin:end], bucket, is_mean=False)
        return flat


class _Blocks(NamedTuple):
    """Views of a message: float32 scales of shape (blocks, 1), and int8 quotients of shape (blocks, 256)."""

    scales: Array
    quotients: Array


def _views(message: Array, blocks: int) -> _Blocks:
    end = blocks * _FLOAT32.itemsize  # the scales come first, because they need alignment
    return _Blocks(message[:end].view(_FLOAT32).reshape(-1, 1), message[end:].view(_INT8).reshape(blocks, -1))


def _block_ranges(blocks: int, xp: Any) -> list[slice]:
    """Returns ranges of blocks to process together: all blocks on a GPU; on the host, blocks that fit into a cache."""
    step = 128 if xp is np else blocks
    return [slice(begin, min(begin + step, blocks)) for begin in range(0, blocks, step)]


def _quantise(values: Array, scales: Array, quotients: Array, xp: Any) -> None:
    """Rounds blocks to multiples of their scales, and leaves the rounding errors in `values`."""
    scales[...] = abs(values).max(axis=1).reshape(-1, 1) / _LARGEST
    # The quotients are 0 if the scale is unusable: a block of zeros has scale 0, and a subnormal scale is too inexact.
    # In a block with NaN or infinity, the scale is not finite either, so the products are not finite on any rank.
    usable = xp.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)
    rounded = values / xp.where(usable, scales, _FLOAT32.type(np.inf))
    xp.rint(rounded, out=rounded)
    quotients[...] = rounded.astype(_INT8)
    rounded *= scales
    values -= rounded
    values[...] = xp.where(xp.isfinite(values), values, values.dtype.type(0))


@dataclass(eq=False, slots=True)
class _LowRankState:
    """The state that PowerSGDHook keeps for one bucket.

    Attributes:
        signature: the names, shapes and types of the bucket's gradients, see _signature.
        error: the compression error of the last step, as a square matrix that is padded with zeros.
        initial: the right factor with which the first step begins.
        right: the right factor of the last step, with which the next step begins.
    """

    signature: _Signature
    error: Array
    initial: Array
    right: Array


class PowerSGDHook:
    """PowerSGD: treats a bucket as a square matrix M, and sends two factors of M, P and Q, with `rank` columns each.

    M is the sum of the bucket and the stored compression error. Each step does one power iteration, which moves
    the factors of the last step towards the largest singular vectors of M. The hook averages P = M Q over the ranks,
    and makes the columns of P orthonormal. Then the hook averages Q = M^T P. The result is P Q^T. Every rank gets the
    same bits if all ranks have the same processor and libraries. For a bucket of n elements, the hook sends about
    2 * rank * sqrt(n) elements. If the hook would send more than n / 2 elements, or if the elements are integers or
    complex numbers, the hook all-reduces the bucket without compression.

    Args:
        rank: the number of columns of each factor. More columns make the compression error smaller and the hook slower.
        start_after: the number of steps before compression begins. Gradients change most in the first steps.

    Raises:
        InvalidArgument: `rank` is not an integer of at least 1, or `start_after` is not an integer of at least 0.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, algorithm 1, with error feedback and warm start. Like PyTorch's batched_powerSGD_hook,
    the hook compresses whole buckets.
    """

    def __init__(self, rank: int = 4, start_after: int = 0) -> None:
        self.rank = check_integer("PowerSGDHook", "rank", rank, 1)
        self.start_after = check_integer("PowerSGDHook", "start_after", start_after, 0)
        self._states: dict[int, _LowRankState] = {}
        self._steps: dict[int, int] = {}
        self.settings = f"PowerSGDHook(rank={rank}, start_after={start_after})"  # these must be equal on all ranks

    def reset(self) -> None:
        """Resets the stored compression errors, the factors and the number of steps of all buckets."""
        self._states.clear()
        self._steps.clear()

    def __call__(self, bucket: GradientBucket) -> Any:
        """Returns `bucket.flat` with the reduced values, or the future of an all-reduce into `bucket.flat`.

        Every rank must call the hook for the same buckets in the same order.

        Args:
            bucket: a bucket of gradients, on the host or a GPU. The hook overwrites `bucket.flat`.
        """
        flat, communicator = bucket.flat, bucket.communicator
        step = self._steps[bucket.index] = self._steps.get(bucket.index, 0) + 1
        side = isqrt(max(flat.size - 1, 0)) + 1
        saves = 4 * side * self.rank <= flat.size
        if step <= self.start_after or not saves or not _is_compressible(bucket):
            return communicator.asynchronous.all_reduce(flat, bucket.op)
        xp, state = array_module(flat), self._state_of(bucket, side)
        with np.errstate(all="ignore"):  # NaN and infinity are visible in the result
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
            state.right = xp.where(xp.isfinite(right), right, state.initial)
            _write_result(result.reshape(-1)[: flat.size], flat, bucket, is_mean=True)
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
    """Returns a bucket's names, shapes, dtype and array type. If the signature changes, the hook resets its state."""
    return bucket.names, bucket.shapes, bucket.flat.dtype, type(bucket.flat)


def _is_compressible(bucket: GradientBucket) -> bool:
    return bucket.communicator.world_size > 1 and bucket.flat.size > 0 and dtype_name(bucket.flat.dtype) in _REAL


def _write_result(reduced: Array, target: Array, bucket: GradientBucket, *, is_mean: bool) -> None:
    """Writes a reduced array into a part of the bucket, and scales a mean to a sum, or a sum to a mean, if needed."""
    world_size = bucket.communicator.world_size
    if is_mean and bucket.op is ReduceOp.SUM:
        reduced *= world_size
    elif not is_mean and bucket.op is ReduceOp.MEAN:
        bucket.communicator._arrays.divide(reduced, world_size)
    bucket.communicator._arrays.multiply(reduced, 1.0, target)


def _seeded(shape: tuple[int, int], seed: int) -> Array:
    """Returns random numbers from -1 to 1 that are the same on every rank and in any version of NumPy.

    Source: NumPy's NEP 19, which guarantees the bits of PCG64, but not the results of distributions.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed])).random_raw(shape[0] * shape[1])
    numbers: Array = (bits.astype(np.float64) / 2**63 - 1).reshape(shape)
    return numbers

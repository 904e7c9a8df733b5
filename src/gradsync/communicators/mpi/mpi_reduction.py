"""Reductions over MPI.

With up to 16 ranks, each rank reduces its share of the elements in rank order with NumPy, and sends the result to the
other ranks. (A small array goes with the digest to every rank, which reduces the whole array: see MpiAgreement.) No
rank receives more bytes of a larger array than with MPI's best algorithm. Half-precision values are added in float32,
and NaN is treated as in NumPy. The result has the same bits as with the shared-memory backend, except for products of
complex numbers. With more ranks, MPI's own all-reduce needs fewer messages. So with more ranks the backend uses MPI's
all-reduce, after converting half precision to float32. Exceptions are the minimum and maximum of floating values,
because MPI does not define their results for NaN. A reduce-scatter is always computed in rank order.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4.5:
in an all-reduce that consists of a reduce-scatter and an all-gather, each rank sends 2 (n - 1) / n of the bytes of the
array. No algorithm can send less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.host_copy import cuts
from gradsync.communicators.mpi.mpi_requests import MpiRequests
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, divide_into, reduce_into

_BYTE = np.dtype(np.uint8)

# The size of a rank's share of a chunk of a large array. While one chunk is reduced, the next chunk is sent.
_CHUNK_BYTES = 2 * 1024 * 1024
_NATIVE_ELEMENTS = 2**28  # the most elements in one call of MPI

# The purposes of the buffers that later calls use again. The first two hold the contributions to the current chunk and
# to the next chunk. The third holds a result while its target still contains a contribution.
_ARRIVING, _ARRIVING_NEXT, _RESULT = range(3)

# MPI's operators. For a mean, the sum is divided afterwards.
_MPI_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.MEAN: "SUM",
    ReduceOp.PROD: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
}


class _Chunk(NamedTuple):
    """Some elements of an array; each rank reduces a share of these elements.

    Attributes:
        source: this rank's array.
        target: the array for the result.
        shares: the share of each rank, as a pair (begin, end) of indices in the source.
    """

    source: Array
    target: Array
    shares: Sequence[tuple[int, int]]


class _InFlight(NamedTuple):
    """A chunk whose shares the ranks are exchanging over MPI.

    Attributes:
        requests: the MPI requests that send and receive the shares.
        contributions: one array for each rank, which receives that rank's contribution to this rank's share; this
            rank's own contribution is already in its array.
    """

    requests: list[Any]
    contributions: list[Array]


class MpiReduction:
    """The reductions of one communicator. All ranks must agree on a reduction before they call a method of this class.

    Args:
        requests: the object that begins the communicator's MPI requests and waits for them.
    """

    def __init__(self, requests: MpiRequests) -> None:
        self._requests = requests
        self._rank, self._world_size = requests.rank, requests.world_size
        self._scratch: dict[tuple[int, np.dtype[Any]], Array] = {}

    def all_reduce(self, pairs: Sequence[tuple[Array, Array]], op: ReduceOp) -> None:
        """Reduces each source into its target, which may be the source. All arrays are flat and have the same dtype."""
        if not self._requests.is_direct and _is_defined_by_mpi(op, pairs[0][0].dtype):
            for source, target in pairs:
                self._all_reduce_natively(op, source, target)
        elif chunks := [chunk for source, target in pairs for chunk in self._cut(source, target)]:
            self._all_reduce_in_chunks(chunks, op)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp) -> None:
        """Reduces the ranks' sources, and writes this rank's part of the result into the target."""
        step = _chunk_elements(source.dtype)
        chunks = []
        for begin in range(0, max(largest_part(bounds), 1), step):
            shares = [(min(low + begin, high), min(low + begin + step, high)) for low, high in pairwise(bounds)]
            chunks.append(_Chunk(source, target[begin : begin + step], shares))
        self._stream(chunks, lambda chunk, contributions: self.reduce_in_order(op, contributions, chunk.target))

    # -- In rank order -----------------------------------------------------------------------------------------

    def _all_reduce_in_chunks(self, chunks: Sequence[_Chunk], op: ReduceOp) -> None:
        """Reduces this rank's share of each chunk, and sends the reduced share to the other ranks."""
        requests, begun = self._requests, list[Any]()

        def deliver(chunk: _Chunk, contributions: Sequence[Array]) -> None:
            places = [chunk.target[begin:end] for begin, end in chunk.shares]
            own = places[self._rank]
            self.reduce_in_order(op, contributions, own)
            begun.extend(requests.post_all([own.view(_BYTE)] * self._world_size, [p.view(_BYTE) for p in places]))

        self._stream(chunks, deliver, begun)
        requests.finish(begun)

    def _cut(self, source: Array, target: Array) -> list[_Chunk]:
        """Cuts elements into chunks, and each chunk into a share for every rank."""
        n = self._world_size
        return [
            _Chunk(source, target, list(pairwise([begin + (end - begin) * rank // n for rank in range(n + 1)])))
            for begin, end in cuts(source.size, _chunk_elements(source.dtype) * n)
        ]

    def _stream(
        self,
        chunks: Sequence[_Chunk],
        deliver: Callable[[_Chunk, Sequence[Array]], None],
        begun: Sequence[Any] = (),
    ) -> None:
        """Exchanges the shares of the chunks with the other ranks. While a chunk is reduced, the next chunk is sent.

        Args:
            chunks: the chunks, which have the same dtype, and the same bounds on every rank.
            deliver: a function to call for each chunk in order, with the chunk and the list of all ranks' contributions
                to this rank's share.
            begun: the list to which `deliver` adds the MPI requests that it begins.
        """
        requests, test_all = self._requests, self._requests.mpi.Request.Testall
        in_flight = self._exchange_shares(chunks[0], _ARRIVING)
        for number, chunk in enumerate(chunks):
            after = None
            if number + 1 < len(chunks):
                after = self._exchange_shares(chunks[number + 1], _ARRIVING if number % 2 else _ARRIVING_NEXT)
            requests.wait(partial(test_all, in_flight.requests), (in_flight, after, begun))
            deliver(chunk, in_flight.contributions)
            if after is not None:
                in_flight = after

    def _exchange_shares(self, chunk: _Chunk, purpose: int) -> _InFlight:
        """Begins to send each rank its share of this rank's elements, and to receive the other ranks' contributions."""
        low, high = chunk.shares[self._rank]
        contributions = self._buffers(purpose, chunk.source.dtype, high - low, self._world_size)
        parts = [chunk.source[begin:end].view(_BYTE) for begin, end in chunk.shares]
        requests = self._requests.post_all(parts, [contribution.view(_BYTE) for contribution in contributions])
        contributions[self._rank] = chunk.source[low:high]
        return _InFlight(requests, contributions)

    def reduce_in_order(self, op: ReduceOp, contributions: Sequence[Array], target: Array) -> None:
        """Reduces the contributions in rank order. This rank's own contribution may be in the target's memory."""
        if not target.size:
            return
        own_at = target.__array_interface__["data"][0]
        is_late = self._rank >= 2 and contributions[self._rank].__array_interface__["data"][0] == own_at
        # reduce_into reads the first two contributions before it writes the target.
        into = self._buffers(_RESULT, target.dtype, target.size)[0] if is_late else target
        reduce_into(op, contributions, into)
        if into is not target:
            np.copyto(target, into)

    def _buffers(self, purpose: int, dtype: np.dtype[Any], elements: int, count: int = 1) -> list[Array]:
        """Returns `count` arrays of equal size. Later calls for the same purpose use the same memory again."""
        memory = self._scratch.get((purpose, dtype))
        if memory is None or memory.size < count * elements:
            memory = self._scratch[purpose, dtype] = np.empty(count * elements, dtype)
        return [memory[number * elements : (number + 1) * elements] for number in range(count)]

    # -- By MPI ------------------------------------------------------------------------------------------------

    def _all_reduce_natively(self, op: ReduceOp, source: Array, target: Array) -> None:
        """Reduces with MPI's own reduction, in parts that are small enough for one MPI call."""
        requests, dtype = self._requests, accumulation_dtype(source.dtype)
        of_mpi = getattr(requests.mpi, _MPI_OPS[op])
        for low, high in cuts(source.size, _NATIVE_ELEMENTS):
            wide = source[low:high].astype(dtype, copy=False)
            result = np.empty(high - low, dtype)
            # MPI has no minimum for bools, so bools are sent as bytes. mpi4py finds the other MPI datatypes.
            sent, received = (wide.view(_BYTE), result.view(_BYTE)) if dtype.kind == "b" else (wide, result)
            requests.finish([requests.comm.Iallreduce(sent, received, of_mpi)], (wide, result))
            if op is ReduceOp.MEAN:
                divide_into(result, self._world_size, result)
            np.copyto(target[low:high], result, casting="same_kind")  # the target may have a narrower dtype


def _is_defined_by_mpi(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether MPI defines the result of its own reduction. For NaN, MPI does not define the minimum and maximum."""
    return op not in (ReduceOp.MIN, ReduceOp.MAX) or accumulation_dtype(dtype).kind != "f"


def _chunk_elements(dtype: np.dtype[Any]) -> int:
    return max(1, _CHUNK_BYTES // dtype.itemsize)

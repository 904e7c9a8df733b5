"""Reductions over MPI.

Among few ranks, each reduces its share of the elements in rank order with NumPy, and hands the result on: no rank
receives more bytes than by MPI's best algorithm, half precision accumulates in float32, NaN counts as in NumPy, and the
bits are those of shared memory. Among many, MPI's own reductions need fewer messages; they take the dtypes and
operators that MPI has, and half precision as float32.

Source of the cost: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
section 4.5: reduce-scatter and all-gather move 2 (n - 1) / n of the bytes, which is the least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.mpi.native_reduction import Native, native_reduction
from gradsync.communicators.mpi.transport import TAG_COLLECTIVE, TAG_SHARES, MpiTransport
from gradsync.communicators.mpi.waiting import Wait
from gradsync.communicators.pieces import cuts
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, reduce_into

_BYTE = np.dtype(np.uint8)

# Up to here all contributions travel whole, in one step instead of two.
_SMALL_BYTES = 32 * 1024
# What of a large array is in flight at a time, for each rank: the next chunk travels while this one is being reduced.
_CHUNK_BYTES = 2 * 1024 * 1024
_NATIVE_ELEMENTS = 2**28  # of one call of MPI

# What memory that stays from call to call holds: what comes from the others, of two chunks at a time; a result whose
# place is still read; half precision, widened.
_COMING, _COMING_NEXT, _RESULT, _WIDENED = range(4)


class Chunk(NamedTuple):
    """Some elements of an array, of which each rank reduces a share.

    Attributes:
        source: this rank's array.
        shares: of every rank, as [begin, end) in the source.
    """

    source: Array
    shares: Sequence[tuple[int, int]]


class InFlight(NamedTuple):
    """Contributions of other ranks to this rank's share of a chunk, on their way.

    Attributes:
        requests: of MPI.
        contributions: by rank; this rank's own are there already.
    """

    requests: list[Any]
    contributions: list[Array]


class MpiReduction:
    """The reductions of one communicator; all ranks have agreed.

    Args:
        transport: this rank's.
    """

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._rank, self._world_size = transport.rank, transport.world_size
        self._scratch: dict[tuple[int, np.dtype[Any]], Array] = {}

    # -- The hooks' work ---------------------------------------------------------------------------------------

    def all_reduce(self, pairs: Sequence[tuple[Array, Array]], op: ReduceOp) -> None:
        """Reduces each source into its target, which may be the source; flat arrays, all of one dtype."""
        native = self._native(op, pairs[0][0].dtype)
        large: list[tuple[Array, Array]] = []
        for source, target in pairs:
            if native:
                self._reduce_natively(native, source, target, self._transport.comm.Iallreduce)
            elif source.nbytes <= _SMALL_BYTES:
                self._reduce_in_order(op, self._gather_whole(source), target)
            else:
                large.append((source, target))
        if large:
            self._all_reduce_in_chunks(large, op)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int) -> None:
        """Reduces into the root's target, which may be its source."""
        transport = self._transport
        if native := self._native(op, source.dtype):

            def begin(piece: Any, into: Any, mpi_op: Any) -> Any:
                return transport.comm.Ireduce(piece, into if target is not None else None, mpi_op, root)

            self._reduce_natively(native, source, target, begin)
            return
        if source.nbytes > _SMALL_BYTES:
            self._reduce_in_chunks(source, target, op, root)
        elif target is None:
            flat = source.view(_BYTE)
            transport.waiting.finish(transport.post([(root, flat)], [], TAG_COLLECTIVE), flat)
        else:
            incoming = self._buffers(_COMING, source.dtype, source.size, self._world_size)
            receives = [(peer, incoming[peer].view(_BYTE)) for peer in transport.peers]
            transport.waiting.finish(transport.post([], receives, TAG_COLLECTIVE), incoming)
            incoming[root] = source
            self._reduce_in_order(op, incoming, target)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp) -> None:
        """Reduces; this rank gets its part, which may be the target."""
        if bounds[-1] < _NATIVE_ELEMENTS and (native := self._native(op, source.dtype)):
            self._reduce_scatter_natively(native, source, target, bounds)
            return
        step = _chunk_elements(source.dtype)
        chunks, targets = [], []
        for begin in range(0, max(largest_part(bounds), 1), step):
            shares = [(min(low + begin, high), min(low + begin + step, high)) for low, high in pairwise(bounds)]
            chunks.append(Chunk(source, shares))
            targets.append(target[begin : begin + step])
        self._stream(chunks, lambda number, contributions: self._reduce_in_order(op, contributions, targets[number]))

    # -- In rank order -----------------------------------------------------------------------------------------

    def _all_reduce_in_chunks(self, pairs: Sequence[tuple[Array, Array]], op: ReduceOp) -> None:
        transport, requests = self._transport, list[Any]()
        placed = [(chunk, target) for source, target in pairs for chunk in self._chunks(source)]

        def hand_on(number: int, contributions: Sequence[Array]) -> None:
            (_, shares), target = placed[number]
            low, high = shares[self._rank]
            self._reduce_in_order(op, contributions, target[low:high])
            places = [target[begin:end].view(_BYTE) for begin, end in shares]
            requests.extend(transport.post_all([places[self._rank]] * self._world_size, places, TAG_SHARES))

        self._stream([chunk for chunk, _ in placed], hand_on, requests, pairs)
        transport.waiting.finish(requests, pairs)

    def _reduce_in_chunks(self, source: Array, target: Array | None, op: ReduceOp, root: int) -> None:
        transport, requests, memory = self._transport, list[Any](), [target]
        chunks = self._chunks(source)

        def hand_in(number: int, contributions: Sequence[Array]) -> None:
            shares = chunks[number].shares
            low, high = shares[self._rank]
            if target is None:
                result = np.empty(high - low, source.dtype)
                memory.append(result)
                self._reduce_in_order(op, contributions, result)
                requests.extend(transport.post([(root, result.view(_BYTE))], [], TAG_SHARES))
                return
            self._reduce_in_order(op, contributions, target[low:high])
            places = [target[begin:end].view(_BYTE) for begin, end in shares]
            requests.extend(transport.post([], [(peer, places[peer]) for peer in transport.peers], TAG_SHARES))

        self._stream(chunks, hand_in, requests, memory)
        transport.waiting.finish(requests, memory)

    def _chunks(self, source: Array) -> list[Chunk]:
        """Cuts elements into chunks, and each of them into a share for every rank."""
        n = self._world_size
        chunks = []
        for begin, end in cuts(source.size, _chunk_elements(source.dtype) * n):
            shares = list(pairwise([begin + (end - begin) * rank // n for rank in range(n + 1)]))
            chunks.append(Chunk(source, shares))
        return chunks

    def _stream(
        self,
        chunks: Sequence[Chunk],
        reduce: Callable[[int, Sequence[Array]], None],
        also: Sequence[Any] = (),
        memory: object = None,
    ) -> None:
        """Exchanges the shares of chunk after chunk; one travels while the one before is being reduced.

        Args:
            chunks: all of one dtype, the same cuts on every rank.
            reduce: reduce(number of the chunk, contributions of all ranks to this rank's share) is called for each, in
                order.
            also, memory: requests that `reduce` begins meanwhile, and what they work on; kept with the own.
        """
        waiting, test_all = self._transport.waiting, self._transport.mpi.Request.Testall
        in_flight = self._exchange_shares(chunks[0], 0)
        for number in range(len(chunks)):
            after = self._exchange_shares(chunks[number + 1], number + 1) if number + 1 < len(chunks) else None
            everything = [*in_flight.requests, *(after.requests if after else []), *also]
            waiting.until(Wait(partial(test_all, in_flight.requests), everything, (chunks, in_flight, after, memory)))
            reduce(number, in_flight.contributions)
            if after is not None:
                in_flight = after

    def _exchange_shares(self, chunk: Chunk, number: int) -> InFlight:
        """Sends every rank its share of this rank's elements, and begins to receive the others' of the own share."""
        transport = self._transport
        low, high = chunk.shares[self._rank]
        purpose = _COMING_NEXT if number % 2 else _COMING
        contributions = self._buffers(purpose, chunk.source.dtype, high - low, self._world_size)
        parts = [chunk.source[begin:end].view(_BYTE) for begin, end in chunk.shares]
        requests = transport.post_all(parts, [coming.view(_BYTE) for coming in contributions], TAG_COLLECTIVE)
        contributions[self._rank] = chunk.source[low:high]
        return InFlight(requests, contributions)

    def _gather_whole(self, source: Array) -> list[Array]:
        transport = self._transport
        incoming = self._buffers(_COMING, source.dtype, source.size, self._world_size)
        flat = source.view(_BYTE)
        places = [coming.view(_BYTE) for coming in incoming]
        requests = transport.post_all([flat] * self._world_size, places, TAG_COLLECTIVE)
        transport.waiting.finish(requests, (flat, incoming))
        incoming[self._rank] = source
        return incoming

    def _reduce_in_order(self, op: ReduceOp, contributions: Sequence[Array], target: Array) -> None:
        """Reduces in rank order, the same on all ranks; a contribution may lie in the target's very memory."""
        if not target.size:
            return
        own_at = target.__array_interface__["data"][0]
        is_late = self._rank >= 2 and contributions[self._rank].__array_interface__["data"][0] == own_at
        # Half precision has room of its own anyway, and the first two are read before the target is written.
        into = self._buffers(_RESULT, target.dtype, target.size)[0] if is_late else target
        wide = accumulation_dtype(target.dtype)
        accumulator = None if wide == target.dtype else self._buffers(_WIDENED, wide, target.size)[0]
        reduce_into(op, contributions, into, accumulator)
        if into is not target:
            np.copyto(target, into)

    def _buffers(self, purpose: int, dtype: np.dtype[Any], elements: int, count: int = 1) -> list[Array]:
        """Returns so many arrays of so many elements each, in memory that stays from call to call."""
        memory = self._scratch.get((purpose, dtype))
        if memory is None or memory.size < count * elements:
            memory = self._scratch[purpose, dtype] = np.empty(count * elements, dtype)
        return [memory[number * elements : (number + 1) * elements] for number in range(count)]

    # -- By MPI ------------------------------------------------------------------------------------------------

    def _native(self, op: ReduceOp, dtype: np.dtype[Any]) -> Native | None:
        """Returns how MPI does it; None where the ranks are few, and where it cannot, or would lose NaN."""
        if self._transport.is_direct:
            return None
        return native_reduction(self._transport.mpi, op, dtype, self._world_size)

    def _reduce_natively(
        self,
        native: Native,
        source: Array,
        target: Array | None,
        begin: Callable[[Any, Any, Any], Any],
    ) -> None:
        """Calls begin(source, result, operator) of MPI for as much as it takes at a time; no target: no result here."""
        for low, high in cuts(source.size, _NATIVE_ELEMENTS):
            wide = source[low:high].astype(native.dtype, copy=False)
            result = np.empty(high - low, native.dtype)
            request = begin(native.shown(wide), native.shown(result), native.op)
            self._transport.waiting.finish([request], (wide, result))
            if target is not None:
                native.finish(result, target[low:high])

    def _reduce_scatter_natively(self, native: Native, source: Array, target: Array, bounds: Bounds) -> None:
        transport, counts = self._transport, [high - low for low, high in pairwise(bounds)]
        wide = source.astype(native.dtype, copy=False)
        result = np.empty(target.size, native.dtype)
        request = transport.comm.Ireduce_scatter(native.shown(wide), native.shown(result), counts, native.op)
        transport.waiting.finish([request], (wide, result))
        native.finish(result, target)


def _chunk_elements(dtype: np.dtype[Any]) -> int:
    return max(1, _CHUNK_BYTES // dtype.itemsize)

"""The two ways in which ranks reduce through shared memory; both fix the order of the operands.

Exchange, for small lists: every rank publishes all its values, meets the others, and reduces everything. One barrier.

Write-back, for large ones: every rank publishes what others own, reduces the slice that it owns, and writes the result
back into the others' memory, from where they fetch it. Each rank reads and reduces 1/n of everything, whatever n.

Either way an element is reduced in rank order, so all ranks get the same bits, and the same inputs give the same bits
from run to run. The size of the list does not matter either, but for complex products, which NumPy rounds differently
in vector and scalar code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import copy_words, pack_words, split_words, word_dtype
from gradsync.communicators.shared_barrier import SharedBarrier
from gradsync.communicators.stream_plan import Chunk, Region, plan_stream
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, reduce_into

SlotArrays = tuple[tuple[Array, ...], ...]  # [parity][rank] -> 1-D array in shared memory
SlotsOf = Callable[[np.dtype[Any]], SlotArrays]


class Exchange:
    """Publish, meet, reduce everything.

    Args:
        slots_of: the shared buffers, under a dtype.
        barrier: where the ranks meet.
        scratch: private memory.
        rank: this rank.
    """

    def __init__(self, slots_of: SlotsOf, barrier: SharedBarrier, scratch: Scratch, rank: int) -> None:
        self._slots_of = slots_of
        self._barrier = barrier
        self._scratch = scratch
        self._rank = rank

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target; all of them together fit into a slot.

        A round uses the slots of its parity. They are written again two rounds later, which a rank enters only after
        all have left the round between, and so have read them.
        """
        dtype = sources[0].dtype
        word = word_dtype(dtype)
        total = sum([source.size for source in sources])
        slots = self._slots_of(dtype)[(self._barrier.round + 1) & 1]
        pack_words([source.view(word) for source in sources], slots[self._rank][:total].view(word))
        self._barrier.meet(agreement)
        contributions = [slot[:total] for slot in slots]
        accumulator = self._scratch.accumulator(dtype, total)
        if len(targets) == 1:
            reduce_into(op, contributions, targets[0], accumulator)
            return
        result = self._scratch.result(dtype, total)
        reduce_into(op, contributions, result, accumulator)
        split_words(result.view(word), [target.view(word) for target in targets])


class WriteBack:
    """Publish what others own, reduce what this rank owns, write it back.

    Args:
        slots_of, barrier, scratch, rank: as for Exchange.
        world_size: number of ranks.
        chunk_bytes: size of a slot: what is in flight between two barriers.
    """

    def __init__(
        self,
        slots_of: SlotsOf,
        barrier: SharedBarrier,
        scratch: Scratch,
        rank: int,
        world_size: int,
        chunk_bytes: int,
    ) -> None:
        self._slots_of = slots_of
        self._barrier = barrier
        self._scratch = scratch
        self._rank = rank
        self._world_size = world_size
        self._chunk_bytes = chunk_bytes
        self._peers = [peer for peer in range(world_size) if peer != rank]

    def all_reduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
    ) -> None:
        """Reduces each source into its target; see Communicator.all_reduce_list.

        Three chunks are in flight: one published, one reduced, one fetched between two barriers. A rank publishes
        into its own slot only after fetching the chunk that was there two steps before, and others touch that slot
        only between the barriers after its publication and after their reduction.
        """
        dtype = sources[0].dtype
        word = word_dtype(dtype)
        source_words = [source.view(word) for source in sources]
        target_words = [target.view(word) for target in targets]
        slots, slot_words = self._slots_of(dtype), self._slots_of(word)
        sizes = tuple([source.size for source in sources])
        itemsize = dtype.itemsize
        chunks = plan_stream(sizes, self._chunk_bytes // itemsize, itemsize, self._rank, self._world_size)
        count = len(chunks)
        for step in range(count + 2):
            own_slot = slot_words[step & 1][self._rank]
            if step >= 2:
                self._fetch(chunks[step - 2], own_slot, target_words)
            if step < count:
                self._publish(chunks[step], source_words, own_slot)
            if 1 <= step <= count:
                parity = (step - 1) & 1
                self._reduce(chunks[step - 1].own, sources, targets, slots[parity], slot_words[parity], op)
            if step <= count:
                self._barrier.meet(agreement)

    @staticmethod
    def _publish(chunk: Chunk, source_words: Sequence[Array], own_slot: Array) -> None:
        for begin, end, pieces in chunk.others:
            pack_words([source_words[array][low:high] for array, low, high in pieces], own_slot[begin:end])

    @staticmethod
    def _fetch(chunk: Chunk, own_slot: Array, target_words: Sequence[Array]) -> None:
        for begin, end, pieces in chunk.others:
            split_words(own_slot[begin:end], [target_words[array][low:high] for array, low, high in pieces])

    def _reduce(
        self,
        region: Region,
        sources: Sequence[Array],
        targets: Sequence[Array],
        slots: Sequence[Array],
        slot_words: Sequence[Array],
        op: ReduceOp,
    ) -> None:
        """Reduces this rank's slice of a chunk, and writes the result back to where each peer fetches it."""
        begin, end, pieces = region
        length = end - begin
        if not length:
            return
        dtype = slots[0].dtype
        word = slot_words[0].dtype
        contributions = [slot[begin:end] for slot in slots]
        if len(pieces) == 1:
            array, low, high = pieces[0]
            own, target = sources[array][low:high], targets[array][low:high]
        else:
            own = target = self._scratch.own(dtype, length)
            pack_words([sources[array][low:high].view(word) for array, low, high in pieces], own.view(word))
        contributions[self._rank] = own
        # Reduced in rank order, the third rank's values and later ones would be overwritten before they are read.
        result = target if self._rank <= 1 else self._scratch.result(dtype, length)
        reduce_into(op, contributions, result, self._scratch.accumulator(dtype, length))
        words = result.view(word)
        for peer in self._peers:
            copy_words(words, slot_words[peer][begin:end])
        if len(pieces) > 1 or result is not target:
            split_words(words, [targets[array][low:high].view(word) for array, low, high in pieces])


class Scratch:
    """Private memory for one chunk, as arrays of any dtype; allocated once.

    Args:
        size_bytes: of a chunk.
    """

    def __init__(self, size_bytes: int) -> None:
        self._own = np.empty(size_bytes, np.uint8)
        self._result = np.empty(size_bytes, np.uint8)
        self._accumulator = np.empty(0, np.float32)

    def own(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns room for this rank's contribution."""
        return self._own[: length * dtype.itemsize].view(dtype)

    def result(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns room for a result that does not go straight to where it belongs."""
        return self._result[: length * dtype.itemsize].view(dtype)

    def accumulator(self, dtype: np.dtype[Any], length: int) -> Array | None:
        """Returns room for half precision to add up in, or None where the dtype adds up in itself."""
        if accumulation_dtype(dtype) == dtype:
            return None
        if self._accumulator.size < length:
            self._accumulator = np.empty(length, np.float32)
        return self._accumulator[:length]

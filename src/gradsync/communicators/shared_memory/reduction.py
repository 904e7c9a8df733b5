"""The two ways in which ranks reduce through shared memory; both fix the order of the operands.

AllAtOnce, for small lists: every rank publishes all its values, meets the others, and reduces everything. One barrier.

WriteBack, for large ones: chunk by chunk, every rank publishes what others own, reduces the slice that it owns, and
writes the result back into the others' memory, from where they fetch it. Each rank reads and reduces 1/n of everything,
whatever n. Results in a ring of the reducer's own, which others would fetch from there, took a quarter longer.

Either way an element is reduced in rank order, so all ranks get the same bits, and the same inputs give the same bits
from run to run. The size of the list does not matter either, but for complex products, which NumPy rounds differently
in vector and scalar code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import copy_words, pack_words, split_words, word_dtype
from gradsync.communicators.shared_memory.slots import Slots
from gradsync.communicators.shared_memory.stream_plan import Chunk, Region, plan_stream
from gradsync.communicators.shared_memory.workplace import Workplace
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, divide_into, reduce_into

# Below, on average, pieces are gathered first: a NumPy call costs as much as some kilobytes.
_WORTH_A_CALL_BYTES = 4096


class AllAtOnce:
    """Publish, meet, reduce everything.

    Args:
        workplace: this rank's.
        scratch: private memory.
    """

    def __init__(self, workplace: Workplace, scratch: Scratch) -> None:
        self._rings = workplace.rings
        self._barrier = workplace.barrier
        self._scratch = scratch
        self._rank = workplace.rank

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target; all of them together fit into a round."""
        dtype = sources[0].dtype
        word = word_dtype(dtype)
        total = sum([source.size for source in sources])
        size_bytes = total * dtype.itemsize
        begin = self._rings.take(size_bytes) // word.itemsize
        began = time.perf_counter()
        pack_words([source.view(word) for source in sources], self._rings.of(word)[self._rank][begin : begin + total])
        self._rings.wrote(size_bytes, began)
        self._barrier.meet(agreement)
        contributions = [
            ring[place // dtype.itemsize :][:total]
            for ring, place in zip(self._rings.of(dtype), self._rings.places(size_bytes), strict=True)
        ]
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
        workplace, scratch: as for AllAtOnce.
        slots: memory of its own; a chunk fits into a slot.
    """

    def __init__(self, workplace: Workplace, scratch: Scratch, slots: Slots) -> None:
        self._slots_of = slots.of
        self._barrier = workplace.barrier
        self._scratch = scratch
        self._rank = rank = workplace.rank
        self._world_size = world_size = workplace.world_size
        self._chunk_bytes = workplace.chunk_bytes
        self._peers = [peer for peer in range(world_size) if peer != rank]

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target; see Communicator.all_reduce_list.

        Three chunks are in flight: one published, one reduced, one fetched between two barriers. A rank publishes
        into its own slot only after fetching the chunk that was there two steps before, and others touch that slot
        only between the barriers after its publication and after their reduction.
        """
        dtype = sources[0].dtype
        word = word_dtype(dtype)
        source_words = [source.view(word) for source in sources]
        slots, slot_words = self._slots_of(dtype), self._slots_of(word)
        sizes = tuple([source.size for source in sources])
        itemsize = dtype.itemsize
        chunks = plan_stream(sizes, self._chunk_bytes // itemsize, itemsize, self._rank, self._world_size)
        # The mean is a sum that is divided on its way into the targets: that spares a pass over the data. Half
        # precision is divided with the sum, in float32.
        divides_late = op is ReduceOp.MEAN and accumulation_dtype(dtype) == dtype
        delivery = _Delivery(targets, self._world_size if divides_late else 1)
        sum_op = ReduceOp.SUM if divides_late else op
        count = len(chunks)
        for step in range(count + 2):
            parity = step & 1
            if step >= 2:
                for region in chunks[step - 2].others:
                    delivery.deliver(slots[parity][self._rank], region)
            if step < count:
                self._publish(chunks[step], source_words, slot_words[parity][self._rank])
            if 1 <= step <= count:
                self._reduce(chunks[step - 1].own, sources, slots[1 - parity], sum_op, delivery)
            if step <= count:
                self._barrier.meet(agreement)

    @staticmethod
    def _publish(chunk: Chunk, source_words: Sequence[Array], own_slot: Array) -> None:
        for begin, end, pieces in chunk.others:
            pack_words([source_words[array][low:high] for array, low, high in pieces], own_slot[begin:end])

    def _reduce(
        self, region: Region, sources: Sequence[Array], slots: Sequence[Array], op: ReduceOp, delivery: _Delivery
    ) -> None:
        """Reduces this rank's slice of a chunk into the slot of every peer, and delivers it here."""
        begin, end, pieces = region
        if begin == end:
            return
        dtype = slots[0].dtype
        if (end - begin) * dtype.itemsize >= _WORTH_A_CALL_BYTES * len(pieces):
            for array, low, high in pieces:
                self._reduce_into_slots(begin, sources[array][low:high], slots, op)
                begin += high - low
        else:
            own = self._scratch.own(dtype, end - begin)
            word = word_dtype(dtype)
            pack_words([sources[array][low:high].view(word) for array, low, high in pieces], own.view(word))
            self._reduce_into_slots(begin, own, slots, op)
        delivery.deliver(slots[self._peers[0]], region)

    def _reduce_into_slots(self, begin: int, own: Array, slots: Sequence[Array], op: ReduceOp) -> None:
        """Reduces the elements from `begin` on, of which `own` is this rank's contribution, into the peers' slots."""
        contributions = [slot[begin : begin + own.size] for slot in slots]
        # Rank 0 or rank 1: in rank order, its contribution is read before the first result is written.
        result = contributions[self._peers[0]]
        others = [contributions[peer] for peer in self._peers[1:]]
        contributions[self._rank] = own
        reduce_into(op, contributions, result, self._scratch.accumulator(own.dtype, own.size))
        word = word_dtype(own.dtype)
        for place in others:
            copy_words(result.view(word), place.view(word))


class _Delivery:
    """Copies results out of slots into the targets, dividing them where that was put off.

    Args:
        targets: 1-D arrays.
        divisor: what to divide by; 1 copies bit for bit.
    """

    def __init__(self, targets: Sequence[Array], divisor: int) -> None:
        self._divisor = divisor
        word = word_dtype(targets[0].dtype)
        self._word = targets[0].dtype if divisor > 1 else word
        self._targets = targets if divisor > 1 else [target.view(word) for target in targets]

    def deliver(self, slot: Array, region: Region) -> None:
        """Moves one region of a chunk from a slot to where it belongs."""
        begin, end, pieces = region
        targets = [self._targets[array][low:high] for array, low, high in pieces]
        if self._divisor == 1:
            split_words(slot.view(self._word)[begin:end], targets)
            return
        for target in targets:
            end = begin + target.size
            divide_into(slot[begin:end], self._divisor, target)
            begin = end


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

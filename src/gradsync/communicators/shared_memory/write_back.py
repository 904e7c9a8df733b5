"""The all-reduce of a large list over shared memory: chunk by chunk, reduced by its owners and written back.

Every rank publishes what others own, reduces the slice that it owns, and writes the result back into the others'
memory, from where they fetch it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_values import finite_test
from gradsync.communicators.pieces import Piece
from gradsync.communicators.shared_memory import calls
from gradsync.communicators.shared_memory.calls import Call, Delivery, part_of
from gradsync.communicators.shared_memory.chunk_look import ChunkLook, Flags
from gradsync.communicators.shared_memory.scratch import Scratch
from gradsync.communicators.shared_memory.slots import SlotArrays
from gradsync.communicators.shared_memory.stream_plan import (
    CHUNKS_IN_FLIGHT,
    Lengths,
    Step,
    Stretch,
    Wait,
    plan_steps,
    plan_stream,
)
from gradsync.communicators.shared_memory.workplace import Workplace
from gradsync.diagnostics import tracing
from gradsync.reduction import Array, ReduceOp, accumulation_dtype

# What is reduced, and then divided, at a time: from one pass to the next it stays in the cache.
_REDUCED_BYTES = 256 * 1024
# What is copied into shared memory by one call. Measured: while rewriting what others have read is slow (see rings.py),
# calls of twice that size take twice as long for the same bytes, and of four times that size four times as long.
_PUBLISHED_BYTES = 128 * 1024
# How much of small pieces is gathered, and then reduced, divided and scattered.
_GATHERED_BYTES = 128 * 1024

# What a step does, where in that its parts end, and for whom it waits then.
_StepCalls = tuple[list[Call], tuple[int, int], Wait]


class WriteBack:
    """The all-reduce of one list of arrays.

    Several chunks are in flight, each in the slot of its turn; see plan_steps. A rank publishes into its own slot only
    after fetching the chunk that was there before, and others touch that slot only between the rounds of the barrier
    after its publication and after their reduction.

    Args:
        sources, targets: see Communicator.all_reduce_list.
        op: an operator that the dtype table allows.
        workplace: this rank's.
        scratch: private memory.
        slots: of the sources' dtype; a chunk fits into a slot.
        flags: where ranks tell of results that are not finite; None where nobody looks for such.
    """

    def __init__(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        workplace: Workplace,
        scratch: Scratch,
        slots: SlotArrays,
        flags: Flags | None,
    ) -> None:
        self._sources = sources
        self._barrier = workplace.barrier
        self._recorder = workplace.recorder
        self._rank = rank = workplace.rank
        world_size = workplace.world_size
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._scratch = scratch
        self._slots = slots
        self._dtype = dtype = sources[0].dtype
        itemsize = dtype.itemsize
        sizes = tuple([source.size for source in sources])
        bytes_at_a_time = workplace.chunk_bytes, _REDUCED_BYTES, _PUBLISHED_BYTES, _GATHERED_BYTES
        lengths = Lengths(*[size_bytes // itemsize for size_bytes in bytes_at_a_time])
        self._chunks = plan_stream(sizes, lengths, itemsize, rank, world_size)
        self._accumulator = scratch.accumulator(dtype, max(lengths.reduced, lengths.gathered))
        # The mean is a sum that is divided on its way into the targets: that spares a pass over the data. Half
        # precision is divided with the sum, in float32.
        divides_late = op is ReduceOp.MEAN and accumulation_dtype(dtype) == dtype
        self._op = ReduceOp.SUM if divides_late else op
        self._delivery = Delivery(targets, world_size if divides_late else 1, scratch)
        is_finite = None if flags is None else finite_test(dtype)
        self._look: ChunkLook | None = None
        if flags is not None and is_finite is not None:
            self._look = ChunkLook(sources, lengths.chunk, rank, is_finite, flags, workplace.finder)
        self._kept: list[_StepCalls] | None = None

    def keep(self) -> None:
        """Works out what every step does, once for all runs."""
        self._kept = list(self._work_out())

    def run(self, agreement: Agreement) -> None:
        """Reduces each source into its target."""
        steps: Iterable[_StepCalls] = self._work_out() if self._kept is None else self._kept
        laps = tracing.laps_of(self._recorder)
        if laps is None:
            for step_calls, _, wait in steps:
                calls.run(step_calls)
                self._wait(wait, agreement)
            return
        for step_calls, (delivered, published), wait in steps:
            parts = step_calls[:delivered], step_calls[delivered:published], step_calls[published:]
            for phase, part in zip(("splitting", "packing", "reducing"), parts, strict=True):
                if part:
                    calls.run(part)
                    laps.end(phase)
            if wait is not Wait.NOBODY:
                self._wait(wait, agreement)
                laps.end("waiting")

    def _wait(self, wait: Wait, agreement: Agreement) -> None:
        barrier = self._barrier
        if wait is Wait.ALL_BEFORE:
            barrier.arrive()
            barrier.await_round(barrier.round - 1)
        elif wait is Wait.ALL:
            barrier.arrive()
            barrier.await_round(barrier.round)
        elif wait is Wait.AGREEMENT:
            barrier.meet(agreement)

    def _work_out(self) -> Iterator[_StepCalls]:
        for step in plan_steps(len(self._chunks)):
            yield *self._calls_of(step), step.wait

    def _calls_of(self, step: Step) -> tuple[list[Call], tuple[int, int]]:
        made: list[Call] = []
        for number in step.delivered:
            slot = self._slots[number % CHUNKS_IN_FLIGHT][self._rank]
            if self._look is not None:
                made.append((self._look.look_before_delivery, (number, self._chunks[number].delivered)))
            for begin, end, pieces in self._chunks[number].delivered:
                made += self._delivery.calls(slot[begin:end], pieces)
        delivered = len(made)
        for number in step.published:
            slot = self._slots[number % CHUNKS_IN_FLIGHT][self._rank]
            for begin, end, pieces in self._chunks[number].published:
                made.append(self._collecting(pieces, slot[begin:end]))
        published = len(made)
        for number in step.reduced:
            slots = self._slots[number % CHUNKS_IN_FLIGHT]
            if self._look is not None:
                made.append((self._look.begin, (number,)))
            for stretch in self._chunks[number].own:
                made += self._reducing(number, stretch, slots)
        return made, (delivered, published)

    def _collecting(self, pieces: Sequence[Piece], place: Array) -> Call:
        if len(pieces) == 1:
            return calls.copying(part_of(self._sources, pieces[0]), place)
        return calls.gathering([part_of(self._sources, piece) for piece in pieces], place)

    def _reducing(self, number: int, stretch: Stretch, slots: Sequence[Array]) -> list[Call]:
        """Reduces what this rank owns into the slot of every peer, and delivers it here."""
        begin, end, pieces = stretch
        made: list[Call] = []
        contributions = [slot[begin:end] for slot in slots]
        # Rank 0 or rank 1: in rank order, its contribution is read before the first result is written.
        result, *others = [contributions[peer] for peer in self._peers]
        if len(pieces) == 1:
            own = part_of(self._sources, pieces[0])
        else:
            own = self._scratch.own(self._dtype, end - begin)
            made.append(self._collecting(pieces, own))
        contributions[self._rank] = own
        accumulator = None if self._accumulator is None else self._accumulator[: end - begin]
        made += calls.reducing(self._op, contributions, result, accumulator)
        if self._look is not None:
            made.append((self._look.look, (number, stretch, result)))
        made += [calls.copying(result, place) for place in others]
        made += self._delivery.calls(result, pieces)
        return made

"""The all-reduce of a small list over shared memory: every rank publishes all, meets the others, reduces everything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.host_values import finite_test
from gradsync.communicators.pieces import Piece
from gradsync.communicators.shared_memory.arena import Scratch, Workplace
from gradsync.communicators.shared_memory.pipelined import Call, Delivery, Stretch, run_calls, worth_a_call
from gradsync.diagnostics import tracing
from gradsync.reduction import Array, ReduceOp, reduce_into


class AllAtOnce:
    """The all-reduce of one list of arrays.

    Args:
        sources, targets: see Communicator.all_reduce_list; all of them together fit into a round.
        op: an operator that the dtype table allows.
        workplace: this rank's.
        scratch: private memory.
        looks: whether to look for what is not finite.
    """

    def __init__(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        workplace: Workplace,
        scratch: Scratch,
        *,
        looks: bool,
    ) -> None:
        self._rings = workplace.rings
        self._barrier = workplace.barrier
        self._rank = workplace.rank
        self._recorder = workplace.recorder
        self._op = op
        self._dtype = dtype = sources[0].dtype
        self._finder = workplace.finder
        self._is_finite = finite_test(dtype) if looks else None
        self._word = word = word_dtype(dtype)
        pieces = tuple([Piece(number, 0, source.size) for number, source in enumerate(sources) if source.size])
        self._size = size = sum([source.size for source in sources])
        self._accumulator = scratch.accumulator(dtype, size)
        self._published: list[tuple[int, int, list[Array]]] = []
        self._delivered: list[Call] = []
        self._result = targets[0] if len(targets) == 1 else scratch.result(dtype, size)
        delivery = Delivery(targets, 1, scratch)
        for begin, end, together in worth_a_call(Stretch(0, size, pieces), dtype.itemsize, size, size):
            given = [sources[piece.array] for piece in together]
            self._published.append((begin, end, given if len(given) > 1 else [given[0].view(word)]))
            if len(targets) > 1:
                self._delivered += delivery.calls(self._result[begin:end], together)

    def run(self, agreement: Agreement) -> None:
        """Reduces each source into its target."""
        size, itemsize = self._size, self._dtype.itemsize
        size_bytes = size * itemsize
        at = self._rings.next_place(size_bytes) // itemsize
        laps = tracing.laps_of(self._recorder)
        own, own_words = self._rings.of(self._dtype)[self._rank], self._rings.of(self._word)[self._rank]
        for begin, end, sources in self._published:
            if len(sources) == 1:
                copy_words(sources[0], own_words[at + begin : at + end])
            else:
                np.concatenate(sources, out=own[at + begin : at + end])
        if laps is not None:
            laps.end("packing")
        self._barrier.meet(agreement)
        if laps is not None:
            laps.end("waiting")
        contributions = [ring[at : at + size] for ring in self._rings.of(self._dtype)]
        reduce_into(self._op, contributions, self._result, self._accumulator)
        if self._is_finite is not None:
            self._finder.look(self._is_finite, self._result, contributions, 0)
        if laps is not None:
            laps.end("reducing")
        run_calls(self._delivered)
        if laps is not None and self._delivered:
            laps.end("splitting")

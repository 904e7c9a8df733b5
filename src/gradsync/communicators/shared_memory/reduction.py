"""The two ways in which ranks reduce lists through shared memory; both fix the order of the operands.

AllAtOnce, for small lists: every rank publishes all its values, meets the others, and reduces everything. One barrier.

WriteBack, for large ones: chunk by chunk, every rank publishes what others own, reduces the slice that it owns, and
writes the result back into the others' memory, from where they fetch it. Each rank reads and reduces 1/n of everything,
whatever n. Results in a ring of the reducer's own, which others would fetch from there, took a quarter longer.

Either way an element is reduced in rank order, so all ranks get the same bits, and the same inputs give the same bits
from run to run. The size of the list does not matter either, but for complex products, which NumPy rounds differently
in vector and scalar code.

What either way does is worked out as a list of NumPy calls with all their views; a list of arrays that comes again and
again keeps them. Ranks that have kept theirs and ranks that have not meet in one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.shared_memory.all_at_once import AllAtOnce
from gradsync.communicators.shared_memory.arena import Scratch, Slots, Workplace
from gradsync.communicators.shared_memory.pipelined import WriteBack
from gradsync.errors import CommunicatorClosed
from gradsync.reduction import Array, ReduceOp


class ListReduction:
    """The all-reduces of one communicator of several ranks.

    Args:
        workplace: this rank's.
        scratch: private memory.
        slots: memory of its own; a chunk fits into a slot.
    """

    def __init__(self, workplace: Workplace, scratch: Scratch, slots: Slots) -> None:
        self._workplace = workplace
        self._scratch = scratch
        self._slots = slots
        self._prepared: WeakSet[PreparedListReduction] = WeakSet()

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target; see Communicator.all_reduce_list."""
        _run_quietly(self._way(sources, targets, op, looks=False), agreement)

    def prepare(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool
    ) -> PreparedListReduction:
        """Works out what all_reduce would do with the arrays; see Communicator.prepare_list."""
        way = self._way(sources, targets, op, looks=looks)
        if isinstance(way, WriteBack):
            way.keep()
        prepared = PreparedListReduction(way)
        self._prepared.add(prepared)
        return prepared

    def _way(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool
    ) -> AllAtOnce | WriteBack:
        if sum([source.nbytes for source in sources]) <= self._workplace.small_bytes:
            return AllAtOnce(sources, targets, op, self._workplace, self._scratch, looks=looks)
        slots, flags = self._slots.of(sources[0].dtype), self._slots.flags if looks else None
        return WriteBack(sources, targets, op, self._workplace, self._scratch, slots, flags)

    def release(self) -> None:
        """Lets go of the shared memory, also where a caller still holds what was prepared."""
        for prepared in list(self._prepared):
            prepared.release()


class PreparedListReduction:
    """The all-reduce of a list of arrays that come again: see PreparedList of backend.py.

    Args:
        way: what does it.
    """

    def __init__(self, way: AllAtOnce | WriteBack) -> None:
        self._way: AllAtOnce | WriteBack | None = way

    def run(self, agreement: Agreement) -> None:
        """Reduces what the arrays hold now; see Communicator.all_reduce_list."""
        if self._way is None:
            raise CommunicatorClosed("a prepared list belongs to a communicator that has ended")
        _run_quietly(self._way, agreement)

    def release(self) -> None:
        """Lets go of the caller's arrays and of the shared memory."""
        self._way = None


def _run_quietly(way: AllAtOnce | WriteBack, agreement: Agreement) -> None:
    """Overflow and NaN are the caller's business; as exceptions they would hit some ranks and not others."""
    with np.errstate(all="ignore"):
        way.run(agreement)

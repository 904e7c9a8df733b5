"""The collectives over shared memory, each once, as plans; pipelined.py has the all-reduce of large lists.

A plan says what a collective of given sizes does: what goes to which place in this rank's region, and what comes from
which place in the others'. It is worked out once and holds no array of a caller's, so that every call of these sizes
runs it. A rank that has just made its plan meets others that have had theirs for long: all take the same rounds.

Ranks write into their own rings and, once all have met, read from the others'. A large array goes in rounds; while some
ranks still read one, others already write the next. What fits into one round has been published whole before any target
is written, so such sources and targets may overlap.

Reductions take the operands in rank order, so all ranks get the same bits, and the same inputs give the same bits from
run to run. The size does not matter either, but for complex products, which NumPy rounds differently in vector and
scalar code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.host_copy import copy_words, pack_words, publish_words, split_words, word_dtype
from gradsync.communicators.host_values import finite_test
from gradsync.communicators.pieces import Piece, cuts, pieces_between
from gradsync.communicators.shared_memory.arena import HOT_BYTES, Scratch, Slots, Workplace, share_begin, shares_bytes
from gradsync.communicators.shared_memory.pipelined import Call, Delivery, Stretch, WriteBack, run_calls, worth_a_call
from gradsync.diagnostics import tracing
from gradsync.errors import CommunicatorClosed
from gradsync.reduction import UFUNCS_INTO, Array, ReduceOp, accumulation_dtype, divide_into, reduce_into

_BYTE = np.dtype(np.uint8)
_NUMBER = np.dtype(np.int64)

# Of each kind. Plans of up to so many rounds hold them; with more, working them out is lost in copying.
_MAX_PLANS = 256
_MAX_ROUNDS_HELD = 8
# What a plan keeps takes about 0.2 % of an array's memory; it keeps that for a few arrays of up to 1 GiB.
MAX_CHUNKS_KEPT = 1024
_MAX_ARRAYS_KEPT = 4
# Above, NumPy's assignment may meet the slow case of memcpy that host_copy.py tells of.
_ASSIGN_UP_TO_BYTES = 4096


class Plans:
    """The plans of one communicator, made when first needed; those not used for the longest time go first.

    Args:
        workplace: this rank's.
        scratch: private memory.
        slots: memory for large lists.
    """

    def __init__(self, workplace: Workplace, scratch: Scratch, slots: Slots) -> None:
        def kept(make: Callable[..., _Plan], *arguments: Any) -> Any:
            @lru_cache(maxsize=_MAX_PLANS)
            def made(*key: Any) -> _Plan:
                plan = make(*arguments, *key)
                made_plans.add(plan)
                return plan

            return made

        self._made = made_plans = WeakSet[_Plan]()
        quietly = quiet_caller()
        self._workplace = workplace
        self._scratch = scratch
        self._slots = slots
        self.one_shot: Callable[[np.dtype[Any], int, ReduceOp], OneShot] = kept(OneShot, workplace, scratch, quietly)
        self.large: Callable[[np.dtype[Any], int, ReduceOp], LargeReduction] = kept(
            LargeReduction, workplace, scratch, slots
        )
        self.reduce_scatter: Callable[[np.dtype[Any], Bounds, ReduceOp], PartialReduction] = kept(
            _reduce_scatter, workplace, scratch, quietly
        )
        self.reduce: Callable[[np.dtype[Any], int, ReduceOp, int], PartialReduction] = kept(
            _reduce, workplace, scratch, quietly
        )
        self.broadcast: Callable[[int, int], Movement] = kept(_broadcast, workplace)
        self.broadcast_list: Callable[[tuple[int, ...], int], ListBroadcast] = kept(ListBroadcast, workplace)
        self.gather: Callable[[Bounds, int | None], Movement] = kept(_gather, workplace)
        self.scatter: Callable[[Bounds, int], Movement] = kept(_scatter, workplace)
        self.all_to_all: Callable[[Bounds, Bounds, int], Movement] = kept(_all_to_all, workplace)

    def list_reduction(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool
    ) -> OneShotList | WriteBack:
        """Plans the all-reduce of these very arrays, several or large; see Backend.all_reduce and Backend.prepare."""
        dtype = sources[0].dtype
        if sum([source.nbytes for source in sources]) <= self._workplace.small_bytes:
            one_shot = self.one_shot(dtype, sum([source.size for source in sources]), op)
            return OneShotList(one_shot, sources, targets, self._workplace, self._scratch, looks=looks)
        flags = self._slots.flags if looks else None
        return WriteBack(sources, targets, op, self._workplace, self._scratch, self._slots.of(dtype), flags)

    def prepare(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool
    ) -> PreparedReduction:
        """Plans it for many runs; see Backend.prepare."""
        plan = self.list_reduction(sources, targets, op, looks=looks)
        if isinstance(plan, WriteBack):
            plan.keep()
        prepared = PreparedReduction(plan)
        self._made.add(prepared)
        return prepared

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, as many on each as fit into a round."""
        count, itemsize = len(numbers), _NUMBER.itemsize
        rings = self._workplace.rings.of(_NUMBER)
        begin = self._workplace.rings.next_place(count * itemsize) // itemsize
        rings[self._workplace.rank][begin : begin + count] = numbers
        self._workplace.barrier.meet(agreement)
        return [[int(number) for number in ring[begin : begin + count]] for ring in rings]

    def release(self) -> None:
        """Lets go of the shared memory, also where a caller still holds what was prepared."""
        for plan in list(self._made):
            plan.release()
        self.__dict__.clear()


class _Plan:
    """What a collective does."""

    def release(self) -> None:
        """Lets go of the shared memory, whoever still holds the plan; it cannot run any more."""
        self.__dict__.clear()


# -- Movements, in bytes -------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What goes at a time. Parts are bytes of the source or the target; places are within a region.

    Attributes:
        region_bytes: what all regions have of it; the same on all ranks.
        published: (part of the source, where it begins in this rank's region, where it ends).
        kept: the part of the source that stays on this rank, and of the target where it goes; the very same bytes in an
            in-place call.
        fetched: (rank, where it begins in that rank's region, where it ends, part of the target).
    """

    region_bytes: int
    published: Sequence[tuple[slice, int, int]] = ()
    kept: tuple[slice, slice] | None = None
    fetched: Sequence[tuple[int, int, int, slice]] = ()


class Movement(_Plan):
    """A collective that moves parts of a source to a target.

    Args:
        workplace: this rank's.
        size: bytes of the largest part.
        step: how much of each part goes at a time.
        make: make(begin, end) returns the round in which bytes [begin, end) of each part go.
    """

    def __init__(self, workplace: Workplace, size: int, step: int, make: Callable[[int, int], Round]) -> None:
        self._rings = workplace.rings
        self._regions = workplace.rings.of(_BYTE)
        self._own = self._regions[workplace.rank]
        self._barrier = workplace.barrier
        self._rounds = _Rounds(size, step, make)

    def run(self, source: Array | None, target: Array | None, agreement: Agreement) -> None:
        """Moves the parts; without a source, or a target, where this rank gives or gets nothing."""
        regions, own = self._regions, self._own
        is_in_place = source is target
        source = None if source is None else _as_bytes(source)
        target = source if is_in_place else None if target is None else _as_bytes(target)
        is_first = True
        for region_bytes, published, kept, fetched in self._rounds.held or self._rounds:
            at = self._rings.next_place(region_bytes)
            for part, begin, end in published:
                copy_words(source[part], own[at + begin : at + end])  # type: ignore[index]
            if kept is None:
                self._barrier.meet(agreement)
            else:
                # In the first round after the ranks have agreed, before which nothing is written; in the others at
                # once, while it is still in the cache.
                if not is_first:
                    copy_words(source[kept[0]], target[kept[1]])  # type: ignore[index]
                self._barrier.meet(agreement)
                if is_first:
                    copy_words(source[kept[0]], target[kept[1]])  # type: ignore[index]
            for owner, begin, end, part in fetched:
                copy_words(regions[owner][at + begin : at + end], target[part])  # type: ignore[index]
            is_first = False


def _as_bytes(array: Array) -> Array:
    """Returns a contiguous array as flat bytes, by the cheapest way."""
    flat = array if array.ndim == 1 else array.ravel()
    return flat if flat.dtype is _BYTE else flat.view(_BYTE)


class _Rounds:
    """The rounds of a collective, at least one, in which the ranks meet.

    Args:
        size: of what goes.
        step: how much goes at a time.
        make: make(begin, end) returns the round in which [begin, end) goes.

    Attributes:
        held: all of them, where they are few; else empty, and they are made anew in every run.
    """

    def __init__(self, size: int, step: int, make: Callable[[int, int], Any]) -> None:
        self._cuts = cuts(size, step) or [(0, 0)]
        self._make = make
        self.held = tuple(self) if len(self._cuts) <= _MAX_ROUNDS_HELD else ()

    def __iter__(self) -> Iterator[Any]:
        return (self._make(begin, end) for begin, end in self._cuts)


def _broadcast(workplace: Workplace, size: int, root: int) -> Movement:
    """Plans a broadcast of one array."""

    def make(begin: int, end: int) -> Round:
        part, length = slice(begin, end), end - begin
        if workplace.rank == root:
            return Round(length, [(part, 0, length)])
        return Round(length, fetched=[(root, 0, length, part)])

    return Movement(workplace, size, workplace.round_bytes, make)


def _gather(workplace: Workplace, bounds: Bounds, root: int | None) -> Movement:
    """Plans a gather; without a root all ranks receive."""
    rank = workplace.rank

    def make(begin: int, end: int) -> Round:
        part = _within(bounds, rank, begin, end)
        own = slice(part.start - bounds[rank], part.stop - bounds[rank])
        published = [] if root == rank else [(own, 0, own.stop - own.start)]
        if root not in (None, rank):
            return Round(end - begin, published)
        parts = [(peer, _within(bounds, peer, begin, end)) for peer in workplace.peers()]
        fetched = [(peer, 0, each.stop - each.start, each) for peer, each in parts]
        return Round(end - begin, published, (own, part), fetched)

    return Movement(workplace, largest_part(bounds), workplace.round_bytes, make)


def _scatter(workplace: Workplace, bounds: Bounds, root: int) -> Movement:
    """Plans a scatter; in the root's region there is a share for each of the others."""
    rank = workplace.rank

    def make(begin: int, end: int) -> Round:
        region_bytes = shares_bytes(workplace.world_size, end - begin)
        part = _within(bounds, rank, begin, end)
        own = slice(part.start - bounds[rank], part.stop - bounds[rank])
        if root != rank:
            at = share_begin(root, rank, end - begin)
            return Round(region_bytes, fetched=[(root, at, at + own.stop - own.start, own)])
        published = _shares(workplace, bounds, begin, end)
        return Round(region_bytes, published, (part, own))

    return Movement(workplace, largest_part(bounds), workplace.share_bytes, make)


def _all_to_all(workplace: Workplace, send_bounds: Bounds, receive_bounds: Bounds, largest: int) -> Movement:
    """Plans an all-to-all; in each rank's region there is a share for each of the others."""
    rank = workplace.rank

    def make(begin: int, end: int) -> Round:
        fetched = []
        for peer in workplace.peers():
            part = _within(receive_bounds, peer, begin, end)
            at = share_begin(peer, rank, end - begin)
            fetched.append((peer, at, at + part.stop - part.start, part))
        kept = _within(send_bounds, rank, begin, end), _within(receive_bounds, rank, begin, end)
        published = _shares(workplace, send_bounds, begin, end)
        return Round(shares_bytes(workplace.world_size, end - begin), published, kept, fetched)

    return Movement(workplace, largest, workplace.share_bytes, make)


def _within(bounds: Bounds, rank: int, begin: int, end: int) -> slice:
    """Returns where [begin, end) of a rank's part lies, as far as it has that."""
    low, high = bounds[rank], bounds[rank + 1]
    return slice(min(low + begin, high), min(low + end, high))


def _shares(
    workplace: Workplace, bounds: Bounds, begin: int, end: int, itemsize: int = 1
) -> list[tuple[slice, int, int]]:
    """Returns what this rank publishes of [begin, end) of the others' parts, each in its share; all in elements."""
    published = []
    for peer in workplace.peers():
        part = _within(bounds, peer, begin, end)
        at = share_begin(workplace.rank, peer, (end - begin) * itemsize) // itemsize
        published.append((part, at, at + part.stop - part.start))
    return published


class ListBroadcast(_Plan):
    """Copies the root's arrays of bytes into the others', straight out of and into the arrays.

    Args:
        workplace: this rank's.
        sizes: of the arrays.
        root: the rank whose arrays these are.
    """

    def __init__(self, workplace: Workplace, sizes: tuple[int, ...], root: int) -> None:
        self._rings = workplace.rings
        self._region = workplace.rings.of(_BYTE)[root]
        self._barrier = workplace.barrier
        self._is_root = workplace.rank == root
        self._rounds = _Rounds(
            sum(sizes), workplace.round_bytes, lambda begin, end: (end - begin, pieces_between(sizes, begin, end))
        )

    def run(self, flats: Sequence[Array], agreement: Agreement) -> None:
        """Copies what the arrays hold now."""
        for size, pieces in self._rounds.held or self._rounds:
            at = self._rings.next_place(size)
            place = self._region[at : at + size]
            parts = [flats[number][low:high] for number, low, high in pieces]
            if self._is_root and parts:
                pack_words(parts, place)
            self._barrier.meet(agreement)
            if parts and not self._is_root:
                split_words(place, parts)


# -- Reductions ----------------------------------------------------------------------------------------------------


class _Reduction(_Plan):
    """The arithmetic of a plan: the operands in rank order.

    Args:
        workplace: this rank's.
        scratch: private memory.
        quietly: calls a function so that overflow and NaN raise nothing.
        dtype: of the arrays.
        op: an operator that the dtype table allows.
    """

    def __init__(
        self,
        workplace: Workplace,
        scratch: Scratch,
        quietly: Callable[..., Any],
        dtype: np.dtype[Any],
        op: ReduceOp,
    ) -> None:
        self._rings = workplace.rings
        self.barrier = workplace.barrier
        self._rank = workplace.rank
        self._scratch = scratch
        self._quietly = quietly
        self._op = op
        self._ufunc = UFUNCS_INTO[op]
        self._dtype = dtype
        self._word = word_dtype(dtype)
        self._values = workplace.rings.of(dtype)
        self._own_words = workplace.rings.of(self._word)[workplace.rank]
        self._divisor = workplace.world_size if op is ReduceOp.MEAN else 1
        self._by_ufunc = workplace.world_size > 1 and accumulation_dtype(dtype) == dtype

    def reduce(self, contributions: Sequence[Array], result: Array) -> None:
        """Does what reduce_into of reduction.py does, by fewer calls where the dtype adds up in itself."""
        quietly = self._quietly
        if not self._by_ufunc:
            accumulator = self._scratch.accumulator(self._dtype, result.size)
            quietly(reduce_into, self._op, contributions, result, accumulator)
            return
        ufunc = self._ufunc
        quietly(ufunc, contributions[0], contributions[1], result)
        for contribution in contributions[2:]:
            quietly(ufunc, result, contribution, result)
        if self._divisor > 1:
            quietly(divide_into, result, self._divisor, result)


class OneShot(_Reduction):
    """The all-reduce of what fits into a round: every rank publishes all, meets the others, reduces everything.

    Args:
        workplace, scratch, quietly, dtype, op: see _Reduction.
        size: elements, all together.
    """

    def __init__(
        self,
        workplace: Workplace,
        scratch: Scratch,
        quietly: Callable[..., Any],
        dtype: np.dtype[Any],
        size: int,
        op: ReduceOp,
    ) -> None:
        super().__init__(workplace, scratch, quietly, dtype, op)
        self.size = size
        self._size_bytes = size * dtype.itemsize
        self._assigns = self._size_bytes <= _ASSIGN_UP_TO_BYTES or self._word == dtype
        self._hot: list[tuple[list[Array], Array]] | None = None  # [parity of the round] -> what `places` returns
        if self._size_bytes <= HOT_BYTES:
            regions = self._rings.hot(dtype, size)
            self._hot = [(of_ranks, of_ranks[self._rank].view(self._word)) for of_ranks in regions]

    def places(self) -> tuple[list[Array], Array]:
        """Returns the ranks' regions in the next round, and this rank's as words."""
        if self._hot is not None:
            return self._hot[self.barrier.round + 1 & 1]
        begin = self._rings.next_place(self._size_bytes) // self._dtype.itemsize
        end = begin + self.size
        return [ring[begin:end] for ring in self._values], self._own_words[begin:end]

    def run(self, source: Array, target: Array, agreement: Agreement) -> None:
        """Reduces an array into another one, or itself."""
        if source.ndim != 1:
            is_in_place = source is target
            source = source.ravel()
            target = source if is_in_place else target.ravel()
        barrier, hot = self.barrier, self._hot
        regions, own_words = self.places() if hot is None else hot[barrier.round + 1 & 1]
        if self._assigns:
            regions[self._rank][...] = source
        else:
            publish_words(source.view(self._word), own_words)
        barrier.meet(agreement)
        self.reduce(regions, target)


class LargeReduction(_Plan):
    """The all-reduce of one array that does not fit into one shot; what is to be done is kept for arrays that recur.

    Args:
        workplace: this rank's.
        scratch: private memory.
        slots: memory for large lists.
        dtype, size, op: of the array.
    """

    def __init__(
        self, workplace: Workplace, scratch: Scratch, slots: Slots, dtype: np.dtype[Any], size: int, op: ReduceOp
    ) -> None:
        self._settings = op, workplace, scratch, slots.of(dtype), None
        self._dtype = dtype
        self._size = size
        self._kept: dict[tuple[int, int], WriteBack] = {}  # by the addresses of source and target

    def run(self, source: Array, target: Array, agreement: Agreement) -> None:
        """Reduces an array into another one, or itself."""
        addresses = _address(source), _address(target)
        if addresses[0] != addresses[1] and np.may_share_memory(source, target):
            source = source.copy()  # else results would be written over what is still to be read
            addresses = _address(source), addresses[1]
        kept = self._kept.get(addresses)
        if kept is None:
            if len(self._kept) >= _MAX_ARRAYS_KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
            at_source, at_target = [_Unowned(address, self._size, self._dtype).array() for address in addresses]
            kept = self._kept[addresses] = WriteBack([at_source], [at_target], *self._settings)
            kept.keep()
        kept.run(agreement)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Unowned:
    """Memory of an array that this one does not keep alive: to be read and written only while its owner does."""

    def __init__(self, address: int, size: int, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (size * dtype.itemsize,),
            "typestr": "|u1",
        }

    def array(self) -> Array:
        """Returns the memory as an array."""
        return np.asarray(self).view(self._dtype)


class OneShotList:
    """The same for a list of arrays, which go straight into shared memory, and whose results come straight out of it.

    Args:
        one_shot: for their elements all together.
        sources, targets: see Backend.all_reduce.
        workplace: this rank's.
        scratch: private memory.
        looks: whether to look for what is not finite.
    """

    def __init__(
        self,
        one_shot: OneShot,
        sources: Sequence[Array],
        targets: Sequence[Array],
        workplace: Workplace,
        scratch: Scratch,
        *,
        looks: bool,
    ) -> None:
        self._one_shot = one_shot
        self._rank = workplace.rank
        self._recorder = workplace.recorder
        self._finder = workplace.finder
        dtype, size = sources[0].dtype, one_shot.size
        self._is_finite = finite_test(dtype) if looks else None
        pieces = tuple([Piece(number, 0, source.size) for number, source in enumerate(sources) if source.size])
        self._published: list[tuple[int, int, list[Array]]] = []
        self._delivered: list[Call] = []
        self._result = targets[0] if len(targets) == 1 else scratch.result(dtype, size)
        delivery = Delivery(targets, 1, scratch)
        for begin, end, together in worth_a_call(Stretch(0, size, pieces), dtype.itemsize, size, size):
            given = [sources[piece.array] for piece in together]
            self._published.append((begin, end, given if len(given) > 1 else [given[0].view(word_dtype(dtype))]))
            if len(targets) > 1:
                self._delivered += delivery.calls(self._result[begin:end], together)

    def run(self, agreement: Agreement) -> None:
        """Reduces each source into its target."""
        laps = tracing.laps_of(self._recorder)
        regions, own_words = self._one_shot.places()
        own = regions[self._rank]
        for begin, end, sources in self._published:
            if len(sources) == 1:
                publish_words(sources[0], own_words[begin:end])
            else:
                np.concatenate(sources, out=own[begin:end])
        if laps is not None:
            laps.end("packing")
        self._one_shot.barrier.meet(agreement)
        if laps is not None:
            laps.end("waiting")
        self._one_shot.reduce(regions, self._result)
        if self._is_finite is not None:
            with np.errstate(all="ignore"):
                self._finder.look(self._is_finite, self._result, regions, 0)
        if laps is not None:
            laps.end("reducing")
        run_calls(self._delivered)
        if laps is not None and self._delivered:
            laps.end("splitting")


class PreparedReduction(_Plan):
    """The all-reduce of a list of arrays that come again: see PreparedList of backend.py.

    Args:
        plan: of it.
    """

    def __init__(self, plan: OneShotList | WriteBack) -> None:
        self._plan: OneShotList | WriteBack | None = plan

    def run(self, agreement: Agreement) -> None:
        """Reduces what the arrays hold now."""
        if self._plan is None:
            raise CommunicatorClosed("a prepared list belongs to a communicator that has ended")
        self._plan.run(agreement)

    def release(self) -> None:
        """Lets go of the caller's arrays and of the shared memory."""
        self._plan = None


class _PartOf(NamedTuple):
    """What is reduced at a time; parts are elements of the source or the target, places are within a region.

    Attributes:
        region_bytes, published: as for Round, but for places in elements.
        contributions: [rank] -> its place, with what this rank gets; empty on a rank that gets nothing.
        own: the part of the source that this rank contributes itself.
        result: the part of the target.
    """

    region_bytes: int
    published: Sequence[tuple[slice, int, int]]
    contributions: Sequence[tuple[int, int]]
    own: slice
    result: slice


class PartialReduction(_Reduction):
    """A reduction of which each rank, or only one, gets its part: of reduce_scatter and reduce.

    Args:
        workplace, scratch, quietly, dtype, op: see _Reduction.
        size: elements of the largest part.
        step: how many of each part go at a time.
        make: make(begin, end) returns what is done for elements [begin, end) of each part.
    """

    def __init__(
        self,
        workplace: Workplace,
        scratch: Scratch,
        quietly: Callable[..., Any],
        dtype: np.dtype[Any],
        op: ReduceOp,
        size: int,
        step: int,
        make: Callable[[int, int], _PartOf],
    ) -> None:
        super().__init__(workplace, scratch, quietly, dtype, op)
        self._rounds = _Rounds(size, step, make)

    def run(self, source: Array, target: Array | None, agreement: Agreement) -> None:
        """Reduces arrays; without a target where this rank gets nothing."""
        own_words, rank = self._own_words, self._rank
        if source.ndim != 1:
            source = source.ravel()
        if target is not None and target.ndim != 1:
            target = target.ravel()
        words = source.view(self._word)
        for region_bytes, published, contributed, own_part, result_part in self._rounds.held or self._rounds:
            at = self._rings.next_place(region_bytes) // self._dtype.itemsize
            for part, begin, end in published:
                copy_words(words[part], own_words[at + begin : at + end])
            self.barrier.meet(agreement)
            if target is None:
                continue
            result = target[result_part]
            if not result.size:
                continue
            own = source[own_part]
            if rank > 1 and np.may_share_memory(own, result):  # in place: it would be overwritten before its turn
                own = own.copy()
            contributions = [
                ring[at + begin : at + end] for ring, (begin, end) in zip(self._values, contributed, strict=True)
            ]
            contributions[rank] = own
            self.reduce(contributions, result)


def _reduce_scatter(
    workplace: Workplace,
    scratch: Scratch,
    quietly: Callable[..., Any],
    dtype: np.dtype[Any],
    bounds: Bounds,
    op: ReduceOp,
) -> PartialReduction:
    """Plans a reduce_scatter: every rank publishes what others own, and reduces what it owns."""
    rank, itemsize = workplace.rank, dtype.itemsize

    def make(begin: int, end: int) -> _PartOf:
        share_size_bytes = (end - begin) * itemsize
        own = _within(bounds, rank, begin, end)
        begins = [
            0 if owner == rank else share_begin(owner, rank, share_size_bytes) // itemsize
            for owner in range(workplace.world_size)
        ]
        return _PartOf(
            shares_bytes(workplace.world_size, share_size_bytes),
            _shares(workplace, bounds, begin, end, itemsize),
            [(at, at + own.stop - own.start) for at in begins],
            own,
            slice(own.start - bounds[rank], own.stop - bounds[rank]),
        )

    step = workplace.share_bytes // itemsize
    return PartialReduction(workplace, scratch, quietly, dtype, op, largest_part(bounds), step, make)


def _reduce(
    workplace: Workplace,
    scratch: Scratch,
    quietly: Callable[..., Any],
    dtype: np.dtype[Any],
    size: int,
    op: ReduceOp,
    root: int,
) -> PartialReduction:
    """Plans a reduce: every rank but the root publishes; the root reduces while they publish the next round."""

    def make(begin: int, end: int) -> _PartOf:
        part, length = slice(begin, end), end - begin
        published = [] if workplace.rank == root else [(part, 0, length)]
        return _PartOf(length * dtype.itemsize, published, [(0, length)] * workplace.world_size, part, part)

    step = workplace.round_bytes // dtype.itemsize
    return PartialReduction(workplace, scratch, quietly, dtype, op, size, step, make)


def quiet_caller() -> Callable[..., Any]:
    """Returns call(function, *arguments), within which floating-point errors are ignored.

    They are the caller's business, and as exceptions they would hit some ranks and not others.
    """
    context = Context()
    context.run(np.seterr, all="ignore")  # NumPy keeps the setting in the context; entering one costs next to nothing
    return context.run

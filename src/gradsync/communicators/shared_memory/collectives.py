"""The plans of the collectives over shared memory; pipelined.py has the all-reduce of large lists.

A plan is a collective for given sizes: the copies into this rank's region, and the reads from the regions of the other
ranks. A plan is made once, and keeps no reference to a caller's array, so all calls with the same sizes use the same
plan. In one collective some ranks may make a new plan while others use an old one: the rounds of both are the same.

To publish data, a rank writes the data into its own ring. After a barrier, the other ranks read the data from that
ring. A large array is moved in several rounds: while some ranks still read in one round, others already write for the
next round. An array that fits into one round is published completely before any target is written, so its source and
its target may overlap.

Reductions combine the operands in rank order, so all ranks get bitwise equal results, and equal inputs give bitwise
equal results in every run. The result of an element is the same in arrays of every size. Products of complex numbers
are an exception, because NumPy rounds them differently in vector and scalar code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.host_copy import (
    Piece,
    copy_words,
    cuts,
    pack_words,
    pieces_between,
    publish_words,
    share_of,
    split_words,
    word_dtype,
)
from gradsync.communicators.host_values import Checks, finite_test
from gradsync.communicators.shared_memory.arena import (
    SMALL_REGION_BYTES,
    Scratch,
    ShmContext,
    Slots,
    share_begin,
    shares_bytes,
)
from gradsync.communicators.shared_memory.pipelined import (
    CopyOut,
    PipelinedAllReduce,
    Section,
    collecting,
    piece_of,
    run_calls,
    worth_a_call,
)
from gradsync.diagnostics import tracing
from gradsync.errors import CommunicatorClosed
from gradsync.reduction import Array, Call, ReduceOp, Wire, reduction_of

_BYTE = np.dtype(np.uint8)
_NUMBER = np.dtype(np.int64)

_MAX_PLANS = 256  # the largest number of plans for each collective
_MAX_ROUNDS_HELD = 8  # a plan with more rounds makes them again in each run: this is cheap next to the copies
# An array with at most this number of chunks can use a plan that keeps its NumPy calls. The calls take about 0.2 % of
# the array's memory. A plan keeps the calls of a few arrays, of up to 1 GiB each.
MAX_CHUNKS_KEPT = 1024
_MAX_ARRAYS_KEPT = 4
# For larger arrays, NumPy's assignment may use memcpy in its slow case; see host_copy.py.
_ASSIGN_UP_TO_BYTES = 4096


class Plans:
    """The plans of one communicator. A plan is made at its first use; the least recently used plans are deleted.

    Args:
        context: the communicator's barrier, rings and sizes.
        scratch: the buffers of this process.
        slots: the slots for large lists.
    """

    def __init__(self, context: ShmContext, scratch: Scratch, slots: Slots) -> None:
        def kept(make: Callable[..., _Plan], *arguments: Any) -> Any:
            @lru_cache(maxsize=_MAX_PLANS)
            def made(*key: Any) -> _Plan:
                plan = make(*arguments, *key)
                made_plans.add(plan)
                return plan

            return made

        self._made = made_plans = WeakSet[_Plan]()
        quietly = quiet_caller()
        self._context = context
        self._scratch = scratch
        self._slots = slots
        self.one_shot: Callable[[np.dtype[Any], int, ReduceOp], OneShot] = kept(OneShot, context, quietly)
        self.large: Callable[[np.dtype[Any], int, ReduceOp], LargeReduction] = kept(
            LargeReduction, context, scratch, slots
        )
        self.reduce_scatter: Callable[[np.dtype[Any], Bounds, ReduceOp], PartialReduction] = kept(
            _reduce_scatter, context, quietly
        )
        self.reduce: Callable[[np.dtype[Any], int, ReduceOp, int], PartialReduction] = kept(_reduce, context, quietly)
        self.broadcast: Callable[[int, int], Movement] = kept(_broadcast, context)
        self.broadcast_list: Callable[[tuple[int, ...], int], ListBroadcast] = kept(ListBroadcast, context)
        self.gather: Callable[[Bounds, int | None], Movement] = kept(_gather, context)
        self.scatter: Callable[[Bounds, int], Movement] = kept(_scatter, context)
        self.all_to_all: Callable[[Bounds, Bounds, int], Movement] = kept(_all_to_all, context)

    def list_reduction(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        *,
        checks: Checks = Checks.NONE,
        wire: Wire | None = None,
    ) -> OneShotList | PipelinedAllReduce:
        """Returns a plan of the all-reduce of exactly these arrays; see Backend.all_reduce and Backend.prepare."""
        context, scratch = self._context, self._scratch
        dtype = sources[0].dtype if wire is None else wire.dtype
        size = sum([source.size for source in sources])
        if size * dtype.itemsize <= context.small_bytes:
            one_shot = self.one_shot(dtype, size, op)
            return OneShotList(one_shot, sources, targets, context, scratch, checks=checks, wire=wire)
        slots, flags = self._slots.of(dtype), self._slots.flags
        return PipelinedAllReduce(sources, targets, op, context, scratch, slots, flags, checks, wire)

    def prepare(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, checks: Checks, wire: Wire | None
    ) -> PreparedReduction:
        """Returns a plan that all-reduces exactly these arrays many times; see Backend.prepare."""
        plan = self.list_reduction(sources, targets, op, checks=checks, wire=wire)
        if isinstance(plan, PipelinedAllReduce):
            plan.keep()
        prepared = PreparedReduction(plan)
        self._made.add(prepared)
        return prepared

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Exchanges integers between all ranks, and returns [rank] -> the integers of that rank.

        All ranks must pass the same number of integers, and the integers must fit into one round.
        """
        count, itemsize = len(numbers), _NUMBER.itemsize
        rings = self._context.rings.of(_NUMBER)
        begin = self._context.rings.next_offset(count * itemsize) // itemsize
        rings[self._context.rank][begin : begin + count] = numbers
        self._context.barrier.agree(agreement)
        return [[int(number) for number in ring[begin : begin + count]] for ring in rings]

    def release(self) -> None:
        """Releases the shared memory, even if a caller still holds a prepared reduction."""
        for plan in list(self._made):
            plan.release()
        self.__dict__.clear()


class _Plan:
    """Base class of the plans, which are collectives for given sizes."""

    def release(self) -> None:
        """Releases the shared memory; the plan cannot run any more."""
        self.__dict__.clear()


# -- Movements, in bytes -------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """One round of a collective without arithmetic.

    Slices select bytes of the source or of the target. The numbers `begin` and `end` are offsets in a region, in bytes.

    Attributes:
        region_bytes: the number of bytes of each region that the round uses; the same on all ranks.
        published: the copies into this rank's region, each as (slice of the source, begin, end).
        kept: the copy of the part that this rank sends to itself, as (slice of the source, slice of the target). In an
            in-place call the two slices are the same bytes.
        fetched: the copies from the regions of other ranks, each as (rank, begin, end, slice of the target).
    """

    region_bytes: int
    published: Sequence[tuple[slice, int, int]] = ()
    kept: tuple[slice, slice] | None = None
    fetched: Sequence[tuple[int, int, int, slice]] = ()


class Movement(_Plan):
    """The plan of a collective without arithmetic: it moves parts of the source to the target.

    Args:
        context: the communicator's barrier, rings and sizes.
        size: the size of the largest part in bytes.
        step: the number of bytes of each part that one round moves.
        make: a function; make(begin, end) returns the round for the bytes [begin, end) of each part.
    """

    def __init__(self, context: ShmContext, size: int, step: int, make: Callable[[int, int], Round]) -> None:
        self._rings = context.rings
        self._regions = context.rings.of(_BYTE)
        self._own = self._regions[context.rank]
        self._barrier = context.barrier
        self._rounds = _Rounds(size, step, make)

    def run(self, source: Array | None, target: Array | None, agreement: Agreement) -> None:
        """Moves the parts.

        The source is None if this rank sends nothing; the target is None if this rank receives nothing.
        """
        regions, own = self._regions, self._own
        is_in_place = source is target
        source = None if source is None else _as_bytes(source)
        target = source if is_in_place else None if target is None else _as_bytes(target)
        is_first = True
        for region_bytes, published, kept, fetched in self._rounds.held or self._rounds:
            at = self._rings.next_offset(region_bytes)
            for part, begin, end in published:
                copy_words(source[part], own[at + begin : at + end])  # type: ignore[index]
            if kept is None:
                self._barrier.agree(agreement)
            else:
                # In the first round this rank copies its own part after the ranks have agreed, because no target may be
                # written before. In later rounds it copies the part before the barrier, while the part is still in the
                # cache.
                if not is_first:
                    copy_words(source[kept[0]], target[kept[1]])  # type: ignore[index]
                self._barrier.agree(agreement)
                if is_first:
                    copy_words(source[kept[0]], target[kept[1]])  # type: ignore[index]
            for owner, begin, end, part in fetched:
                copy_words(regions[owner][at + begin : at + end], target[part])  # type: ignore[index]
            is_first = False


def _as_bytes(array: Array) -> Array:
    """Returns a contiguous array as a 1-D array of bytes."""
    flat = array if array.ndim == 1 else array.ravel()
    return flat if flat.dtype is _BYTE else flat.view(_BYTE)


class _Rounds:
    """The rounds of a collective. There is at least one round, and each round has a barrier.

    Args:
        size: how much all rounds handle together: a number of elements in a reduction, and a number of bytes otherwise.
        step: how much one round handles, in the same unit.
        make: a function; make(begin, end) returns the round for the range [begin, end), in the same unit.

    Attributes:
        held: all rounds, if there are few; otherwise empty, and each run makes the rounds again.
    """

    def __init__(self, size: int, step: int, make: Callable[[int, int], Any]) -> None:
        self._cuts = cuts(size, step) or [(0, 0)]
        self._make = make
        self.held = tuple(self) if len(self._cuts) <= _MAX_ROUNDS_HELD else ()

    def __iter__(self) -> Iterator[Any]:
        return (self._make(begin, end) for begin, end in self._cuts)


def _broadcast(context: ShmContext, size: int, root: int) -> Movement:
    """Returns the plan of a broadcast of one array."""

    def make(begin: int, end: int) -> Round:
        part, length = slice(begin, end), end - begin
        if context.rank == root:
            return Round(length, [(part, 0, length)])
        return Round(length, fetched=[(root, 0, length, part)])

    return Movement(context, size, context.round_bytes, make)


def _gather(context: ShmContext, bounds: Bounds, root: int | None) -> Movement:
    """Returns the plan of a gather. If there is no root, all ranks receive all parts."""
    rank = context.rank

    def make(begin: int, end: int) -> Round:
        part = _within(bounds, rank, begin, end)
        own = slice(part.start - bounds[rank], part.stop - bounds[rank])
        published = [] if root == rank else [(own, 0, own.stop - own.start)]
        if root not in (None, rank):
            return Round(end - begin, published)
        parts = [(peer, _within(bounds, peer, begin, end)) for peer in context.peers()]
        fetched = [(peer, 0, each.stop - each.start, each) for peer, each in parts]
        return Round(end - begin, published, (own, part), fetched)

    return Movement(context, largest_part(bounds), context.round_bytes, make)


def _scatter(context: ShmContext, bounds: Bounds, root: int) -> Movement:
    """Returns the plan of a scatter. The root's region has a share for each of the other ranks."""
    rank = context.rank

    def make(begin: int, end: int) -> Round:
        region_bytes = shares_bytes(context.world_size, end - begin)
        part = _within(bounds, rank, begin, end)
        own = slice(part.start - bounds[rank], part.stop - bounds[rank])
        if root != rank:
            at = share_begin(root, rank, end - begin)
            return Round(region_bytes, fetched=[(root, at, at + own.stop - own.start, own)])
        published = _shares(context, bounds, begin, end)
        return Round(region_bytes, published, (part, own))

    return Movement(context, largest_part(bounds), context.share_bytes, make)


def _all_to_all(context: ShmContext, send_bounds: Bounds, receive_bounds: Bounds, largest: int) -> Movement:
    """Returns the plan of an all-to-all. Each rank's region has a share for each of the other ranks."""
    rank = context.rank

    def make(begin: int, end: int) -> Round:
        fetched = []
        for peer in context.peers():
            part = _within(receive_bounds, peer, begin, end)
            at = share_begin(peer, rank, end - begin)
            fetched.append((peer, at, at + part.stop - part.start, part))
        kept = _within(send_bounds, rank, begin, end), _within(receive_bounds, rank, begin, end)
        published = _shares(context, send_bounds, begin, end)
        return Round(shares_bytes(context.world_size, end - begin), published, kept, fetched)

    return Movement(context, largest, context.share_bytes, make)


def _within(bounds: Bounds, rank: int, begin: int, end: int) -> slice:
    """Returns the elements [begin, end) of a rank's part as a slice of the whole array, cut off at the part's end."""
    low, high = bounds[rank], bounds[rank + 1]
    return slice(min(low + begin, high), min(low + end, high))


def _shares(
    context: ShmContext, bounds: Bounds, begin: int, end: int, itemsize: int = 1
) -> list[tuple[slice, int, int]]:
    """Returns one round's copies into this rank's region: the elements [begin, end) of the part for every other rank.

    Each copy is (slice of the source, begin in the region, end in the region), in elements.
    """
    published = []
    for peer in context.peers():
        part = _within(bounds, peer, begin, end)
        at = share_begin(context.rank, peer, (end - begin) * itemsize) // itemsize
        published.append((part, at, at + part.stop - part.start))
    return published


class ListBroadcast(_Plan):
    """The plan of one broadcast of several arrays, which copies all arrays as bytes, whatever their dtypes.

    Args:
        context: the communicator's barrier, rings and sizes.
        sizes: the sizes of the arrays in bytes.
        root: the rank whose values all ranks get.
    """

    def __init__(self, context: ShmContext, sizes: tuple[int, ...], root: int) -> None:
        self._rings = context.rings
        self._region = context.rings.of(_BYTE)[root]
        self._barrier = context.barrier
        self._is_root = context.rank == root
        self._rounds = _Rounds(
            sum(sizes), context.round_bytes, lambda begin, end: (end - begin, pieces_between(sizes, begin, end))
        )

    def run(self, flats: Sequence[Array], agreement: Agreement) -> None:
        """Copies the current values of the root's arrays into the arrays of the other ranks."""
        for size, pieces in self._rounds.held or self._rounds:
            at = self._rings.next_offset(size)
            packed = self._region[at : at + size]
            parts = [flats[number][low:high] for number, low, high in pieces]
            if self._is_root and parts:
                pack_words(parts, packed)
            self._barrier.agree(agreement)
            if parts and not self._is_root:
                split_words(packed, parts)


# -- Reductions ----------------------------------------------------------------------------------------------------


class _Reduction(_Plan):
    """Base class of plans that reduce in shared memory, with the operands in rank order.

    Args:
        context: the communicator's barrier, rings and sizes.
        quietly: a function that calls another function, and makes NumPy ignore floating-point errors in it; see
            quiet_caller.
        dtype: the dtype of the arrays.
        op: the operator of the reduction, which the dtype must support.
    """

    def __init__(
        self,
        context: ShmContext,
        quietly: Callable[..., Any],
        dtype: np.dtype[Any],
        op: ReduceOp,
    ) -> None:
        self._rings = context.rings
        self.barrier = context.barrier
        self._rank = context.rank
        self._quietly = quietly
        self._reduce = reduction_of(op, dtype, context.world_size)
        self._dtype = dtype
        self._word = word_dtype(dtype)
        self._values = context.rings.of(dtype)
        self._own_words = context.rings.of(self._word)[context.rank]

    def reduce(self, contributions: Sequence[Array], result: Array) -> None:
        """Reduces the contributions, in rank order, into `result`."""
        self._quietly(self._reduce, contributions, result)


class OneShot(_Reduction):
    """The plan of an all-reduce in one round: after the barrier every rank reduces the whole arrays of all ranks.

    Args:
        context, quietly, dtype, op: see _Reduction.
        size: the number of elements of the array.
    """

    def __init__(
        self,
        context: ShmContext,
        quietly: Callable[..., Any],
        dtype: np.dtype[Any],
        size: int,
        op: ReduceOp,
    ) -> None:
        super().__init__(context, quietly, dtype, op)
        self.size = size
        self._size_bytes = size * dtype.itemsize
        self._assigns = self._size_bytes <= _ASSIGN_UP_TO_BYTES or self._word == dtype
        self._small: list[tuple[list[Array], Array]] | None = None  # [parity of the round]
        if self._size_bytes <= SMALL_REGION_BYTES:
            # Each item is a result of `next_regions`.
            regions = self._rings.small_regions(dtype, size)
            self._small = [(of_ranks, of_ranks[self._rank].view(self._word)) for of_ranks in regions]

    def next_regions(self) -> tuple[list[Array], Array]:
        """Returns the regions of all ranks for the next round, and this rank's region as an array of word_dtype."""
        if self._small is not None:
            return self._small[self.barrier.round + 1 & 1]
        begin = self._rings.next_offset(self._size_bytes) // self._dtype.itemsize
        end = begin + self.size
        return [ring[begin:end] for ring in self._values], self._own_words[begin:end]

    def run(self, source: Array, target: Array, agreement: Agreement) -> None:
        """All-reduces the source into the target, which may be the same array."""
        if source.ndim != 1:
            is_in_place = source is target
            source = source.ravel()
            target = source if is_in_place else target.ravel()
        barrier, small = self.barrier, self._small
        regions, own_words = self.next_regions() if small is None else small[barrier.round + 1 & 1]
        if self._assigns:
            regions[self._rank][...] = source
        else:
            publish_words(source.view(self._word), own_words)
        barrier.agree(agreement)
        self.reduce(regions, target)


class LargeReduction(_Plan):
    """The plan of an all-reduce of one array that is too large for OneShot.

    The plan keeps the NumPy calls for the last few arrays, because programs often reduce the same arrays again.

    Args:
        context: the communicator's barrier, rings and sizes.
        scratch: the buffers of this process.
        slots: the slots for large lists.
        dtype, size, op: the dtype of the array, the number of its elements, and the operator of the reduction.
    """

    def __init__(
        self, context: ShmContext, scratch: Scratch, slots: Slots, dtype: np.dtype[Any], size: int, op: ReduceOp
    ) -> None:
        self._settings = op, context, scratch, slots.of(dtype), slots.flags
        self._dtype = dtype
        self._size = size
        self._kept: dict[tuple[int, int], PipelinedAllReduce] = {}  # by the addresses of source and target

    def run(self, source: Array, target: Array, agreement: Agreement) -> None:
        """All-reduces the source into the target, which may be the same array."""
        addresses = _address(source), _address(target)
        if addresses[0] != addresses[1] and np.may_share_memory(source, target):
            source = source.copy()  # otherwise results would overwrite elements that were not read yet
            addresses = _address(source), addresses[1]
        kept = self._kept.get(addresses)
        if kept is None:
            if len(self._kept) >= _MAX_ARRAYS_KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
            at_source, at_target = [_array_at(address, self._size, self._dtype) for address in addresses]
            kept = self._kept[addresses] = PipelinedAllReduce([at_source], [at_target], *self._settings)
            kept.keep()
        kept.run(agreement)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _array_at(address: int, size: int, dtype: np.dtype[Any]) -> Array:
    """Returns an array over the memory of another array, without a reference to that array."""
    shape = (size * dtype.itemsize,)
    interface = {"version": 3, "data": (address, False), "shape": shape, "typestr": "|u1"}
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)


class OneShotList:
    """The all-reduce of a small list of arrays in one round. The arrays are copied directly to shared memory.

    Args:
        one_shot: the plan for the total number of elements of the arrays.
        sources, targets: see Backend.all_reduce.
        context: the communicator's barrier, rings and sizes.
        scratch: the buffers of this process.
        checks: the checks that the plan makes on the results.
        wire: the dtype and the factors for the values that ranks exchange; None if they exchange the values unchanged.
    """

    def __init__(
        self,
        one_shot: OneShot,
        sources: Sequence[Array],
        targets: Sequence[Array],
        context: ShmContext,
        scratch: Scratch,
        *,
        checks: Checks,
        wire: Wire | None,
    ) -> None:
        self._one_shot = one_shot
        self._wire = wire
        self._scratch = scratch
        self._rank = context.rank
        self._recorder = context.recorder
        self._finder = context.finder
        dtype, size = sources[0].dtype if wire is None else wire.dtype, one_shot.size
        self._is_finite = finite_test(dtype) if Checks.NONFINITE in checks else None
        pieces = tuple([Piece(number, 0, source.size) for number, source in enumerate(sources) if source.size])
        self._published: list[tuple[int, int, list[Array]]] = []
        self._delivered: list[Call] = []
        is_delivered = len(targets) > 1 or wire is not None
        self._result = scratch.result(dtype, size) if is_delivered else targets[0]
        delivery = CopyOut(targets, 1, scratch, wire)
        for begin, end, together in worth_a_call(Section(0, size, pieces), dtype.itemsize, size, size):
            given = [sources[piece.array] for piece in together]
            if len(given) == 1 and wire is None:
                given = [given[0].view(word_dtype(dtype))]
            self._published.append((begin, end, given))
            if is_delivered:
                self._delivered += delivery.calls(self._result[begin:end], together)
        self._squares = context.squares
        self._share: list[Array] = []  # the results whose squares this rank adds up, if it does
        if Checks.SQUARES in checks:
            sizes = tuple([target.size for target in targets])
            share = share_of(sizes, targets[0].dtype.itemsize, context.rank, context.world_size)
            self._share = [piece_of(targets, piece) for piece in share]

    def run(self, agreement: Agreement) -> None:
        """All-reduces each source into its target."""
        laps = tracing.laps_of(self._recorder)
        regions, own_words = self._one_shot.next_regions()
        own = regions[self._rank]
        for begin, end, sources in self._published:
            if self._wire is not None:
                with np.errstate(all="ignore"):
                    run_calls(collecting(sources, own[begin:end], self._wire, self._scratch))
            elif len(sources) == 1:
                publish_words(sources[0], own_words[begin:end])
            else:
                np.concatenate(sources, out=own[begin:end])
        if laps is not None:
            laps.end("packing")
        self._one_shot.barrier.agree(agreement)
        if laps is not None:
            laps.end("waiting")
        self._one_shot.reduce(regions, self._result)
        if self._is_finite is not None:
            with np.errstate(all="ignore"):
                self._finder.check_section(self._is_finite, self._result, regions, 0)
        if laps is not None:
            laps.end("reducing")
        if self._wire is None:
            run_calls(self._delivered)
        else:
            with np.errstate(all="ignore"):
                run_calls(self._delivered)
        if laps is not None and self._delivered:
            laps.end("splitting")
        if self._share:
            self._squares.add(np.concatenate(self._share))


class PreparedReduction(_Plan):
    """The prepared all-reduce of a list of arrays; see PreparedList in backend.py.

    Args:
        plan: the plan for these arrays.
    """

    def __init__(self, plan: OneShotList | PipelinedAllReduce) -> None:
        self._plan: OneShotList | PipelinedAllReduce | None = plan

    def run(self, agreement: Agreement) -> None:
        """All-reduces the current values of the arrays."""
        if self._plan is None:
            raise CommunicatorClosed("this prepared list cannot run: its communicator has ended")
        self._plan.run(agreement)

    def release(self) -> None:
        """Drops the references to the caller's arrays and to the shared memory."""
        self._plan = None


class _ReductionRound(NamedTuple):
    """One round of a reduce_scatter or a reduce.

    Slices select elements of the source or of the target. The numbers `begin` and `end` are offsets in a region, in
    elements.

    Attributes:
        region_bytes, published: see Round.
        contributions: [rank] -> (begin, end) of the elements in that rank's region that this rank reduces.
        own: the slice of the source that this rank contributes to its own result.
        result: the slice of the target that the result of the round fills.
    """

    region_bytes: int
    published: Sequence[tuple[slice, int, int]]
    contributions: Sequence[tuple[int, int]]
    own: slice
    result: slice


class PartialReduction(_Reduction):
    """The plan of a reduce_scatter (each rank gets a part of the result) or of a reduce (the root gets the result).

    Args:
        context, quietly, dtype, op: see _Reduction.
        size: the number of elements of the largest part.
        step: the number of elements of each part in one round.
        make: a function; make(begin, end) returns the round for the elements [begin, end) of each part.
    """

    def __init__(
        self,
        context: ShmContext,
        quietly: Callable[..., Any],
        dtype: np.dtype[Any],
        op: ReduceOp,
        size: int,
        step: int,
        make: Callable[[int, int], _ReductionRound],
    ) -> None:
        super().__init__(context, quietly, dtype, op)
        self._rounds = _Rounds(size, step, make)

    def run(self, source: Array, target: Array | None, agreement: Agreement) -> None:
        """Reduces the source. The target is None if this rank gets no result."""
        own_words, rank = self._own_words, self._rank
        if source.ndim != 1:
            source = source.ravel()
        if target is not None and target.ndim != 1:
            target = target.ravel()
        words = source.view(self._word)
        for region_bytes, published, contributed, own_part, result_part in self._rounds.held or self._rounds:
            at = self._rings.next_offset(region_bytes) // self._dtype.itemsize
            for part, begin, end in published:
                copy_words(words[part], own_words[at + begin : at + end])
            self.barrier.agree(agreement)
            if target is None:
                continue
            result = target[result_part]
            if not result.size:
                continue
            own = source[own_part]
            if rank > 1 and np.may_share_memory(own, result):  # in place: the result would overwrite `own`
                own = own.copy()
            contributions = [
                ring[at + begin : at + end] for ring, (begin, end) in zip(self._values, contributed, strict=True)
            ]
            contributions[rank] = own
            self.reduce(contributions, result)


def _reduce_scatter(
    context: ShmContext,
    quietly: Callable[..., Any],
    dtype: np.dtype[Any],
    bounds: Bounds,
    op: ReduceOp,
) -> PartialReduction:
    """Returns the plan of a reduce_scatter: every rank publishes the other ranks' parts, and reduces its own part."""
    rank, itemsize = context.rank, dtype.itemsize

    def make(begin: int, end: int) -> _ReductionRound:
        share_size_bytes = (end - begin) * itemsize
        own = _within(bounds, rank, begin, end)
        begins = [
            0 if owner == rank else share_begin(owner, rank, share_size_bytes) // itemsize
            for owner in range(context.world_size)
        ]
        return _ReductionRound(
            shares_bytes(context.world_size, share_size_bytes),
            _shares(context, bounds, begin, end, itemsize),
            [(at, at + own.stop - own.start) for at in begins],
            own,
            slice(own.start - bounds[rank], own.stop - bounds[rank]),
        )

    step = context.share_bytes // itemsize
    return PartialReduction(context, quietly, dtype, op, largest_part(bounds), step, make)


def _reduce(
    context: ShmContext,
    quietly: Callable[..., Any],
    dtype: np.dtype[Any],
    size: int,
    op: ReduceOp,
    root: int,
) -> PartialReduction:
    """Returns the plan of a reduce: every rank except the root publishes its array, and the root reduces all arrays.

    While the root reduces one round, the other ranks already publish the next round.
    """

    def make(begin: int, end: int) -> _ReductionRound:
        part, length = slice(begin, end), end - begin
        published = [] if context.rank == root else [(part, 0, length)]
        return _ReductionRound(length * dtype.itemsize, published, [(0, length)] * context.world_size, part, part)

    step = context.round_bytes // dtype.itemsize
    return PartialReduction(context, quietly, dtype, op, size, step, make)


def quiet_caller() -> Callable[..., Any]:
    """Returns a function `call`: call(function, *arguments) calls the function and ignores floating-point errors.

    If NumPy raised these errors as exceptions, only some ranks would raise them. A program finds overflow and NaN in
    the results.
    """
    context = Context()
    context.run(np.seterr, all="ignore")  # a setting of the context; entering it is fast
    return context.run

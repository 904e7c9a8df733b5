"""The plans of the collectives over shared memory, except the all-reduce, which is in all_reduce.py.

A plan is a collective for given sizes: the copies into this rank's buffer of a slot, and the reads from the buffers of
the other ranks. A plan of this file keeps no reference to a caller's array, so calls with the same sizes can use the
same plan. In one collective some ranks may make a new plan while other ranks use an old plan: the rounds of both plans
are the same.

To publish data, a rank writes the data into its own buffer. After a barrier, the other ranks read the data from that
buffer. A large array is moved in several rounds: while some ranks still read in one round, others already write for the
next round. An array that fits into one round is published completely before any target is written, so its source and
its target may overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.host_copy import copy_words, cuts, pack_words, pieces_between, split_words, word_dtype
from gradsync.communicators.shared_memory.all_reduce import ListAllReduce, Plan
from gradsync.communicators.shared_memory.arena import ROUND_BYTES, ROUND_SLOTS, ShmContext, share_begin
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, reduction_of

_BYTE = np.dtype(np.uint8)

_MAX_PLANS = 1024
_MAX_ROUNDS_HELD = 8  # a plan with more rounds makes them again in each run, which takes less time than its copies
# An array of at most this number of chunks (up to 1 GiB) can use a plan that keeps its NumPy calls. The calls take
# about 0.2 % of the array's memory. The calls of the last _MAX_ARRAYS_KEPT arrays are kept.
MAX_CHUNKS_KEPT = 1024
_MAX_ARRAYS_KEPT = 16


class Plans:
    """The plans of one communicator. `of` makes a plan at its first use, and keeps the plans that were used last.

    Args:
        context: the memory and objects that all collectives of the communicator use.

    Attributes:
        of: a function; of(kind, *arguments) returns the plan kind(context, *arguments).
    """

    def __init__(self, context: ShmContext) -> None:
        self._context = context
        self._made = WeakSet[Plan]()
        self.of: Callable[..., Any] = lru_cache(maxsize=_MAX_PLANS)(self._make)
        self._of_addresses: Callable[..., Any] = lru_cache(maxsize=_MAX_ARRAYS_KEPT)(self._make_for_addresses)

    def _make(self, kind: Callable[..., Plan], *arguments: Any) -> Plan:
        plan = kind(self._context, *arguments)
        self._made.add(plan)
        return plan

    def all_reduce_large(self, op: ReduceOp, source: Array, target: Array, agreement: Agreement) -> None:
        """All-reduces one array that is too large for OneShot. The target may be the same array.

        The NumPy calls for the last arrays are kept, because programs often reduce the same arrays again.
        """
        addresses = _address(source), _address(target)
        if addresses[0] != addresses[1] and np.may_share_memory(source, target):
            source = source.copy()  # otherwise results would overwrite elements that were not read yet
            addresses = _address(source), addresses[1]
        self._of_addresses(op, source.dtype, source.size, *addresses).run(agreement)

    def _make_for_addresses(self, op: ReduceOp, dtype: np.dtype[Any], size: int, *addresses: int) -> ListAllReduce:
        source, target = [_array_at(address, size, dtype) for address in addresses]
        plan = ListAllReduce(self._context, [source], [target], op)
        plan.keep()
        self._made.add(plan)
        return plan

    def release(self) -> None:
        """Releases the shared memory, even if a caller still holds a plan."""
        for plan in list(self._made):
            plan.release()
        self.__dict__.clear()


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _array_at(address: int, size: int, dtype: np.dtype[Any]) -> Array:
    """Returns an array over the memory of another array, without a reference to that array."""
    shape = (size * dtype.itemsize,)
    interface = {"version": 3, "data": (address, False), "shape": shape, "typestr": "|u1"}
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype)


class Round(NamedTuple):
    """One round of a collective.

    Slices select elements of the source or of the target. The numbers `begin` and `end` are offsets in a rank's buffer,
    in elements.

    Attributes:
        published: the copies into this rank's buffer, each as (slice of the source, begin, end).
        kept: the part that this rank sends to itself, as (slice of the source, slice of the target). In an in-place
            call the two slices are the same elements.
        fetched: the parts in the buffers of other ranks, each as (rank, begin, end, slice of the target).
    """

    published: Sequence[tuple[slice, int, int]]
    kept: tuple[slice, slice]
    fetched: Sequence[tuple[int, int, int, slice]]


class Movement(Plan):
    """The plan of a collective in which ranks move parts of their own sources to the targets of all ranks.

    Args:
        context: the memory and objects that all collectives of the communicator use.
        size: the number of elements of the largest part.
        step: the number of elements of each part that one round moves.
        make: a function; make(begin, end) returns the round for the elements [begin, end) of each part.
        dtype: the dtype of the elements; bytes unless the values are reduced.
    """

    def __init__(
        self,
        context: ShmContext,
        size: int,
        step: int,
        make: Callable[[int, int], Round],
        dtype: np.dtype[Any] = _BYTE,
    ) -> None:
        self._barrier = context.barrier
        self._rank = context.rank
        self._word = word_dtype(dtype)
        self._slots = context.round_slots(self._word)
        self._cuts = cuts(size, step) or [(0, 0)]  # each collective has at least one round, which compares the digests
        self._round = lru_cache(maxsize=_MAX_ROUNDS_HELD)(make)

    def run(self, source: Array, target: Array, agreement: Agreement) -> None:
        """Moves the parts of the source to the targets of all ranks."""
        is_in_place = source is target
        source = _flat(source, self._word)
        target = source if is_in_place else _flat(target, self._word)
        for begin, end in self._cuts:
            published, kept, fetched = self._round(begin, end)
            number = self._barrier.round % ROUND_SLOTS
            own = self._slots[number][self._rank]
            for part, low, high in published:
                copy_words(source[part], own[low:high])
            self._barrier.agree(agreement)
            self._receive(number, source[kept[0]], target[kept[1]], fetched, target)

    def _receive(
        self,
        number: int,
        own: Array,
        own_target: Array,
        fetched: Sequence[tuple[int, int, int, slice]],
        target: Array,
    ) -> None:
        """Copies this rank's own part, and the parts in the buffers of the slot `number`, to the target."""
        copy_words(own, own_target)
        buffers = self._slots[number]
        for owner, begin, end, part in fetched:
            copy_words(buffers[owner][begin:end], target[part])


def _flat(array: Array, dtype: np.dtype[Any]) -> Array:
    """Returns a contiguous array as a 1-D array of another dtype."""
    flat = array if array.ndim == 1 else array.ravel()
    return flat if flat.dtype is dtype else flat.view(dtype)


def all_gather(context: ShmContext, bounds: Bounds) -> Movement:
    """Returns the plan of an all_gather: every rank publishes its part once, for all ranks."""
    rank = context.rank

    def make(begin: int, end: int) -> Round:
        kept = _within(bounds, rank, begin, end)
        own = slice(kept.start - bounds[rank], kept.stop - bounds[rank])
        parts = [(peer, _within(bounds, peer, begin, end)) for peer in context.peers()]
        fetched = [(peer, 0, part.stop - part.start, part) for peer, part in parts]
        return Round([(own, 0, own.stop - own.start)], (own, kept), fetched)

    return Movement(context, largest_part(bounds), ROUND_BYTES, make)


def all_to_all(context: ShmContext, send_bounds: Bounds, receive_bounds: Bounds, largest: int) -> Movement:
    """Returns the plan of an all_to_all: every rank publishes a share for each of the other ranks."""
    rank = context.rank

    def make(begin: int, end: int) -> Round:
        parts = [(peer, _within(receive_bounds, peer, begin, end)) for peer in context.peers()]
        kept = _within(send_bounds, rank, begin, end), _within(receive_bounds, rank, begin, end)
        return _round_of_shares(context, send_bounds, begin, end, kept, parts)

    return Movement(context, largest, context.share_bytes, make)


class ReduceScatter(Movement):
    """The plan of a reduce_scatter: every rank publishes the other ranks' parts, and reduces its own part.

    Args:
        context: the memory and objects that all collectives of the communicator use.
        dtype, op: the dtype of the array, and the operator of the reduction.
        bounds: the bounds of the ranks' parts in the array.
    """

    def __init__(self, context: ShmContext, dtype: np.dtype[Any], bounds: Bounds, op: ReduceOp) -> None:
        rank = context.rank

        def make(begin: int, end: int) -> Round:
            own = _within(bounds, rank, begin, end)
            result = slice(own.start - bounds[rank], own.stop - bounds[rank])
            parts = [(peer, result) for peer in context.peers()]
            return _round_of_shares(context, bounds, begin, end, (own, result), parts, dtype.itemsize)

        super().__init__(context, largest_part(bounds), context.share_bytes // dtype.itemsize, make, dtype)
        self._dtype = dtype
        self._values = context.round_slots(dtype)
        self._quietly = context.quietly
        self._reduce = reduction_of(op, dtype, context.world_size)
        # The reduction reads the first two contributions in one step, whatever they overlap. It reads those of later
        # ranks after it has begun to write, and half precision block by block.
        self._reads_late = rank > 1 or accumulation_dtype(dtype) != dtype

    def _receive(
        self,
        number: int,
        own: Array,
        own_target: Array,
        fetched: Sequence[tuple[int, int, int, slice]],
        target: Array,
    ) -> None:
        """Reduces this rank's own part, and the parts in the buffers of the slot `number`, to the target."""
        if not own.size:
            return
        if self._reads_late and np.may_share_memory(own, own_target):  # the result would overwrite `own`
            own = own.copy()
        buffers = self._values[number]
        contributions = [own.view(self._dtype)] * len(buffers)
        for owner, begin, end, _ in fetched:
            contributions[owner] = buffers[owner][begin:end]
        self._quietly(self._reduce, contributions, own_target.view(self._dtype))


def _round_of_shares(
    context: ShmContext,
    send_bounds: Bounds,
    begin: int,
    end: int,
    kept: tuple[slice, slice],
    received: Sequence[tuple[int, slice]],
    itemsize: int = 1,
) -> Round:
    """Returns a round in which every rank publishes a share for each of the other ranks.

    The round moves the elements [begin, end) of each part. `received` has, for each other rank, the rank and the slice
    of the target for its share.
    """

    def share(owner: int, reader: int, part: slice) -> tuple[int, int]:
        at = share_begin(owner, reader, (end - begin) * itemsize) // itemsize
        return at, at + part.stop - part.start

    rank = context.rank
    sent = [(peer, _within(send_bounds, peer, begin, end)) for peer in context.peers()]
    return Round(
        [(part, *share(rank, peer, part)) for peer, part in sent],
        kept,
        [(peer, *share(peer, rank, part), part) for peer, part in received],
    )


def _within(bounds: Bounds, rank: int, begin: int, end: int) -> slice:
    """Returns the elements [begin, end) of a rank's part as a slice of the whole array, cut off at the part's end."""
    low, high = bounds[rank], bounds[rank + 1]
    return slice(min(low + begin, high), min(low + end, high))


class Broadcast(Plan):
    """The plan of one broadcast of several arrays, which copies all arrays as bytes, whatever their dtypes.

    Args:
        context: the memory and objects that all collectives of the communicator use.
        sizes: the sizes of the arrays in bytes.
        root: the rank whose values all ranks get.
    """

    def __init__(self, context: ShmContext, sizes: tuple[int, ...], root: int) -> None:
        self._barrier = context.barrier
        self._is_root = context.rank == root
        self._buffers = [slot[root] for slot in context.round_slots(_BYTE)]
        self._cuts = cuts(sum(sizes), ROUND_BYTES) or [(0, 0)]
        self._pieces = lru_cache(maxsize=_MAX_ROUNDS_HELD)(lambda begin, end: pieces_between(sizes, begin, end))

    def run(self, flats: Sequence[Array], agreement: Agreement) -> None:
        """Copies the current values of the root's arrays into the arrays of the other ranks."""
        for begin, end in self._cuts:
            packed = self._buffers[self._barrier.round % ROUND_SLOTS][: end - begin]
            parts = [flats[number][low:high] for number, low, high in self._pieces(begin, end)]
            if self._is_root and parts:
                pack_words(parts, packed)
            self._barrier.agree(agreement)
            if parts and not self._is_root:
                split_words(packed, parts)

    def run_one(self, source: Array, _target: Array, agreement: Agreement) -> None:
        """Broadcasts one array that fits into one round, in place: the same as `run` in fewer steps."""
        flat = _flat(source, _BYTE)
        packed = self._buffers[self._barrier.round % ROUND_SLOTS][: flat.size]
        if self._is_root:
            copy_words(flat, packed)
        self._barrier.agree(agreement)
        if not self._is_root:
            copy_words(packed, flat)

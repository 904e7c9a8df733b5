"""What the layer above needs of a communicator beside the collectives: bucketing.

Its arguments are trusted: the bucketing layer has checked them, and tells what the ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, mismatch
from gradsync.communicators.backend import PreparedList
from gradsync.communicators.collective_call import BYTE, CollectiveBase, CollectiveCall
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.communicators.nonfinite import NonFinite, NonFiniteFinder
from gradsync.communicators.resident import ResidentMemory
from gradsync.errors import BackendUnavailable
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp

# What a GPU's array takes of host memory at a time, where its values are read.
_PIECE_BYTES = 32 * 1024**2


class Wire(Protocol):
    """What travels in place of the values of a list; see bucketing/compression.py."""

    def encode(self, sources: Sequence[Array], arrays: ArrayKind) -> Array:
        """Returns the flat array that is reduced in place of the sources; valid until the next call."""

    def decode(self, flat: Array, targets: Sequence[Array], arrays: ArrayKind) -> None:
        """Brings the reduced values to the targets."""


class Watch(Protocol):
    """Looks at values where they are reduced: on the CPU within the call, on a GPU by work on the same stream.

    Attributes:
        looks_for_nonfinite: whether a communicator that has a finder is to use it, in place of `before`.
    """

    looks_for_nonfinite: bool

    def before(self, sources: Sequence[Array]) -> None:
        """Looks at this rank's values, which the reduction has not touched yet."""

    def after(self, targets: Sequence[Array], found: NonFinite | None) -> None:
        """Looks at the reduced values.

        Args:
            targets: where they are.
            found: what the communicator has found not to be finite; None where it has not looked.
        """


class ForBucketing(CollectiveBase):
    """Part of a communicator's methods, for gradsync's own use."""

    def all_reduce_list(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
        *,
        write_backs: Sequence[tuple[Array, Array]] = (),
        producers: Sequence[Any] = (),
        mean_over: int | None = None,
        prepared: PreparedList | None = None,
        wire: Wire | None = None,
        watch: Watch | None = None,
    ) -> Completion | None:
        """Reduces a list of arrays as one collective: what a gradient bucket needs.

        Every rank must call it with lists of equal sizes and dtypes. The arguments are trusted: the bucketing layer
        has checked them.

        Args:
            sources: 1-D contiguous arrays of one dtype, on the communicator's device.
            targets: where the results go: for each source an array of its size and dtype, or the source itself.
            op: an operator that the dtype table allows.
            agreement: what this rank believes all ranks are about to do.
            write_backs: pairs of a target and the native array that gets its values afterwards.
            producers: marks (see mark_work) of the work that made the sources.
            mean_over: divides a sum by this number afterwards: the mean over the ranks that had something to give.
            prepared: what prepare_list gave for these very arrays.
            wire: what travels in place of the values.
            watch: looks at the values before and after.

        Returns:
            None when the results are there; on a GPU, where the reduction runs on a stream of its own, its end.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        finder = self._finder_for(watch) if wire is None else None
        with self.lifetime.turn("all_reduce", agreement), self._launching(None, producers) as launch:
            if watch is not None and finder is None:
                watch.before(sources)
            if finder is not None and prepared is None:
                prepared = self._prepare_list(sources, targets, op, looks=True)
            if wire is not None:
                flat = wire.encode(sources, self.arrays)
                self._keep(*sources, *targets, flat)
                self._all_reduce_list([flat], [flat], op, agreement)
                wire.decode(flat, targets, self.arrays)
            elif prepared is not None:
                prepared.run(agreement)
            else:
                self._all_reduce_list(sources, targets, op, agreement)
            if mean_over is not None:
                for target in targets:
                    self.arrays.divide(target, mean_over)
            if watch is not None:
                watch.after(targets, None if finder is None else finder.take())
            for target, native in write_backs:
                self._bring_back(target, native, launch)
        return launch

    def _finder_for(self, watch: Watch | None) -> NonFiniteFinder | None:
        return self.finder if watch is not None and watch.looks_for_nonfinite else None

    def prepare_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool = False
    ) -> PreparedList | None:
        """Works out what stays the same where all_reduce_list gets these very arrays again and again.

        Not collective: ranks that have prepared theirs meet others that have not. For the thread that runs the
        collectives, as close() in another one meanwhile would take the memory away.

        Args:
            sources, targets, op: as for all_reduce_list.
            looks: whether all_reduce_list will get a watch that looks for what is not finite.

        Returns:
            None where the backend gains nothing by it.
        """
        if self.lifetime.ended_because is not None:
            return None
        return self._prepare_list(sources, targets, op, looks=looks)

    def broadcast_list(self, natives: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays into the other ranks', in place, as one collective: parameters at start-up.

        Every rank must call it with arrays of the same shapes and dtypes. The arguments are trusted.

        Args:
            natives: what native_array returned, of any layout; writable except on the root.
            root: the rank whose values all ranks get.
            agreement: what this rank believes all ranks are about to do.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """

        def move(launch: Any) -> None:
            flats = [self.arrays.flat(native) for native in natives]
            self._keep(*natives, *flats)
            self._broadcast_list([flat.view(BYTE) for flat in flats], root, agreement)
            if self.rank != root:
                for flat, native in zip(flats, natives, strict=True):
                    self._bring_back(flat, native, launch)

        if natives:
            self._run(CollectiveCall("broadcast", agreement, move), None)
        else:
            self.agree(agreement)

    def share_numbers(self, what: str, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, by rank; for gradsync's own use.

        Every rank must call it, with as many numbers.

        Args:
            what: names the operation in errors.
            numbers: at most some thousands, of 64 bits.
            agreement: what this rank believes all ranks are about to do.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        shared: list[list[int]] = self._run(
            CollectiveCall(what, agreement, lambda _launch: self._share_numbers(numbers, agreement)), None
        )
        return shared

    def _digest_of_values(self, native: Array) -> str:
        """Returns the SHA-256 of an array's elements in C order, whatever its layout; for gradsync's own use.

        Elements count by their bytes. A GPU's array passes through host memory in pieces, after what the current stream
        has still to do with it.
        """
        import hashlib  # here: start-up counts

        hasher = hashlib.sha256()
        if isinstance(native, np.ndarray):
            hasher.update(np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)
            return hasher.hexdigest()
        flat: Any = self.arrays.flat(native)
        step = max(1, _PIECE_BYTES // flat.dtype.itemsize)
        for begin in range(0, flat.size, step):
            hasher.update(flat[begin : begin + step].get().view(np.uint8).data)
        return hasher.hexdigest()

    def mark_work(self) -> Any:
        """For bucketing: returns what a stream can wait for to come after the caller's work; None on the CPU."""
        return None

    def mark_end(self) -> Completion | None:
        """For bucketing: returns the end of the caller's work so far, for a future; None on the CPU."""
        return None

    def follow_work(self, marks: Sequence[Any]) -> None:
        """For bucketing: what is queued on the current stream from now on comes after the marked work."""

    def agree(self, agreement: Agreement) -> None:
        """For bucketing: makes sure that every rank goes on with the same agreement. May wait for all ranks.

        Raises:
            PlanMismatch: the ranks' digests differ.
        """
        with self.lifetime.turn("agree", agreement):
            self._agree(agreement)

    # -- Memory in which gradients live ------------------------------------------------------------------------

    def make_resident_memory(self, size_bytes: int, agreement: Agreement) -> ResidentMemory:
        """Makes memory of which every rank has a part, and ranges of which are reduced where they lie.

        Every rank must call it, with the same size.

        Args:
            size_bytes: of each rank's part.
            agreement: what this rank believes all ranks are about to do.

        Raises:
            PlanMismatch: the sizes differ; nothing has been allocated.
            BackendUnavailable: some rank, which the text names, cannot have so much memory. No rank gets any, and the
                communicator can be used as before.
            RankFailed, CollectiveTimeout, RendezvousTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        what = "make_resident_memory"
        memory: ResidentMemory | None = None
        failure: BackendUnavailable | None = None

        def make(_launch: Any) -> list[list[int]]:
            nonlocal memory, failure
            sizes = self._share_numbers([size_bytes], agreement)
            if sizes.count([size_bytes]) < self.world_size:
                headlines = [f"resident memory of {size} bytes" for [size] in sizes]
                texts = dict(zip(self.ranks, map(Description, headlines), strict=True))
                raise mismatch(self.label, agreement, texts)
            try:
                memory = self._make_resident(size_bytes, agreement)
            except BackendUnavailable as error:
                failure = error
            return self._share_numbers([failure is None], agreement)

        have_made = self._run(CollectiveCall(what, agreement, make), None)
        without = [rank for rank, [has_made] in zip(self.ranks, have_made, strict=True) if not has_made]
        if failure is not None:
            raise BackendUnavailable(f"{self.label}: {what}: {failure}") from failure
        if without or memory is None:
            raise BackendUnavailable(
                f"{self.label}: {what} needs {size_bytes} bytes on every rank: they could not be had on ranks {without}"
            )
        return memory

    def all_reduce_resident(
        self,
        memory: ResidentMemory,
        begin_bytes: int,
        end_bytes: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        agreement: Agreement,
        *,
        producers: Sequence[Any] = (),
        mean_over: int | None = None,
        watch: Watch | None = None,
    ) -> Completion | None:
        """Reduces a range of resident memory in place, on every rank.

        Every rank must call it for the same memory, range, dtype and operator; the bits of the result are those that
        all_reduce_list gives, but for products of complex numbers. The arguments are trusted. What a failed call
        leaves in the range is undefined, but for PlanMismatch, which leaves it as it was.

        Args:
            memory: of this communicator.
            begin_bytes: where the range begins in `memory.bytes`: a multiple of 64.
            end_bytes: where it ends: any number of elements later, none too.
            dtype: of the elements.
            op, agreement, producers, mean_over, watch: as for all_reduce_list.

        Returns:
            As all_reduce_list does.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        finder = self._finder_for(watch)
        with self.lifetime.turn("all_reduce", agreement), self._launching(None, producers) as launch:
            values = [] if watch is None else [memory.view(begin_bytes, end_bytes, dtype)]
            if watch is not None and finder is None:
                watch.before(values)
            looks = finder is not None
            self._all_reduce_resident(memory, begin_bytes, end_bytes, dtype, op, agreement, mean_over, looks=looks)
            if watch is not None:
                watch.after(values, None if finder is None else finder.take())
        return launch

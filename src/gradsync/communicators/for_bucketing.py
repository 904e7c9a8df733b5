"""The collectives that only gradient bucketing uses; their arguments are not checked.

There are three such collectives. ListReduction reduces a list of arrays, with work before and after the reduction on
the same stream. broadcast_list broadcasts a list of arrays. make_resident_memory allocates resident memory, in which
gradients are kept; ListReduction reduces them there without a copy. The public collectives are in communicator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import PreparedList, ResidentMemory
from gradsync.communicators.communicator import BYTE, Communicator
from gradsync.communicators.host_values import Checks
from gradsync.errors import BackendUnavailable
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp


class Watch(Protocol):
    """Looks at the values of a list of arrays before and after their reduction, on the same stream."""

    def before(self, sources: Sequence[Array]) -> None:
        """Looks at this rank's values before the reduction."""

    def after(self, results: Sequence[Array]) -> None:
        """Looks at the reduced values."""


class ListReduction:
    """The all-reduce of a list of arrays as one collective, for a gradient bucket.

    Every rank must run such a reduction. On all ranks the lists must have the same length, and arrays with the same
    index must have the same size and dtype. The arguments are not checked, because bucketing has checked them. Make the
    object in the thread that runs the collectives.

    Args:
        communicator: the communicator that runs the reduction.
        sources: 1-D contiguous arrays of the same dtype, on the communicator's device.
        targets: the arrays for the results: for each source an array of its size and dtype, or the source itself.
        op: an operator that the dtype supports.
        write_backs: pairs (target, array). After the reduction, the values of each target are copied to the array of
            its pair, a NumPy or CuPy array of any layout.
        checks: the checks that the backend makes during the reduction.
        recurs: whether these very arrays will be reduced again. If so, the backend prepares the reduction now. `recurs`
            may differ between ranks.
        resident: the resident memory, if the only source is also the only target, and is a view of this memory that
            begins at a multiple of 64 bytes; else None.
    """

    def __init__(
        self,
        communicator: Communicator,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        *,
        write_backs: Sequence[tuple[Array, Array]] = (),
        checks: Checks = Checks.NONE,
        recurs: bool = False,
        resident: ResidentMemory | None = None,
    ) -> None:
        self._lifetime = communicator._lifetime
        self._backend = backend = communicator._backend
        self._sources = sources
        self._targets = targets
        self._op = op
        self._write_backs = write_backs
        self._prepared: PreparedList | None = None
        if self._lifetime.ended_because is not None:
            return
        if resident is not None:
            self._prepared = resident.prepare(sources[0], op, checks)
        elif recurs or checks:
            self._prepared = backend.prepare(sources, targets, op, checks)

    def run(
        self, agreement: Agreement, *, watch: Watch | None = None, producers: Sequence[Any] = ()
    ) -> Completion | None:
        """Reduces the arrays' current values.

        Args:
            agreement: the Agreement that describes this collective, for the comparison between the ranks.
            watch: looks at the values before and after the reduction.
            producers: marks (see Backend.mark_work) of the work that made the sources.

        Returns:
            On the CPU, None, because the results are complete. On a GPU, the Completion of the launched reduction.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for Communicator.all_reduce.
            NcclError, MpiError, RendezvousError, InvalidArgument: as for Communicator.all_reduce.
        """
        backend, sources, targets = self._backend, self._sources, self._targets
        with self._lifetime.collective("all_reduce", agreement), backend.launching(None, producers) as launch:
            if watch is not None:
                watch.before(sources)
            if self._prepared is None:
                backend.all_reduce(sources, targets, self._op, agreement)
            else:
                self._prepared.run(agreement)
            if watch is not None:
                watch.after(targets)
            for target, native in self._write_backs:
                backend.bring_back(target, native, launch)
        return launch


def broadcast_list(communicator: Communicator, natives: Sequence[Array], root: int, agreement: Agreement) -> None:
    """Copies the root's arrays into the arrays of the other ranks, in place, as one collective.

    Every rank must call it with arrays of the same shapes and dtypes. The arguments are not checked.

    Args:
        communicator: the communicator that runs the broadcast.
        natives: NumPy or CuPy arrays of any layout (see Communicator._native_array). The arrays must be writable,
            except on the root.
        root: the rank whose values all ranks get.
        agreement: the Agreement that describes this collective, for the comparison between the ranks.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for Communicator.all_reduce.
        NcclError, MpiError, RendezvousError, InvalidArgument: as for Communicator.all_reduce.
    """

    def move(launch: Any) -> None:
        flats = [communicator._arrays.flat(native) for native in natives]
        communicator._backend.keep(*natives, *flats)
        communicator._backend.broadcast([flat.view(BYTE) for flat in flats], root, agreement)
        if communicator.rank != root:
            for flat, native in zip(flats, natives, strict=True):
                communicator._backend.bring_back(flat, native, launch)

    if natives:
        communicator._run(("broadcast", agreement, move, None, None), None)
    else:
        communicator._agree(agreement)


# -- Resident memory, in which gradients are kept and reduced without a copy -----------------------------------------


def make_resident_memory(communicator: Communicator, size_bytes: int, agreement: Agreement) -> ResidentMemory:
    """Allocates resident memory of the same size on every rank. Ranges of the memory can then be reduced in place.

    Every rank must call it, with the same size.

    Args:
        communicator: the communicator that will reduce the memory.
        size_bytes: the size of the memory of each rank.
        agreement: the Agreement that describes this collective, for the comparison between the ranks. Its digest must
            depend on the size.

    Raises:
        PlanMismatch: the digests differ; nothing was allocated.
        BackendUnavailable: a rank cannot allocate the memory. The error message names the rank. No rank gets memory,
            and the communicator stays usable.
        RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError, MpiError, RendezvousError, InvalidArgument: as for
            Communicator.all_reduce.
    """
    what, backend = "make_resident_memory", communicator._backend
    memory: ResidentMemory | None = None
    failure: BackendUnavailable | None = None

    def make(_launch: Any) -> list[list[int]]:
        nonlocal memory, failure
        backend.agree(agreement)
        try:
            memory = backend.make_resident(size_bytes, agreement)
        except BackendUnavailable as error:
            failure = error
        return backend.share_numbers([failure is None], agreement)

    have_made = communicator._run((what, agreement, make, None, None), None)
    without = [rank for rank, [has_made] in zip(communicator.ranks, have_made, strict=True) if not has_made]
    if failure is not None:
        raise BackendUnavailable(f"{communicator.label}: {what}: {failure}") from failure
    if without or memory is None:
        raise BackendUnavailable(
            f"{communicator.label}: {what} needs {size_bytes} bytes on every rank; ranks {without} could not allocate "
            "them"
        )
    return memory

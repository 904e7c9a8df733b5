"""What gradient bucketing asks of a communicator: run a list, exchange numbers, compare. Nothing else of it is used.

The arguments are not checked, because bucketing has checked them. The public collectives are in communicator.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.communicator import BYTE, Communicator
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp


def reduce_list(
    communicator: Communicator,
    natives: Sequence[Array],
    op: ReduceOp,
    agreement: Agreement,
    *,
    factor: float = 1.0,
    targets: Sequence[Array] | None = None,
    after: Collection[Any] = (),
) -> Completion | None:
    """Reduces arrays of one dtype over the ranks as one collective. Every rank must call it.

    On a GPU it runs on the communicator's own stream, beside the host.

    Args:
        communicator: whose ranks take part.
        natives: the values, in the same sizes on all ranks.
        op: an operator that the dtype supports.
        agreement: what all ranks must be about to do; they compare it before data moves.
        factor: multiplies this rank's values before they are reduced; it may differ between ranks.
        targets: where the results go, native arrays of any layout: the array of the same index itself, or another one.
            None: the arrays are flat (see ArrayKind), and are reduced in place.
        after: marks of the work that makes the values and frees the targets; see mark_work.

    Returns:
        The Completion of what was launched on a GPU; None on the CPU, where the results are there.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for Communicator.all_reduce.
    """
    backend = communicator._backend
    with communicator._lifetime.collective("all_reduce", agreement), backend.launching(None, after) as launch:
        flats = natives
        if targets is not None:
            backend.keep(*natives)
            flats = flats_of(communicator, natives, targets)
        if factor != 1.0:
            communicator._arrays.multiply_in_place(flats, factor)
        backend.all_reduce(flats, flats, op, agreement)
        for flat, target in zip(flats, targets or (), strict=False):
            backend.bring_back(flat, target, launch)
    return launch


def exchange_numbers(
    communicator: Communicator, what: str, numbers: Sequence[int], agreement: Agreement
) -> list[list[int]]:
    """Compares the agreement, and returns the 64-bit integers of each rank. Every rank must call it."""
    return communicator._share_numbers(what, numbers, agreement)


def compare(communicator: Communicator, agreement: Agreement) -> None:
    """Raises PlanMismatch on all ranks unless all are about to do the same. Every rank must call it."""
    communicator._agree(agreement)


def kept(communicator: Communicator) -> dict[Any, Any]:
    """Returns a dict for what bucketing keeps as long as the communicator lives."""
    mapping: dict[Any, Any] = vars(communicator).setdefault("_kept_for_bucketing", {})
    return mapping


# -- Arrays and streams -----------------------------------------------------------------------------------------------


def arrays_of(communicator: Communicator) -> ArrayKind:
    """Returns the functions for the arrays of a communicator's device."""
    return communicator._arrays


def native_array(communicator: Communicator, array: Any, what: str) -> Array:
    """Returns a NumPy or CuPy array over the same memory; see Communicator._native_array."""
    return communicator._native_array(array, what)


def flats_of(communicator: Communicator, natives: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """Returns the values of arrays as flat arrays, which share memory with their targets wherever they can.

    ArrayKind.write_back brings the others to their targets. On a GPU all runs on the current stream.
    """
    arrays, flats = communicator._arrays, []
    for native, target in zip(natives, targets, strict=True):
        if native is not target and arrays.is_viewed_flat(target):
            arrays.assign(native, target)
            flats.append(arrays.flat(target))
        else:
            flats.append(arrays.flat(native))
    return flats


def runs_beside_host(communicator: Communicator) -> bool:
    """Whether reductions run on a GPU, beside the host."""
    return communicator._runs_beside_host


def check_stream(communicator: Communicator, what: str) -> None:
    """Raises InvalidArgument if the current stream cannot be used: it is capturing a CUDA graph."""
    communicator._checked_stream(None, what)


def mark_work(communicator: Communicator) -> Any:
    """Marks the end of the work that is queued on the current stream, for reduce_list(after=)."""
    return communicator._mark_work()


def follow_work(communicator: Communicator, marks: Collection[Any]) -> None:
    """Makes the current stream wait for marked work; see mark_work."""
    communicator._follow_work(list(marks))


def mark_end(communicator: Communicator) -> Completion | None:
    """Returns the end of the work that is queued on the current stream, for futures; None on the CPU."""
    return communicator._mark_end()


def timeout_seconds(communicator: Communicator) -> float:
    """Returns how long a collective waits for the other ranks."""
    return communicator._backend.timeout_seconds


def has_failed(communicator: Communicator) -> bool:
    """Whether a failure or abort() has ended the communicator, and not close()."""
    return communicator._lifetime.has_failed


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

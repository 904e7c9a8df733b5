"""What gradient bucketing asks of a communicator, beside its public methods: run a list, exchange numbers, compare.

Bucketing has checked the arguments already. The public collectives are in collectives.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement, LayoutsDiffer, digest_of
from gradsync.communicators.collectives import BYTE, is_fortran
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import PlanMismatch
from gradsync.futures import Work
from gradsync.reduction import Array, ReduceOp


def reduce_list(
    communicator: Communicator,
    natives: Sequence[Array],
    op: ReduceOp,
    agreement: Agreement,
    *,
    factor: Any = 1.0,
    targets: Sequence[Array] | None = None,
    after: Collection[Any] = (),
    squares: list[float] | None = None,
) -> Work:
    """Reduces arrays of one dtype over the ranks as one collective. Every rank must call it.

    On a GPU it runs on the communicator's own stream, beside the host.

    Args:
        communicator: whose ranks take part.
        natives: the values, in the same sizes on all ranks.
        op: an operator that the dtype supports.
        agreement: what all ranks must be about to do; they compare it before data moves.
        factor: multiplies this rank's values before they are reduced; it may differ between ranks. A number, or what
            share_weight() has returned.
        targets: where the results go, native arrays of any layout: the array of the same index itself, or another one.
            None: the arrays are flat (see ArrayKind), and are reduced in place.
        after: marks of the work that makes the values and frees the targets; see mark_work.
        squares: a list to which the sum of the squares of this rank's part of the results is appended, if the backend
            has it; see Backend.all_reduce_with_squares.

    Returns:
        The work that was launched on a GPU; on the CPU it is done.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for Communicator.all_reduce.
    """
    turned: Sequence[int] = ()
    if targets is not None and not communicator._backend.on_gpu:
        pairs = enumerate(zip(natives, targets, strict=True))
        turned = [number for number, (native, target) in pairs if native is target and is_fortran(native)]
    backend = communicator._backend
    with communicator._lifetime.turn("all_reduce", agreement), backend.launching(None, after) as launch:
        if targets is not None:
            launch.keep(*natives)
        while True:
            own, into, whole = natives, targets, agreement
            if into is not None and turned:  # as they lie, in Fortran order
                whole = agreement._replace(layout=digest_of("in Fortran order", turned))
                own, into = list(natives), list(into)
                for number in turned:
                    own[number] = into[number] = natives[number].T
            flats = own if into is None else flats_of(communicator, own, into)
            try:
                if squares is None:
                    backend.all_reduce(flats, flats, op, whole, factor)
                elif (of_part := backend.all_reduce_with_squares(flats, op, whole, factor)) is not None:
                    squares.append(of_part)
                break
            except LayoutsDiffer:  # on all ranks: once more, in C order
                turned = ()
        for flat, target in zip(flats, into or (), strict=False):
            launch.write_back(flat, target)
    return launch


def share_floats(
    communicator: Communicator, what: str, numbers: Sequence[float], agreement: Agreement
) -> list[list[float]]:
    """All-gathers float64 numbers; see Communicator.share_numbers."""
    bits = np.array(numbers, np.float64).view(np.int64).tolist()
    rows: Array = np.array(communicator.share_numbers(what, bits, agreement), np.int64)
    floats: list[list[float]] = rows.view(np.float64).tolist()
    return floats


def compare(communicator: Communicator, agreement: Agreement) -> None:
    """Raises PlanMismatch on all ranks unless all are about to do the same. Every rank must call it."""
    with communicator._lifetime.turn("agree", agreement):
        communicator._backend.compare(agreement)


# On a GPU buckets are launched while the backward pass runs. Nobody asks the other ranks before each.


def share_weight(communicator: Communicator, weight: float, agreement: Agreement) -> tuple[Any, Work, Array]:
    """Adds up the weights of all ranks on the device; see Backend.share_weight."""
    with communicator._lifetime.turn("backward(weight=)", agreement):
        return communicator._backend.share_weight(weight, agreement)


def verify(communicator: Communicator, agreement: Agreement) -> Work:
    """Launches a comparison of all that the ranks have launched; see Backend.verify."""
    with communicator._lifetime.turn("flush", agreement):
        return communicator._backend.verify()


def stray(communicator: Communicator, agreement: Agreement) -> PlanMismatch:
    """Ends the communicator for all ranks, because this one has another step; see Backend.stray."""
    return communicator._backend.stray(agreement)


def kept(communicator: Communicator) -> dict[Any, Any]:
    """Returns a dict for what bucketing keeps as long as the communicator lives."""
    mapping: dict[Any, Any] = vars(communicator).setdefault("_kept_for_bucketing", {})
    return mapping


# -- Arrays and streams -----------------------------------------------------------------------------------------------


def arrays_of(communicator: Communicator) -> ArrayKind:
    """Returns the functions for the arrays of a communicator's device."""
    return communicator._arrays


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
    return communicator._backend.on_gpu


def check_stream(communicator: Communicator, what: str) -> None:
    """Raises InvalidArgument if the current stream cannot be used: it is capturing a CUDA graph."""
    communicator._backend.checked_stream(None, what)


def mark_work(communicator: Communicator) -> Any:
    """Marks the end of the work that is queued on the current stream, for reduce_list(after=)."""
    communicator._lifetime.check_usable("a collective")  # in a forked child CUDA's own error would not say why
    return communicator._backend.mark_work()


def follow_work(communicator: Communicator, marks: Collection[Any]) -> None:
    """Makes the current stream wait for marked work; see mark_work."""
    communicator._backend.follow_work(marks)


def mark_end(communicator: Communicator) -> Work:
    """Returns the end of the work that is queued on the current stream, for futures."""
    with communicator._backend.launching(None) as launch:
        return launch


def timeout_seconds(communicator: Communicator) -> float:
    """Returns how long a collective waits for the other ranks."""
    return communicator._backend.timeout_seconds


def has_failed(communicator: Communicator) -> bool:
    """Whether a failure or abort() has ended the communicator, and not close()."""
    return communicator._lifetime.has_failed


def broadcast_list(
    communicator: Communicator, natives: Sequence[Array], root: int, agreement: Agreement, *, at_once: bool = False
) -> None:
    """Copies the root's arrays into those of the other ranks, in place, as one collective.

    Every rank must call it with arrays of the same shapes and dtypes, after the ranks have exchanged numbers with the
    same agreement.

    Args:
        communicator: whose ranks take part.
        natives: NumPy or CuPy arrays of any layout (see Collectives.native_array), writable except on the root.
        root: the rank whose values all ranks get.
        agreement: what the ranks compare.
        at_once: whether to write to the arrays only when all have arrived, so that no rank is left with a part of the
            root's values if the root dies meanwhile. It needs memory for copies, and the host waits.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for Communicator.all_reduce.
        NcclError, MpiError, RendezvousError, InvalidArgument: as for Communicator.all_reduce.
    """
    if not natives:
        return
    backend, arrays = communicator._backend, communicator._arrays
    into_copies = at_once and communicator.rank != root
    received = [arrays.empty_like(native) for native in natives] if into_copies else natives
    with communicator._lifetime.turn("broadcast", agreement), backend.launching(None) as launch:
        flats = [arrays.flat(native) for native in received]
        launch.keep(*received, *flats)
        backend.broadcast([flat.view(BYTE) for flat in flats], root, agreement)
        if communicator.rank != root:
            for flat, native in zip(flats, received, strict=True):
                launch.write_back(flat, native)
    if into_copies or launch.has_host_results:
        launch.wait()
    if into_copies:
        for copy, native in zip(received, natives, strict=True):
            native[...] = copy

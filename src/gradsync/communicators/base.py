"""The contract of a communicator: public methods check, private hooks move bytes.

The collectives and groups stand in the room collectives/; here are the barrier, what the layers above need, and life
and death. A backend subclasses `Communicator` and writes the hooks of backend.py.

All collectives are collective in the strict sense: every rank of the communicator must call the same methods in the
same order with the same shape, dtype, operator and root. Ranks that disagree get PlanMismatch, all of them, before
data moves, and can go on; on NCCL, ranks that leave what they have repeated may find out too late: then the error is
`broken`, and so is the communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.backend import PreparedList
from gradsync.communicators.collective_call import BYTE, CollectiveCall
from gradsync.communicators.collectives.all_to_all import AllToAll
from gradsync.communicators.collectives.groups import Groups
from gradsync.communicators.collectives.messages import Messages
from gradsync.communicators.collectives.movements import Movements
from gradsync.communicators.collectives.reductions import Reductions
from gradsync.communicators.lifetime import Lifetime
from gradsync.completion import Completion
from gradsync.errors import PlanMismatch, describe
from gradsync.flight_recorder import FlightRecorder
from gradsync.reduction import Array, ReduceOp

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradsync.communicators.collectives.asynchronous import Asynchronous
    from gradsync.communicators.collectives.objects import Objects


class Communicator(Reductions, Movements, AllToAll, Messages, Groups):
    """A fixed group of ranks that run collectives together.

    One thread at a time may use a communicator; a second one gets an error that says so. A collective that fails in
    the middle (a rank died, a deadline passed, Ctrl-C) breaks the communicator for all its ranks: every later call
    raises CommunicatorClosed with the first reason. Only PlanMismatch leaves it usable, unless it says `broken`.

    Attributes:
        rank: this process's number, 0 <= rank < world_size.
        world_size: number of ranks.
        ranks: the members' numbers in the world, by rank; errors name ranks by these.
        label: how error messages name this rank: "rank 1/4".
        backend: "local", "shm", "nccl" or "mpi".
        device: where arrays live: "cpu", or a CUDA device such as "cuda:0".
        recorder: remembers the last collectives of this rank; `print(communicator.recorder.describe())`.
        lifetime: for gradsync's own use: who may use the communicator, and whether it has ended.
        on_exit: for the process group: called in place of close() or abort() when a `with` block ends.
    """

    backend: str
    device: str = "cpu"

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: str,
        *,
        ranks: tuple[int, ...] | None = None,
        label: str | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.ranks = tuple(range(world_size)) if ranks is None else ranks
        self.label = f"rank {rank}/{world_size}" if label is None else label
        self.recorder = FlightRecorder(group)
        self.lifetime = Lifetime(self)
        self.on_exit: Callable[[BaseException | None], None] | None = None

    # -- Collectives; the others are in the classes above --------------------------------------------------------

    def barrier(self) -> None:
        """Returns once every rank has called it.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        self._run(self._barrier_call(), None)

    def _barrier_call(self) -> CollectiveCall:
        agreement = agreement_on("barrier", (), None, "")
        return CollectiveCall("barrier", agreement, lambda _launch: self._meet(agreement))

    @cached_property
    def asynchronous(self) -> Asynchronous:
        """The collectives as futures: `communicator.asynchronous.all_reduce(array)` returns at once."""
        from gradsync.communicators.collectives.asynchronous import Asynchronous  # here: not every program needs it

        return Asynchronous(self)

    @cached_property
    def objects(self) -> Objects:
        """Collectives on Python objects: `communicator.objects.all_gather(anything)`."""
        from gradsync.communicators.collectives.objects import Objects

        return Objects(self)

    # -- For the layers above: bucketing -----------------------------------------------------------------------

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
            prepared: what prepare_list returned for these very sources, targets and operator.

        Returns:
            None when the results are there; on a GPU, where the reduction runs on a stream of its own, its end.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        with self.lifetime.turn("all_reduce", agreement), self._launching(None, producers) as launch:
            if prepared is None:
                self._all_reduce_list(sources, targets, op, agreement)
            else:
                prepared.run(agreement)
            if mean_over is not None:
                for target in targets:
                    self.arrays.divide(target, mean_over)
            for target, native in write_backs:
                self._bring_back(target, native, launch)
        return launch

    def prepare_list(self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp) -> PreparedList | None:
        """Prepares all_reduce_list of the same arrays, for when they come again step after step.

        Not collective: ranks that have prepared and ranks that have not meet in one call. The arrays must stay where
        they are in memory; what is in them may change. Whoever has the result may drop it at any time; it keeps the
        arrays until then, or until the communicator ends.

        Args:
            sources, targets, op: as for all_reduce_list.

        Returns:
            What to hand to all_reduce_list with the same arguments; None where the backend gains nothing by it, or the
            communicator has ended.
        """
        return None if self.closed or not sources else self._prepare_list(sources, targets, op)

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
        """Returns the numbers of every rank, by rank; for gradsync's own use: joining, consistency.

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

    def mark_work(self) -> Any:
        """For bucketing: returns what a stream can wait for to come after the caller's work; None on the CPU."""
        return None

    def agree(self, agreement: Agreement) -> None:
        """For bucketing: makes sure that every rank goes on with the same agreement. May wait for all ranks.

        Raises:
            PlanMismatch: the ranks' digests differ.
        """
        with self.lifetime.turn("agree", agreement):
            self._agree(agreement)

    # -- Life and death ----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the communicator can no longer be used."""
        return self.lifetime.ended_because is not None

    def close(self) -> None:
        """Releases the communicator in order. Not collective, and may be repeated.

        Asynchronous collectives that were submitted end first, each by its own deadline. Else it never blocks on other
        ranks on the CPU; on NCCL it lets what was launched end, for 20 s at most. A rank that still needs this one
        afterwards gets RankFailed.

        Raises:
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError: a failure on the GPU that no call has raised yet.
        """
        self.lifetime.close()

    def abort(self, reason: str, *, culprit: int | None = None) -> None:
        """Breaks the communicator for all ranks at once: those inside or entering a collective get RankFailed.

        Args:
            reason: told to every rank, e.g. "ValueError in the backward pass".
            culprit: the rank that the others' RankFailed names; None is this rank.
        """
        self.lifetime.abort(reason, culprit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.on_exit is not None:
            self.on_exit(error)
        elif error is None or isinstance(error, PlanMismatch) or self.world_size == 1:
            self.close()
        else:
            self.abort(describe(error))

    def __repr__(self) -> str:
        ended = self.lifetime.ended_because
        state = "" if ended is None else f", closed: {ended}"
        return f"<{type(self).__name__} {self.label} on {self.device} ({self.backend}){state}>"

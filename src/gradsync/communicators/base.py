"""The contract of a communicator: public methods check, private hooks move bytes.

The collectives and groups stand in the room collectives/, what the layers above need in for_bucketing.py; here are the
barrier, and life and death. A backend subclasses `Communicator` and writes the hooks of backend.py.

All collectives are collective in the strict sense: every rank of the communicator must call the same methods in the
same order with the same shape, dtype, operator and root. Ranks that disagree get PlanMismatch, all of them, before
data moves, and can go on; on NCCL, ranks that leave what they have repeated may find out too late: then the error is
`broken`, and so is the communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.collective_call import CollectiveCall
from gradsync.communicators.collectives.all_to_all import AllToAll
from gradsync.communicators.collectives.groups import Groups
from gradsync.communicators.collectives.messages import Messages
from gradsync.communicators.collectives.movements import Movements
from gradsync.communicators.collectives.reductions import Reductions
from gradsync.communicators.for_bucketing import ForBucketing
from gradsync.communicators.lifetime import Lifetime, culprit_of
from gradsync.diagnostics import FlightRecorder, Place
from gradsync.errors import PlanMismatch, describe

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradsync.communicators.collectives.asynchronous import Asynchronous
    from gradsync.communicators.collectives.objects import Objects


class Communicator(Reductions, Movements, AllToAll, Messages, Groups, ForBucketing):
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
        debug: whether its ranks agree on every collective before it, and gradients are watched: see use_debug_mode.
        on_exit: for the process group: called in place of close() or abort() when a `with` block ends.
    """

    backend: str
    device: str = "cpu"
    debug: bool = False

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
        self.recorder = FlightRecorder(group, place=Place(rank, self.ranks, self.backend))
        self.lifetime = Lifetime(self)
        self.on_exit: Callable[[BaseException | None], None] | None = None

    def use_debug_mode(self) -> None:
        """For gradsync's own use: from now on, on all ranks, agrees on every collective before data moves.

        Where the collective itself carries a digest, or the ranks always agree first, that is nothing new.
        """
        self.debug = True

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
        self.family.was_aborted = True  # who aborts one knows that all end: closing has no other failure to raise
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
            self.abort(describe(error), culprit=culprit_of(error))

    def __repr__(self) -> str:
        ended = self.lifetime.ended_because
        state = "" if ended is None else f", closed: {ended}"
        return f"<{type(self).__name__} {self.label} on {self.device} ({self.backend}){state}>"

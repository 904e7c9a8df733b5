"""The communicator: a fixed group of ranks, with its groups, its end, and its collectives (collectives.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement, LayoutsDiffer, agreement_on, machine_digest
from gradsync.communicators.backend import Backend, Launch, Message
from gradsync.communicators.collectives import Collectives
from gradsync.communicators.groups import CommunicatorTree, NonMember, await_members, listed, reporting_failures
from gradsync.communicators.lifetime import Lifetime, culprit_of
from gradsync.errors import CommunicatorClosed, InvalidArgument, PlanMismatch, describe
from gradsync.futures import CollectiveFuture, LoggedFuture, Work, refuse_in_callback
from gradsync.words import no_attribute

if TYPE_CHECKING:
    from typing import Self

    from gradsync.communicators.objects import Objects
    from gradsync.communicators.tagged import TaggedMessages


_OF_ITS_WORLD = "rank", "world_size", "ranks", "most_advanced"  # what a communicator is asked for until a rebuild


class Communicator(Collectives):
    """A fixed group of ranks that run collectives together.

    Only one thread at a time may run a collective of a communicator. If one fails after it has begun (a rank died, a
    deadline passed, Ctrl-C), the communicator is broken for all: each rank raises an error in its current or next
    collective, and CommunicatorClosed in the later ones. After PlanMismatch it stays usable.

    Args:
        backend: moves the bytes. It belongs to the communicator, which releases it at its end.

    Attributes:
        rank: this process's number in the communicator, from 0.
        world_size: the number of its ranks.
        ranks: the rank in the world of each of them; errors name ranks by these.
        label: this rank's name in errors, e.g. "rank 1/4".
        backend: "local", "shm", "nccl" or "mpi".
        device: where the collectives run: "cpu", or a CUDA device such as "cuda:0".
        member: this process's rank at launch, which stays when gs.rebuild() numbers the ranks of the world anew.
        most_advanced: after gs.rebuild(): the rank, or one of those, that came to the new world with the most steps;
            else 0. Broadcast the state of the training from it.
        completed_steps: the number of flushes that callbacks have completed, since the start of the ranks. A rank that
            joins later, or is behind, has the number of the others only when it has completed one with them: until then
            it may not have their state.
        recorder: the flight recorder, with this rank's last collectives and messages: `print(comm.recorder)`.
        on_exit: what the end of a `with` block calls, with its exception or None, in place of close() or abort(); None:
            nothing. The process group sets it.
    """

    device: str = "cpu"

    def __init__(self, backend: Backend) -> None:
        lifetime = Lifetime(backend)
        super().__init__(backend, lifetime)
        backend.fail = lifetime.fail
        self.backend = backend.name
        self.device = backend.device
        self.recorder = backend.recorder
        self.member = backend.ranks[backend.rank]
        self.most_advanced = 0
        self.completed_steps = 0
        self._completed_before: Sequence[int] = [0] * backend.world_size  # by each rank, in worlds before
        self._most_before = 0
        self._adopted_by: Communicator | None = None
        self.on_exit: Callable[[BaseException | None], None] | None = None

    def begin_as_world(self, member: int, completed_steps: Sequence[int], *, is_rebuilt: bool) -> None:
        """Begins as the world's communicator; `completed_steps` are those of its ranks in worlds before."""
        self.member, self.completed_steps = member, completed_steps[self.rank]
        self._tree.has_begun = self._tree.is_rebuilt = is_rebuilt  # also if no callback counts the steps
        self._begin_after(completed_steps)

    def _begin_after(self, completed_steps: Sequence[int]) -> None:
        self._completed_before, self._most_before = completed_steps, max(completed_steps)
        self.most_advanced = completed_steps.index(self._most_before)

    def count_step(self) -> None:
        """Counts a flush that callbacks have completed."""
        if self._adopted_by is not None:
            self._adopted_by.count_step()
            return
        most, mine = self._most_before, self.completed_steps
        self.completed_steps = 1 + (most if most > mine else mine)  # each step pays: max() is slower
        self._tree.has_begun = True

    @property
    def has_begun(self) -> bool:
        """Whether there is a state to lose: this world, or one of its groups, has completed a step, or was rebuilt."""
        return self._tree.has_begun

    @property
    def is_rebuilt(self) -> bool:
        """Whether gs.rebuild() has made this world, or the one of this group."""
        return self._tree.is_rebuilt

    def __getattr__(self, name: str) -> NoReturn:
        if name in _OF_ITS_WORLD:
            raise CommunicatorClosed(f"{self.label}: {name} of a communicator that is over: {self.ended_because}")
        no_attribute("a Communicator", "'Communicator' object", name, dir(self))

    def _finish(self, what: str, work: Work, result: Any) -> Any:
        if isinstance(work, Launch) and work.has_host_results:
            work.wait()
        return result

    def _after(self, stream: Any) -> None:
        return None

    def _send_and_receive(
        self, what: str, sends: Sequence[Message], receives: Sequence[Message], stream: Any, result: Any
    ) -> Any:
        own = [*sends, *receives]
        with self._lifetime.turn(what, own[0].agreement):
            self._messages.start(sends, receives, own)
            for message in own:
                if message.error is not None:
                    raise message.error
        for message in own:
            message.work.order(what, stream)
            self._finish(what, message.work, None)
        return result

    @cached_property
    def asynchronous(self) -> Asynchronous:
        """The collectives that return futures, e.g. `communicator.asynchronous.all_reduce(array)`."""
        return Asynchronous(self)

    @cached_property
    def objects(self) -> Objects:
        """The collectives on Python objects, e.g. `communicator.objects.all_gather(anything)`."""
        from gradsync.communicators.objects import Objects

        return Objects(self)

    @cached_property
    def tagged(self) -> TaggedMessages:
        """The messages with tags, for gradsync.mpi."""
        from gradsync.communicators.tagged import TaggedMessages

        return TaggedMessages(self)

    # -- Groups --------------------------------------------------------------------------------------------------

    @cached_property
    def _tree(self) -> CommunicatorTree:
        """The tree of the communicators that were made from the same world."""
        return CommunicatorTree(self.recorder.group)

    def new_group(self, ranks: Iterable[int]) -> Communicator | NonMember:
        """Makes a group of some ranks of this communicator, in their order here.

            group = comm.new_group([0, 2])
            if group:
                group.all_reduce(array)

        Only the members need to call it, all with the same ranks. Ranks that are together in two groups make both in
        the same order, and call the collectives of both in the same order.

        Keep a reference to the group while any rank uses it, and close() it when it is not needed any more; the end of
        the process group closes the others. MPI allows about 2,000 open groups, and counts those that Python has
        deleted but nobody has closed.

        Args:
            ranks: the members' ranks in this communicator, in any order: in new_group([2, 0]) rank 0 is 0, and rank 2
                is 1. `split` can number them otherwise.

        Returns:
            The group. A rank that is no member gets a NonMember, which is false in `if group:`, but not None.

        Raises:
            InvalidArgument: `ranks` is empty, or has a rank twice or one that is not here; or a done-callback calls it.
            RendezvousTimeout: a member did not call it before the deadline of collectives; the error names it.
            RankFailed, CollectiveTimeout, BackendUnavailable, NcclError, MpiError: the group cannot be made; all
                members fail.
            CommunicatorClosed: this communicator was closed or aborted, or has failed.
            RendezvousError: the connection to the rendezvous server was lost.
        """
        members = self._checked_members(ranks)
        refuse_in_callback(self.label, "new_group")
        self._lifetime.check_usable("new_group")
        if self.rank not in members:
            return NonMember(self.label, f"the group of ranks {self._listed(members)}")
        return self._make_group("new_group", members)

    def split(self, color: int | None, key: int = 0) -> Communicator | NonMember:
        """Divides the ranks into groups, one for each color, like MPI_Comm_split. Every rank must call it.

        Args:
            color: ranks of one color, a signed 64-bit integer, join one group. None: this rank joins none.
            key: a group numbers its ranks by this signed 64-bit integer, and those of equal keys in their order here.

        Returns:
            The group of this rank's color; for None a NonMember, which is false in `if group:`, but not None.

        Raises:
            InvalidArgument: `color` or `key` is not a signed 64-bit integer.
            RendezvousTimeout, BackendUnavailable: as for new_group.
        """
        number = 0 if color is None else self._checked_word("color", color)
        mine = [0 if color is None else 1, number, self._checked_word("key", key)]
        shared = self.share_numbers("split", mine)
        if color is None:
            return NonMember(self.label, "any group of the split (it passed color=None)")
        same = [rank for rank, (has_color, number, _) in enumerate(shared) if has_color and number == color]
        members = tuple(sorted(same, key=lambda rank: (shared[rank][2], rank)))
        return self._make_group("split", members)

    def split_by_machine(self) -> Communicator:
        """Divides the ranks into groups, one for each machine. Every rank must call it.

        Containers with pid namespaces of their own count as machines: their processes cannot see each other.

        Returns:
            The group of the ranks on this rank's machine.

        Raises:
            RendezvousTimeout, BackendUnavailable: as for new_group.
        """
        return cast(Communicator, self.split(machine_digest() - 2**63))  # no NonMember, as this rank passes a color

    def share_numbers(self, what: str, numbers: Sequence[int], agreement: Agreement | None = None) -> list[list[int]]:
        """All-gathers 64-bit integers, equally many on each rank, for the method `what`. For gradsync's own use.

        First the ranks compare the agreement; without one they agree on `what`.
        """
        agreement = agreement or agreement_on(what, (), None, "")
        self._backend.checked_stream(None, what)
        with self._lifetime.turn(what, agreement):
            return self._backend.share_numbers(numbers, agreement)

    def _make_group(self, what: str, members: tuple[int, ...]) -> Communicator:
        """Makes a group that this rank belongs to."""
        name = self._tree.new_name(self._listed(members))
        with reporting_failures(self._backend, self._lifetime, what):
            await_members(self._backend, self._lifetime, what, members, name)
            group = Communicator(self._backend.connect_group(members, name))
        group._tree, group.member = self._tree, self.member
        group._begin_after([self._completed_before[member] for member in members])
        self._tree.add(group)
        return group

    def _listed(self, members: Sequence[int]) -> str:
        return listed([self.ranks[member] for member in members])

    def _checked_members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        try:
            members = sorted([-1 if (number := integer_of(rank)) is None else number for rank in ranks])
        except TypeError:
            members = []
        fits = members and members[0] >= 0 and members[-1] < self.world_size and len(set(members)) == len(members)
        if not fits:
            raise InvalidArgument(
                f"{self.label}: new_group needs one or more distinct ranks from 0 to {self.world_size - 1}, "
                f"got {ranks!r}"
            )
        return tuple(members)

    def _checked_word(self, name: str, value: int) -> int:
        number = integer_of(value)
        if number is None or not -(2**63) <= number < 2**63:
            needed = "a signed 64-bit integer or None" if name == "color" else "a signed 64-bit integer"
            raise InvalidArgument(f"{self.label}: split needs {name} to be {needed}, got {value!r}")
        return number

    # -- The end -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the communicator can no longer be used."""
        return self._lifetime.ended_because is not None

    @property
    def ended_because(self) -> str | None:
        """Why the communicator can no longer be used; None while it can."""
        return self._lifetime.ended_because

    def close(self) -> None:
        """Closes the communicator and frees its resources. A second call does nothing.

        It is no collective, and waits for this rank's messages only, until their deadline; on NCCL also for launched
        work, the end of NCCL's communicator and done-callbacks, 10 s each at most. A rank that needs this one in a
        later collective raises RankFailed.
        """
        if not self.closed:
            self._messages.wait_for_all()
        if not self._lifetime.is_inherited:
            self._backend.drain()
        self._lifetime.close()

    def close_tree(self) -> None:
        """Closes this communicator and all that were made from the same world."""
        try:
            self._tree.close()
        finally:
            self.close()

    def replace_tree(self) -> None:
        """Ends this communicator, and all that were made from the same world, on this rank: the world was rebuilt."""
        again = "gs.rebuild() has made a new world: make it again"
        for communicator in self._tree.communicators():
            communicator._replace(again)
        self._replace(f"{again}, as `comm = gs.rebuild()`, or leave it out, as callbacks do with group=None")

    def _replace(self, because: str) -> None:
        self._lifetime.replace(because)
        for name in _OF_ITS_WORLD:  # a program that goes on with them would deal out its work wrongly, unnoticed
            self.__dict__.pop(name, None)

    def end_messages(self, seconds: float) -> None:
        """Waits for the messages of this communicator and its tree; aborts those that have some left after a time."""
        until = time.monotonic() + seconds
        for communicator in [self, *self._tree.communicators()]:
            communicator._messages.wait_for_all(max(until - time.monotonic(), 0.0))

    def adopt(self, communicator: Communicator) -> None:
        """Adds a communicator over the same ranks to this one's tree: close_tree() closes it; and counts its steps."""
        communicator._tree, communicator.member, communicator._adopted_by = self._tree, self.member, self
        communicator._begin_after(self._completed_before)
        self._tree.add(communicator)

    def new_name(self, what: str) -> str:
        """Returns a name that no other communicator of the tree has, equal on ranks that ask alike."""
        return self._tree.new_name(what)

    def abort(self, reason: str, *, culprit: int | None = None) -> None:
        """Ends the communicator for all ranks. The other ranks raise RankFailed in their current or next collective.

        Args:
            reason: what the errors on all ranks say, e.g. "ValueError in the backward pass".
            culprit: the world rank that they name; None: this rank.
        """
        self._lifetime.abort(reason, culprit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.on_exit is not None:
            self.on_exit(error)
        elif error is None or isinstance(error, PlanMismatch) or (not self.closed and self.world_size == 1):
            self.close()
        else:
            self.abort(describe(error), culprit=culprit_of(error))

    def __repr__(self) -> str:
        ended = self._lifetime.ended_because
        state = "" if ended is None else f", closed: {ended}"
        return f"<{type(self).__name__} {self.label} on {self.device} ({self.backend}){state}>"


class Asynchronous(Collectives):
    """The collectives of `communicator.asynchronous`: each returns a CollectiveFuture of what the blocking one returns.

    Every rank must call its collectives, blocking and asynchronous, in the same order. A wrong argument raises
    InvalidArgument or UnsupportedDtype at once; all else is raised by the future's result() and wait(), or logged, if
    nobody asks. Do not use a collective's arrays until its future is done.

    On the CPU a collective runs within the call, and its future is done. Messages (send, recv, exchange) are pending
    until this rank waits: every blocking call on the communicator starts them, and moves all on while it waits, so that
    sends and receives in any legal order end. A call on another communicator, such as a group of this one, does not.

    On a GPU the call launches the collective; without a stream on the communicator's own, after the work that is queued
    on the current one. result() makes the current stream wait for it.

    A done-callback must not call collectives: there they raise InvalidArgument.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator._backend, communicator._lifetime)
        self._communicator = communicator  # the process group closes those that are still there

    def __repr__(self) -> str:
        return f"<asynchronous collectives of {self.label} ({self._backend.name})>"

    def _run(self, what: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(what, *args, **kwargs)
        except (InvalidArgument, LayoutsDiffer):  # the first: of this rank alone, nothing has begun
            raise
        except Exception as error:
            return LoggedFuture(f"{self.label}: {what}", self._lifetime.failed_work(error))

    def _finish(self, what: str, work: Work, result: Any) -> CollectiveFuture:
        return CollectiveFuture(f"{self.label}: {what}", work, result)

    def _after(self, stream: Any) -> list[Any] | None:
        return [self._backend.mark_work()] if stream is None and self._backend.on_gpu else None

    def _send_and_receive(
        self, what: str, sends: Sequence[Message], receives: Sequence[Message], stream: Any, result: Any
    ) -> CollectiveFuture:
        refuse_in_callback(self.label, what)
        try:
            self._lifetime.check_usable(what)
        except Exception as error:
            return LoggedFuture(f"{self.label}: {what}", self._lifetime.failed_work(error))
        return LoggedFuture(f"{self.label}: {what}", self._messages.begin(sends, receives), result)

"""The communicator: a fixed group of ranks, with its groups, its end, and its collectives (collectives.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import LayoutsDiffer, agreement_on, digest_of
from gradsync.communicators.backend import Backend, Launch, Message
from gradsync.communicators.collectives import Collectives
from gradsync.communicators.groups import CommunicatorTree, NonMember, await_members, listed, reporting_failures
from gradsync.communicators.lifetime import Lifetime, culprit_of
from gradsync.communicators.messages import Messages
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.futures import CollectiveFuture, Failed, LoggedFuture, Work, refuse_in_callback
from gradsync.machine import machine_identity
from gradsync.words import no_attribute

if TYPE_CHECKING:
    from typing import Self

    from gradsync.communicators.objects import Objects
    from gradsync.communicators.tagged import TaggedMessages


class Communicator(Collectives):
    """A fixed group of ranks that run collectives together.

    Only one thread at a time may run a collective of a communicator. If a collective fails after it has begun (a rank
    died, a deadline passed, Ctrl-C), the communicator is broken for all its ranks: each rank raises an error in its
    current or next collective, and CommunicatorClosed in the later ones. After PlanMismatch it stays usable.

    Args:
        backend: the backend, which moves the bytes. The communicator owns the backend. When the communicator ends, it
            releases the backend.

    Attributes:
        rank: this process's number in the communicator, 0 <= rank < world_size.
        world_size: the number of ranks of the communicator.
        ranks: for each rank of this communicator its rank in the world. Errors name failed and missing ranks by their
            ranks in the world.
        label: this rank's name in errors, e.g. "rank 1/4".
        backend: the backend's name: "local", "shm", "nccl" or "mpi".
        device: the device on which the collectives run: "cpu", or a CUDA device such as "cuda:0".
        member: this process's rank at launch, which stays when gs.rebuild() numbers the ranks of the world anew.
        most_advanced: of the world's communicator after gs.rebuild(): the rank, or one of those, with the most steps;
            else 0. Broadcast the state of the training from it.
        completed_steps: the number of flushes that callbacks have completed, since the start of the ranks. A rank that
            joins later, or is behind, has the number of the others only when it has completed one with them: until then
            it may not have their state.
        recorder: the flight recorder: this rank's last collectives and messages on this communicator.
            `print(comm.recorder)` shows them.
        on_exit: a function that the end of a `with` block calls, with its exception or None, instead of close() or
            abort(); None if there is none. The process group sets it.
    """

    device: str = "cpu"

    def __init__(self, backend: Backend) -> None:
        lifetime = Lifetime(backend)
        super().__init__(backend, lifetime, Messages(backend, lifetime))
        backend.fail = lifetime.fail
        self.backend = backend.name
        self.device = backend.device
        self.recorder = backend.recorder
        self.member = backend.ranks[backend.rank]
        self.most_advanced = 0
        self.completed_steps = 0
        self._completed_before = 0
        self.on_exit: Callable[[BaseException | None], None] | None = None

    def begin_as_world(self, member: int, completed_steps: Sequence[int]) -> None:
        """Begins as the world's communicator; `completed_steps` are those of its ranks in worlds before."""
        self.member, self.completed_steps = member, completed_steps[self.rank]
        self._completed_before = max(completed_steps)
        self.most_advanced = completed_steps.index(self._completed_before)

    def count_step(self) -> None:
        """Counts a flush that callbacks have completed."""
        self.completed_steps = max(self.completed_steps, self._completed_before) + 1

    @property
    def has_begun(self) -> bool:
        """Whether some rank has completed a step, so that there is a state to lose."""
        return max(self.completed_steps, self._completed_before) > 0

    def __getattr__(self, name: str) -> NoReturn:
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
        """The messages with tags. For gradsync's own use: gradsync.mpi is their face."""
        from gradsync.communicators.tagged import TaggedMessages

        return TaggedMessages(self)

    # -- Groups --------------------------------------------------------------------------------------------------

    @cached_property
    def _tree(self) -> CommunicatorTree:
        """The tree of the communicators that were made from the same world."""
        return CommunicatorTree(self.recorder.group)

    def new_group(self, ranks: Iterable[int]) -> Communicator | NonMember:
        """Makes a group of some ranks of this communicator. The members keep their order in this communicator.

        Only the members need to call new_group. All members must pass the same ranks, in any order. If several ranks
        are members of the same two groups, these ranks must make the two groups in the same order. These ranks must
        also call the collectives of the two groups in the same order.

        Keep a reference to the group while any rank uses it. Close a group by its method close() when it is not needed
        any more; the end of the process group closes the other groups. This is most important with MPI, which allows
        about 2,000 open groups. A group that is deleted in Python, but not closed, still counts there.

            group = comm.new_group([0, 2])
            if group:
                group.all_reduce(array)

        Args:
            ranks: the members' ranks in this communicator, in any order: new_group([2, 0]) makes a group in which rank
                0 is 0 and rank 2 is 1. `split` can number them otherwise.

        Returns:
            The group. On a rank that is not a member, the result is a NonMember, which is false in `if group:` but is
            not None.

        Raises:
            InvalidArgument: `ranks` is empty, contains a rank twice, or contains a number that is not a rank of this
                communicator; or a done-callback calls new_group.
            RendezvousTimeout: a member did not call new_group within the time limit of this communicator's collectives.
                The error message names the missing members.
            RankFailed, CollectiveTimeout, BackendUnavailable, NcclError, MpiError: the group cannot be made. If one of
                these errors occurs on one member, new_group fails on all members.
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
            color: a signed 64-bit integer. Ranks with the same color join the same group. If `color` is None, this rank
                joins no group.
            key: a signed 64-bit integer. A group numbers its ranks by ascending key. Ranks with equal keys keep their
                order in this communicator.

        Returns:
            The group of this rank's color. If `color` is None, the result is a NonMember, which is false in `if group:`
            but is not None.

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

        Containers with their own pid namespaces count as different machines, because their processes cannot see each
        other.

        Returns:
            The group of the ranks on this rank's machine.

        Raises:
            RendezvousTimeout, BackendUnavailable: as for new_group.
        """
        import socket  # imported here to keep the start of a rank short

        machine = digest_of("machine", machine_identity() or socket.gethostname())
        return cast(Communicator, self.split(machine - 2**63))  # not a NonMember, because this rank passes a color

    def share_numbers(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """All-gathers a list of 64-bit integers for the method `what`; returns the list of each rank, in rank order.

        For gradsync's own use. Every rank must call it, with lists of equal length.
        """
        agreement = agreement_on(what, (), None, "")
        self._backend.checked_stream(None, what)
        with self._lifetime.turn(what, agreement):
            return self._backend.share_numbers(numbers, agreement)

    def _make_group(self, what: str, members: tuple[int, ...]) -> Communicator:
        """Makes a group that this rank belongs to."""
        name = self._tree.new_name(self._listed(members))
        with reporting_failures(self._backend, self._lifetime, what):
            await_members(self._backend, self._lifetime, self._messages, what, members, name)
            group = Communicator(self._backend.connect_group(members, name))
        group._tree, group.member = self._tree, self.member
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

        close() is not a collective. First it waits for this rank's messages that have not ended, until their deadline.
        On NCCL it then waits up to 10 s for launched work, up to 10 s for the end of NCCL's communicator, and up to
        10 s for done-callbacks. Apart from this, close() does not wait for other ranks. If another rank needs this rank
        in a later collective, the other rank raises RankFailed.
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
            communicator._lifetime.replace(again)
        self._lifetime.replace(f"{again}, as `comm = gs.rebuild()`, or leave it out, as callbacks do with group=None")

    def end_messages(self, seconds: float) -> None:
        """Waits for the messages of this communicator and its tree; aborts those that have some left after a time."""
        until = time.monotonic() + seconds
        for communicator in [self, *self._tree.communicators()]:
            communicator._messages.wait_for_all(max(until - time.monotonic(), 0.0))

    def adopt(self, communicator: Communicator) -> None:
        """Adds a communicator over the same ranks to this one's tree, so that close_tree() closes it too."""
        communicator._tree = self._tree
        self._tree.add(communicator)

    def new_name(self, what: str) -> str:
        """Returns a name that no other communicator of the tree has, equal on ranks that ask alike."""
        return self._tree.new_name(what)

    def abort(self, reason: str, *, culprit: int | None = None) -> None:
        """Ends the communicator for all ranks. The other ranks raise RankFailed in their current or next collective.

        Args:
            reason: the reason that the errors on all ranks show, e.g. "ValueError in the backward pass".
            culprit: the failed rank, by its number in the world; the errors of the other ranks name it. If `culprit` is
                None, these errors name this rank.
        """
        self._lifetime.abort(reason, culprit)

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
        ended = self._lifetime.ended_because
        state = "" if ended is None else f", closed: {ended}"
        return f"<{type(self).__name__} {self.label} on {self.device} ({self.backend}){state}>"


class Asynchronous(Collectives):
    """The collectives of `communicator.asynchronous`: each returns a CollectiveFuture of what the blocking one returns.

    Every rank must call its collectives, blocking and asynchronous, in the same order. If an argument is wrong, the
    call itself raises InvalidArgument or UnsupportedDtype. The future's result() and wait() raise the errors of the
    collective; gradsync logs an error that no one reads. The program must not use a collective's arrays until its
    future is done.

    On the CPU a collective runs within the call, and the future is done. Messages (send, recv, exchange) do not: they
    are pending until this rank waits. Every blocking call on the communicator starts all pending messages, and moves
    them on while it waits, so that programs of sends and receives in any legal order end. A call on another
    communicator, also on a group of this one, does not.

    On a GPU the call launches the collective; if no stream is given, on the communicator's own stream, after the work
    that is queued on the current stream. result() makes the current stream wait for it.

    A done-callback must not call collectives: such a call raises InvalidArgument there.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator._backend, communicator._lifetime, communicator._messages)
        self._communicator = communicator  # the process group closes those that are still there

    def __repr__(self) -> str:
        return f"<asynchronous collectives of {self.label} ({self._backend.name})>"

    def _run(self, what: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(what, *args, **kwargs)
        except (InvalidArgument, LayoutsDiffer):  # the first: of this rank alone, nothing has begun
            raise
        except Exception as error:
            return LoggedFuture(f"{self.label}: {what}", Failed(error))

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
            return LoggedFuture(f"{self.label}: {what}", Failed(error))
        return LoggedFuture(f"{self.label}: {what}", self._messages.begin(sends, receives), result)

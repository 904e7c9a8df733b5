"""Starts, rebuilds and ends the process group: joins the ranks of the world, and makes the world's communicator.

The rendezvous client is here, and the server if this rank hosts it. communicators/world.py has the world's
communicator. backend_choice.py chooses the backend, and rendezvous/hosting.py the server's address.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from gradsync.arguments import (
    DEFAULT_COLLECTIVE_TIMEOUT_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    check_integer,
    check_seconds,
    is_number,
)
from gradsync.backend_choice import (
    NOT_AGREED,
    agree_and_connect,
    agree_on_backend,
    choose_before_joining,
    connect,
    reporting,
)
from gradsync.backends import TABLE, unknown_backend
from gradsync.bucketing import begin_anew, take_forgotten
from gradsync.communicators.agreement import machine_digest
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.groups import NonMember
from gradsync.communicators.lifetime import culprit_of
from gradsync.communicators.mpi.job import end_forked_child, end_job, has_job_failed
from gradsync.communicators.world import (
    get_initial_world,
    get_world,
    group_or_world,
    overriding,
    overriding_backend,
    set_world,
)
from gradsync.diagnostics import trace
from gradsync.environment import (
    ALLOW_SHARED_GPU,
    BACKEND,
    COLLECTIVE_TIMEOUT_SECONDS,
    check_removed_variables,
    configure_logging,
    warn_of_unknown_variables,
)
from gradsync.errors import (
    BackendUnavailable,
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    PlanMismatch,
    RankFailed,
    RendezvousTimeout,
    describe,
    forget_earlier_error,
    uncaught_error,
)
from gradsync.futures import refuse_in_callback
from gradsync.launchers import (
    ALONE,
    GRADSYNC,
    RankEnvironment,
    WorldSettings,
    alone_without_launcher,
    environment_of_arguments,
    no_rank_is_known,
    read_environment,
)
from gradsync.words import refuse_keywords

if TYPE_CHECKING:  # not imported at run time: a world of one rank does not need it, and should start fast
    from gradsync.rendezvous.client import RendezvousClient
    from gradsync.rendezvous.hosting import JoinedRendezvous

_log = logging.getLogger("gradsync")

_LEAVING_SECONDS = 5.0  # how long a rank waits at exit for its messages, and one that hosts the server for the others
_FAILED_JOB_SECONDS = 0.5  # the wait before MPI ends all ranks, so that the other ranks can receive and print the cause

_client: RendezvousClient | None = None
_rendezvous: JoinedRendezvous | None = (
    None  # kept for the next init_process_group(): another rank may be the first to call it
)
_settings: WorldSettings | None = None
_launched: tuple[str, WorldSettings] | None = None  # the backend that was asked for, and the settings before a rebuild
_numbers: tuple[int, ...] | None = None  # the ranks at launch of the last world that was joined, if it was rebuilt
_siblings: dict[str, Communicator] = {}  # the world's communicators over other backends, by backend

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def init_process_group(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    device: str | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    collective_timeout_seconds: float = DEFAULT_COLLECTIVE_TIMEOUT_SECONDS,
    allow_shared_gpu: bool = False,
    **removed: NoReturn,  # so that type checkers refuse misspelt arguments
) -> Communicator:
    """Joins the other ranks, and makes the world's communicator. Every rank must call it.

        with gs.init_process_group() as comm:
            ...

    The end of the `with` block destroys the process group. An exception that leaves it is told to the other ranks,
    which then fail too; except PlanMismatch, which they raise themselves.

    Args:
        backend: "auto", "nccl", "shm", "mpi" or "local". "auto" is "nccl" if each rank has a GPU; else "local" for a
            world of one rank, "shm" if all are on one host, and "mpi" if mpiexec or srun has started ranks on several.
            The log says which, and why. Within gs.override_backend(name) it is `name`; elsewhere GRADSYNC_BACKEND, if
            that is set.
        rank: this process's rank, 0 to world_size - 1. Without rank and world_size, the launcher's variables say both.
            Where there are none, and neither `address` nor a backend is passed, it is a world of one rank, and a line
            of the log says so.
        world_size: the number of ranks.
        address: host:port, at which rank 0 hosts the rendezvous server. None: variables, MPI or a file on this machine
            tell where the server is.
        device: of the arrays: "cpu", "cuda" or "cuda:N", the GPU's number in this process. With the backend "auto" a
            CUDA device means "nccl". For None and "cuda", it is the visible GPU whose number is the local rank, or the
            only one in CUDA_VISIBLE_DEVICES. The GPU becomes CuPy's current device.
        timeout_seconds: how long this rank waits for the others to join, and then to connect.
        collective_timeout_seconds: how long a collective waits for a rank; GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS takes
            precedence.
        allow_shared_gpu: whether several ranks may use one GPU over NCCL, slowly: for tests, as
            GRADSYNC_ALLOW_SHARED_GPU=1.

    Returns:
        The world's communicator; gs.get_communicator() returns it too.

    Raises:
        InvalidArgument: the process group is initialised already, no rank is known, an argument or variable is wrong,
            or the ranks ask for different backends.
        TypeError: an argument has an unknown name.
        BackendUnavailable: the backend cannot connect these ranks, and why.
        AuthenticationError, RendezvousTimeout, RendezvousError, RankFailed: the ranks could not join.
        NcclError, MpiError, CollectiveTimeout: the ranks could not connect over NCCL or MPI.
    """
    global _launched
    if removed:
        from inspect import signature  # imported here: only errors need it

        refuse_keywords("init_process_group", removed, signature(init_process_group).parameters)
    configure_logging()
    if get_initial_world() is not None:
        raise InvalidArgument("the process group is initialised already: call gs.destroy_process_group() first")
    forget_earlier_error()
    if backend != "auto" and backend not in TABLE:
        raise InvalidArgument(unknown_backend(backend))
    if backend == "auto":
        backend = overriding_backend() or BACKEND.read()
    check_removed_variables()
    seconds = {"timeout_seconds": timeout_seconds, "collective_timeout_seconds": collective_timeout_seconds}
    for name, value in seconds.items():
        if not is_number(value) or not value > 0:
            raise InvalidArgument(f"{name} needs to be a number of seconds above 0, got {value!r}")
    place = _find_place(backend, rank, world_size, address)
    if place.local_rank == 0 and place.source != GRADSYNC:  # gradsync's launcher has warned of them
        warn_of_unknown_variables()
    settings = WorldSettings(
        place,
        address,
        device,
        timeout_seconds,
        COLLECTIVE_TIMEOUT_SECONDS.read() or collective_timeout_seconds,
        ALLOW_SHARED_GPU.read() or allow_shared_gpu,
    )
    trace.begin(place.rank, place.world_size)
    wanted = choose_before_joining(backend, settings)
    _launched = wanted, settings
    if wanted == "local":
        return _begin_world(connect(wanted, None, settings, "world"), settings)
    try:
        client = _join(settings, wanted)
        try:
            return _connect_world("init_process_group", client, 0)
        except RankFailed:
            if client.numbers is None:  # at launch
                raise
        return _rebuild(None, 0, 0, timeout_seconds)
    except BaseException:
        _leave()
        raise


def rebuild(*, min_ranks: int | None = None, timeout_seconds: float = 30.0) -> Communicator:
    """Makes a new world of the ranks that are left, and of those that wait to join: training goes on without the dead.

        while True:
            try:
                state = gs.broadcast_tree(state, root=comm.most_advanced)  # in the first world from rank 0
                if state["step"] == steps:  # here nobody can need this rank for the last step any more
                    break
                train(state)  # until the end, or until a rank dies
            except (gs.RankFailed, gs.CollectiveTimeout):
                comm = gs.rebuild()

    After one of these errors every rank that is left must call it. At the edge of a step all ranks may call it, to take
    in ranks that were started again: those wait in init_process_group() until then. It returns as soon as all have
    come. A rank that was stopped (SIGSTOP), or did not come to a collective, is out: nobody waits for it.

    The ranks keep their order, and get new numbers without gaps; `comm.member` is a rank's number at launch. Callbacks
    with group=None begin anew, as in a new process: hooks that have a method reset() are reset. Groups and the old
    communicator cannot be used any more.

    Nothing is restored. A rank may have completed one step more than another one; `comm.most_advanced` has. So
    broadcast from it all that a step changes, the number of the step included, and update after the backward pass. On a
    GPU wait() for the step's futures before the update: result() orders the update behind the all-reduce, and does not
    notice a rank that dies meanwhile.

    Args:
        min_ranks: how many ranks are needed at least; it waits for ranks that are started again. None: one; or half of
            the last world where it spanned several machines, so that only one part of a cut network goes on.
        timeout_seconds: how long it waits for the other ranks, and then for the connection.

    Returns:
        The new world's communicator; gs.get_communicator() returns it too.

    Raises:
        InvalidArgument: there is no process group, or an argument is wrong, or this is a block of override_backend.
        BackendUnavailable: the world runs over MPI, which cannot go on without a rank.
        RendezvousTimeout: a rank that is left did not call it in time, or too few came; the text names them.
        RendezvousError: the server is gone, or the others have gone on without this rank.
        NcclError, CollectiveTimeout, BackendUnavailable: the ranks could not connect, see init_process_group.
    """
    world = get_initial_world()
    if world is None or _launched is None:
        raise InvalidArgument("rebuild: the process group is not initialised: call gs.init_process_group() first")
    refuse_in_callback(world.label, "rebuild")
    label, (_, settings) = f"{world.label}: rebuild", _launched
    least = 0 if min_ranks is None else check_integer(label, "min_ranks", min_ranks, 1, settings.place.world_size)
    check_seconds(label, "timeout_seconds", timeout_seconds)
    if overriding_backend() is not None:
        raise InvalidArgument(f"{label} within `with gs.override_backend(...)`: call it outside of the block")
    if "mpi" in (world.backend, *_siblings):
        raise BackendUnavailable(
            f"{label}: MPI ends the whole job when a rank dies, and cannot make a world without it: use "
            'backend="shm" or "nccl", or start again from a checkpoint'
        )
    steps = world.completed_steps
    if _client is None:
        if world.closed and world.world_size > 1:  # a forked child
            raise CommunicatorClosed(f"{label}: {world.ended_because}")
        _replace_world(world)
        return _begin_world(connect("local", None, settings, "world"), settings, [steps])
    return _rebuild(world, steps, least, timeout_seconds)


def _rebuild(world: Communicator | None, steps: int, least: int, timeout_seconds: float) -> Communicator:
    """See rebuild(). `world` is None for a new rank: another died when it had just been taken in."""
    global _client
    assert _launched is not None
    assert _client is not None
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        with contextlib.suppress(RankFailed, CollectiveTimeout):
            _client.check()  # a server that is gone forms no world
        try:
            client = _rejoin(_client, _launched[1], least, left, timeout_seconds)
            last, _client = _client, client
            if world is not None:
                _replace_world(world)
            last.abandon()
            return _connect_world("rebuild", client, steps, max(deadline - time.monotonic(), 1.0))
        except RankFailed:  # in the midst of it: once more, without that rank
            if time.monotonic() >= deadline:
                raise


def rank_at_launch(rank: int) -> int:
    """Returns the rank at launch of a rank of the last world, which may have ended. For reports to the launcher."""
    return _numbers[rank] if _numbers is not None and rank < len(_numbers) else rank


def destroy_process_group() -> None:
    """Leaves the process group, and closes all its groups. A second call does nothing.

    A later init_process_group() makes a new one. Who hosts the rendezvous server does so until its process ends.

    Raises:
        InvalidArgument: gradients were handed over and never reduced, by flush() or the end of `with
            callback.backward()`, and no exception is on its way. This rank has left all the same.
    """
    global _settings, _launched
    communicator = get_initial_world()
    set_world(None)
    _settings = _launched = None
    _siblings.clear()
    try:
        if communicator is not None:
            communicator.on_exit = None
            communicator.close_tree()
    finally:
        _leave()
        if communicator is not None:
            trace.end()
    forgotten = take_forgotten()
    if forgotten and sys.exc_info()[1] is None:  # an exception on its way explains why gradients were not reduced
        raise InvalidArgument(forgotten[0])


def is_initialized() -> bool:
    """Whether there is a process group: after init_process_group(), until destroy_process_group()."""
    return get_world() is not None


def get_communicator() -> Communicator:
    """Returns the world's communicator; within `with gs.override_backend(name)`, its communicator over this backend.

    Raises:
        InvalidArgument: the process group is not initialised.
    """
    return group_or_world(None, "get_communicator")


def new_group(ranks: Iterable[int]) -> Communicator | NonMember:
    """Makes a group of some ranks of the world; see Communicator.new_group().

    Args:
        ranks: the members' ranks in the world, in any order.

    Returns:
        The group's communicator; on a rank that is no member a NonMember, which is false.

    Raises:
        InvalidArgument: the process group is not initialised, or `ranks` is wrong, see Communicator.new_group.
        RendezvousTimeout, RankFailed, BackendUnavailable, ...: it cannot be made, see Communicator.new_group.
    """
    return group_or_world(None, "new_group").new_group(ranks)


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    communicator = get_world()
    return communicator is not None and communicator.world_size > 1


def group_barrier(communicator: Communicator | None = None) -> None:
    """Waits until every rank has called it; returns at once without a process group.

    Args:
        communicator: the communicator of the ranks; None means the world communicator.

    Raises:
        InvalidArgument: `communicator` is not a communicator.
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """
    if communicator is not None or get_world() is not None:
        group_or_world(communicator, "group_barrier", "communicator").barrier()


def place_on_machine() -> tuple[int, int]:
    """Returns this process's local rank and local world size, from the launcher; (0, 1) without a process group."""
    return (0, 1) if _settings is None else (_settings.place.local_rank, _settings.place.local_world_size)


def synchronized(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function so that ranks wait for each other after each call, for example after a download of data.

    Every rank must call it. With one rank, or without a process group, nobody waits. If it raises on a rank, that rank
    does not wait, and the others raise an error: at their deadline, or once it leaves or calls another collective.

    Args:
        func: the function.

    Returns:
        The decorated function; it returns what `func` does.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: the barrier failed.
    """

    @wraps(func)
    def call_and_wait(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result = func(*args, **kwargs)
        if is_distributed():
            group_barrier()
        return result

    return call_and_wait


@contextlib.contextmanager
def override_backend(name: str) -> Iterator[Communicator | None]:
    """Replaces the world's backend within a `with` block. Blocks may be nested.

    In it, init_process_group("auto") uses the backend `name`. If there is a process group already, every rank must
    enter the block, and gs.WORLD, gs.get_communicator() and `group=None` mean a communicator of all ranks over `name`:
    the world's own if it has this backend, else one that the first block makes, and that stays until
    destroy_process_group().

    Args:
        name: "nccl", "shm", "mpi" or "local".

    Returns:
        A context manager; `with ... as communicator` gives the communicator, or None before init_process_group().

    Raises:
        InvalidArgument: the backend is unknown, or is "local" for several ranks.
        BackendUnavailable: the backend cannot connect these ranks. All raise it, and the process group stays usable.
        CommunicatorClosed: an earlier block has made the communicator, and it was closed or aborted, or has failed.
        RendezvousTimeout, RankFailed: a rank did not enter the block, or died. The process group has failed.
        BackendUnavailable, NcclError, MpiError, CollectiveTimeout: the ranks agreed on the backend, and could not
            connect. The process group has failed.
    """
    if name not in TABLE:
        raise InvalidArgument(f"unknown backend {name!r}: use one of {', '.join(TABLE)}")
    with overriding(name, _world_over(name)) as communicator:
        yield communicator


def world_attribute() -> Communicator:
    """Returns gs.WORLD. Without a process group, raises AttributeError, which hasattr() needs."""
    communicator = get_world()
    if communicator is None:
        raise AttributeError("gs.WORLD exists only between gs.init_process_group() and gs.destroy_process_group()")
    return communicator


def _find_place(backend: str, rank: int | None, world_size: int | None, address: str | None) -> RankEnvironment:
    """Returns this process's rank environment, from the arguments of init_process_group() or from variables."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(
            f"rank and world_size must be given together, got rank={rank!r}, world_size={world_size!r}"
        )
    environment = read_environment()
    if rank is None or world_size is None:
        return _place_without_launcher(backend, address) if environment is None else environment
    size = check_integer("init_process_group", "world_size", world_size, 1)
    number = check_integer(f"init_process_group with world_size={size}", "rank", rank, 0, size - 1)
    if environment is not None and environment.world_size == size:
        return environment._replace(rank=number)
    if environment is not None and address is None and size > 1 and environment.source != "RANK":
        raise InvalidArgument(
            f"init_process_group(rank={number}, world_size={size}): this process is rank {environment.rank} of "
            f"{environment.world_size} of its launcher, and where those meet, {size} ranks cannot meet on their own: "
            "for a part of the world call init_process_group() on all ranks, and gs.new_group(ranks) then; for a world "
            "of its own pass address=host:port, an address that is free, too"
        )
    place = environment_of_arguments(number, size)
    return place if size > 1 else place._replace(address=None)  # who is alone needs nobody's server


def _place_without_launcher(backend: str, address: str | None) -> RankEnvironment:
    """Returns this process's rank environment if no launcher has set its variables."""
    if backend == "local":
        return ALONE
    if backend == "mpi":
        from gradsync.communicators.mpi.job import mpi_place

        place = mpi_place()  # the launcher may have variables that gradsync does not know
        if place is not None:
            return place
        raise InvalidArgument(
            "backend 'mpi' needs ranks that mpiexec or srun has started, but this process is alone. Start the script "
            "with `mpiexec -n 2 python script.py`, with the mpiexec of the MPI that mpi4py has loaded, or use "
            'backend="local" for one process'
        )
    if backend != "auto" or address is not None:
        raise no_rank_is_known("RANK and WORLD_SIZE are not set")
    return alone_without_launcher()


def _world_over(backend: str) -> Communicator | None:
    """Returns the world's communicator over a backend; None without a world. The first call for a backend makes it."""
    world, settings = get_initial_world(), _settings
    if world is None or settings is None or world.backend == backend:
        return world
    sibling = _siblings.get(backend)
    if sibling is None:
        sibling = _siblings[backend] = _connect_sibling(backend, world, settings)
        world.adopt(sibling)
    # A closed one is not replaced: a rank that does not know yet that it is closed would not help.
    if sibling.closed:
        raise CommunicatorClosed(
            f"{world.label}: override_backend({backend!r}): its communicator cannot be used any more: "
            f"{sibling.ended_because}; for a new one call gs.destroy_process_group() and "
            "gs.init_process_group() on all ranks"
        )
    return sibling


def _connect_sibling(backend: str, world: Communicator, settings: WorldSettings) -> Communicator:
    if backend == "local":
        if world.world_size != 1:
            raise InvalidArgument(
                f"{world.label}: override_backend('local') needs a world of one rank, this one has {world.world_size}"
            )
        return connect(backend, None, settings, backend)
    if _client is None and world.closed:  # e.g. in a forked child, which must not join with its parent's rank
        raise CommunicatorClosed(f"{world.label}: override_backend({backend!r}): {world.ended_because}")
    from gradsync.communicators.groups import whom

    client = _client or _join(settings, backend)  # a world over the backend "local" has no client yet
    name = world.new_name(backend)

    with reporting("override_backend", client, raised_by_all=NOT_AGREED):
        asking = client.group(world.ranks, f"{name}/offers")
        try:
            agree_on_backend(asking, backend, settings, is_checked=False)
        except RendezvousTimeout as error:
            raise RendezvousTimeout(
                f"{client.label}: override_backend({backend!r}) waited {settings.timeout_seconds:.3g} s: every rank of "
                f"the world must enter the block; missing: {whom(error)}",
                missing_ranks=error.missing_ranks,
                missing=error.missing,
            ) from error
        finally:
            asking.close()
    with reporting("override_backend", client):
        return connect(backend, client.group(world.ranks, name), settings, name)


def _join(settings: WorldSettings, wanted: str) -> RendezvousClient:
    """Joins the other ranks at the rendezvous; `wanted` is the backend that this rank asks for."""
    from gradsync.rendezvous.hosting import is_sent_over_mpi, join

    global _client, _rendezvous
    place, ask = settings.place, None
    if is_sent_over_mpi(place, settings.address, wanted):
        from gradsync.communicators.mpi.job import ask_in_world

        ask = ask_in_world(place)
    _client, _rendezvous = join(place, settings.address, settings.timeout_seconds, _rendezvous, ask=ask)
    _introduce(_client, place)
    return _client


def _rejoin(
    last: RendezvousClient, settings: WorldSettings, min_ranks: int, timeout_seconds: float, shown_seconds: float
) -> RendezvousClient:
    """Joins the world that replaces the one of the client `last`."""
    from gradsync.rendezvous.client import RendezvousClient

    assert _rendezvous is not None
    client = RendezvousClient.connect(
        last.address,
        secret=_rendezvous.endpoint.secret,
        rank=settings.place.rank,
        world_size=settings.place.world_size,
        timeout_seconds=timeout_seconds,
        shown_seconds=shown_seconds,
        last=last,
        min_ranks=min_ranks,
    )
    _introduce(client, settings.place)
    return client


def _introduce(client: RendezvousClient, place: RankEnvironment) -> None:
    """Tells a client what it says about this rank, and about the server."""
    from gradsync.communicators import failures

    assert _rendezvous is not None
    client.describe_with(failures.positions, failures.status_report)
    if place.rank != 0 and (place.address is None or place.address != _rendezvous.point.address):
        client.explain_loss("rank 0 hosted it: to survive its death, use gradsync run, or start gradsync serve")


def _replace_world(world: Communicator) -> None:
    """Ends the world's communicators: gs.rebuild() makes a new one, which the `with` block of the first one ends."""
    world.replace_tree()
    _siblings.clear()
    begin_anew()


def _connect_world(
    where: str, client: RendezvousClient, steps: int, timeout_seconds: float | None = None
) -> Communicator:
    """Connects the ranks that have joined, and makes the world's communicator.

    Args:
        where: the public function, in reports.
        client: the client of the ranks that have joined.
        steps: how many steps this rank has completed.
        timeout_seconds: how long it waits for the others, if not as long as at launch.
    """
    global _numbers
    assert _launched is not None
    (wanted, settings), progress = _launched, [0] * client.world_size
    settings = settings._replace(timeout_seconds=timeout_seconds or settings.timeout_seconds)
    _numbers = client.numbers
    trace.begin_world(client.generation, client.numbers)
    member = settings.place.rank
    if client.numbers is not None:  # the world was rebuilt, perhaps when this rank joined
        with reporting(where, client):
            settings, progress = _compare(client, settings, steps)
    communicator = agree_and_connect(where, client, wanted, settings, "world")
    settings = settings._replace(timeout_seconds=_launched[1].timeout_seconds)
    return _begin_world(communicator, settings, progress, member, is_rebuilt=client.numbers is not None)


def _compare(client: RendezvousClient, settings: WorldSettings, steps: int) -> tuple[WorldSettings, list[int]]:
    """Returns the settings of a rebuilt world, and how many steps each rank has completed."""
    mine = f"{steps} {machine_digest()}".encode()
    rows = [row.split() for row in client.exchange("rebuilt", mine, timeout_seconds=settings.timeout_seconds)]
    here = [row[1] for row in rows].count(rows[client.rank][1])
    place = settings.place._replace(rank=client.rank, world_size=client.world_size, local_world_size=here)
    return settings._replace(place=place), [int(row[0]) for row in rows]


def _begin_world(
    communicator: Communicator,
    settings: WorldSettings,
    steps: Sequence[int] = (0,),
    member: int = 0,
    *,
    is_rebuilt: bool = False,
) -> Communicator:
    """Makes it the world; `steps` are those that its ranks have completed."""
    global _settings
    communicator.begin_as_world(member, steps, is_rebuilt=is_rebuilt)
    communicator.on_exit = partial(_end_block, _launched)
    _settings = settings
    set_world(communicator)
    return communicator


def _end_block(launched: object, error: BaseException | None) -> None:
    """Ends the process group at the end of its `with` block; `error` is the exception that ended the block, or None."""
    if _launched is launched:  # else the block has ended it itself
        _destroy_because_of(error)


def _destroy_because_of(error: BaseException | None) -> None:
    communicator = get_initial_world()
    try:
        # The ranks that took part have raised PlanMismatch already, so they need no report.
        if error is not None and not isinstance(error, PlanMismatch) and _client is not None:
            reason, culprit = describe(error), culprit_of(error)
            if communicator is not None:
                communicator.abort(reason, culprit=culprit)
            _client.report_failure(reason, culprit=culprit)
    finally:
        with contextlib.suppress(*([] if error is None else [GradsyncError])):  # raises only the first error
            destroy_process_group()


def report_error(error: BaseException) -> None:
    """Tells the other ranks of an exception that ends this program, in a rank of gradsync's launcher."""
    if not isinstance(error, PlanMismatch) and _client is not None:
        _client.report_failure(describe(error), culprit=culprit_of(error))


def _leave() -> None:
    global _client
    client, _client = _client, None
    if client is not None:
        client.close()


def _leave_at_exit() -> None:
    """Leaves the process group at interpreter exit, and reports an uncaught exception to the other ranks."""
    try:
        forgotten = take_forgotten()
        if uncaught_error() is None:
            for text in forgotten:
                _log.error("error: %s", text)
        world = get_initial_world()
        if world is not None and uncaught_error() is None:
            world.end_messages(_LEAVING_SECONDS)
        _destroy_because_of(uncaught_error())
    finally:
        job_has_failed = has_job_failed()
        if job_has_failed:
            time.sleep(_FAILED_JOB_SECONDS)
        if _rendezvous is not None:
            _rendezvous.close(wait_seconds=0.0 if job_has_failed else _LEAVING_SECONDS)
        if job_has_failed:
            end_job()
        end_forked_child()


def _forget_after_fork() -> None:
    """Forgets the parent's connections in a forked child; rendezvous/connection.py has closed the child's copies."""
    global _client, _rendezvous
    _client = _rendezvous = None


atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)

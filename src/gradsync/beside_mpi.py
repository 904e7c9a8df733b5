"""Communicators over the ranks of an mpi4py communicator, beside the world or without one.

The ranks meet over MPI once: each tells rank 0 its machine, and rank 0 answers with the address and the secret of a
rendezvous server, which it hosts. From there on the ranks are a world of their own on that server. MPI is called in the
caller's thread only, and with backends other than "mpi" never again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import gradsync.process_group  # noqa: F401  its function that ends the job at exit must run after this module's
from gradsync.arguments import DEFAULT_COLLECTIVE_TIMEOUT_SECONDS, DEFAULT_TIMEOUT_SECONDS, check_seconds
from gradsync.backend_choice import agree_and_connect, choose_before_joining, connect
from gradsync.backends import BACKENDS, unknown_backend
from gradsync.communicators import failures
from gradsync.communicators.agreement import machine_digest
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import culprit_of
from gradsync.communicators.mpi import job
from gradsync.environment import ALLOW_SHARED_GPU, BACKEND, COLLECTIVE_TIMEOUT_SECONDS
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, describe, uncaught_error
from gradsync.launchers import CONNECT_SRUN, FROM_MPI, SLURM, RankEnvironment, WorldSettings, read_environment
from gradsync.machine import address_for_others, count_gpus, own_addresses
from gradsync.rendezvous.client import RendezvousClient

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer

_LOOPBACK = "127.0.0.1"
_NAME_CHARACTERS = 40
_LEAVING_SECONDS = 5.0  # how long a rank waits at exit for its messages, and one that hosts a server for the others
_FAILED_SECONDS = 0.5  # likewise after an error, of which the server first tells the others

_keyval: int | None = None  # under which an MPI communicator holds its communicators of gradsync, by (backend, device)
_open: list[tuple[Communicator, RendezvousClient | None]] = []  # with their worlds' clients
_servers: dict[str, tuple[RendezvousServer, bytes]] = {}  # those that this process hosts, and their secrets, by host


def from_mpi(
    comm: Any,
    backend: str = "auto",
    *,
    device: str | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    collective_timeout_seconds: float = DEFAULT_COLLECTIVE_TIMEOUT_SECONDS,
) -> Communicator:
    """Makes a communicator over the ranks of an mpi4py communicator. All its ranks must call from_mpi.

        comm = gs.from_mpi(MPI.COMM_WORLD)
        sync = gs.AllreduceCallback("mean", group=comm)

    It needs no init_process_group(), and a process may have any number of them. As with a collective of MPI, all ranks
    call it in the same place among their other collectives on `comm`. Afterwards it does not depend on `comm`: you may
    close the one and go on with the other. It ends when MPI is finalised.

    Args:
        comm: an intracommunicator of mpi4py: COMM_WORLD, or what Split, Dup, Create_cart and the like return.
        backend: "auto", "nccl", "shm", "mpi" or "local", as in init_process_group(), and agreed on by all ranks: "auto"
            is GRADSYNC_BACKEND, if set; else "nccl" if each rank has a GPU, "shm" on one machine, and "mpi", on a
            duplicate of `comm`, on several.
        device: the device of this rank, "cpu" or e.g. "cuda:1". By default CuPy's current device if that is not 0, else
            the one whose number is this process's local rank.
        timeout_seconds: how long this call waits for the other ranks.
        collective_timeout_seconds: how long a collective waits; GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS takes precedence.

    Returns:
        The communicator; its ranks have the numbers that they have in `comm`. A second call with the same `comm`,
        backend and device returns the same object, until it is closed.

    Raises:
        InvalidArgument: `comm` is no intracommunicator of mpi4py, or another argument is wrong; or MPI sees this rank
            alone, although a launcher has started several, as `gradsync run` does.
        BackendUnavailable: the backend cannot connect these ranks, or MPI has been finalised.
        RendezvousTimeout: a rank did not call from_mpi in time; `missing_ranks` names it. MPI cannot take back what
            this rank has sent, so it ends the job when the program ends.
        RankFailed, MpiError, NcclError, ...: the ranks could not connect.
    """
    mpi = _checked_mpi(comm)
    if backend not in BACKENDS:
        raise InvalidArgument(unknown_backend(backend, " for from_mpi"))
    if backend == "auto":
        backend = BACKEND.read()
    check_seconds("from_mpi", "timeout_seconds", timeout_seconds)
    check_seconds("from_mpi", "collective_timeout_seconds", collective_timeout_seconds)
    made: dict[tuple[str, str | None], Communicator] | None = comm.Get_attr(_key(mpi))
    if made is None:
        made = {}
        comm.Set_attr(_key(mpi), made)
    communicator = made.get((backend, device))
    if communicator is None or communicator.closed:
        place = RankEnvironment(comm.Get_rank(), comm.Get_size(), _local_rank(comm), comm.Get_size(), source=FROM_MPI)
        device_name = device or _current_device(backend)
        seconds = COLLECTIVE_TIMEOUT_SECONDS.read() or collective_timeout_seconds
        settings = WorldSettings(place, None, device_name, timeout_seconds, seconds, ALLOW_SHARED_GPU.read(), comm)
        communicator, client = _make(mpi, comm, backend, settings)
        made[backend, device] = communicator
        _open[:] = [each for each in _open if not each[0].closed]
        _open.append((communicator, client))
    return communicator


def _make(mpi: Any, comm: Any, backend: str, settings: WorldSettings) -> tuple[Communicator, RendezvousClient | None]:
    deadline = time.monotonic() + settings.timeout_seconds
    place = settings.place
    label = f"rank {place.rank}/{place.world_size}"
    address, secret, name, local_world_size = _meet(mpi, comm, label, deadline)
    settings = settings._replace(place=place._replace(local_world_size=int(local_world_size)))
    if place.world_size == 1 and (wanted := choose_before_joining(backend, settings)) == "local":
        return connect(wanted, None, settings, name), None
    world = RendezvousClient.connect(
        address,
        secret=bytes.fromhex(secret),
        rank=place.rank,
        world_size=place.world_size,
        timeout_seconds=max(0.1, deadline - time.monotonic()),
        shown_seconds=settings.timeout_seconds,
        world=name,
    )
    world.describe_with(failures.positions, failures.status_report)
    world.ends_with_its_groups = True
    client = world.group(range(place.world_size), name)
    client.label = f"{label} of {name}"
    try:
        return agree_and_connect("from_mpi", client, backend, settings, name, is_checked=False), world
    except BaseException:
        world.close()
        raise


def _meet(mpi: Any, comm: Any, label: str, deadline: float) -> list[str]:
    """Returns what rank 0 answers: address, secret, name of the world, and the number of ranks on this machine."""

    def answer(rows: list[str]) -> list[str]:
        machines = [row.partition(" ")[0] for row in rows]
        is_here = len(set(machines)) == 1
        host = _LOOPBACK if is_here else address_for_others(f"{label}: from_mpi", [row.split()[1:] for row in rows])
        server, secret = _hosted(host)
        server.make_room_for(len(rows))
        named = " ".join(comm.Get_name().split())[:_NAME_CHARACTERS]  # in one line, as the answers are lines
        name = f"{named or 'mpi'}-{secrets.token_hex(4)}"
        count = Counter(machines)
        return [f"{server.address}\n{secret.hex()}\n{name}\n{count[machine]}" for machine in machines]

    mine = " ".join([f"{machine_digest():016x}", *own_addresses()])
    return job.ask_rank_0(mpi, comm, "from_mpi", label, mine, answer, deadline).split("\n")


def _hosted(host: str) -> tuple[RendezvousServer, bytes]:
    """Returns this process's server at an address of this machine, and its secret; the first call starts it."""
    if host not in _servers:
        from gradsync.rendezvous.server import RendezvousServer  # imported here: only rank 0 needs asyncio

        secret = secrets.token_bytes(32)
        server = RendezvousServer(1, secret=secret, host=host)
        server.start()
        _servers[host] = server, secret
    return _servers[host]


def _checked_mpi(comm: Any) -> Any:
    """Returns the module mpi4py.MPI, of which `comm` is."""
    mpi = job.loaded_mpi()
    module = sys.modules.get("mpi4py.MPI")
    if isinstance(comm, Communicator):
        raise InvalidArgument("from_mpi needs a communicator of mpi4py, and this is one of gradsync already: use it")
    if isinstance(getattr(comm, "communicator", None), Communicator):
        raise InvalidArgument("from_mpi needs a communicator of mpi4py: of gradsync.mpi's pass group=comm.communicator")
    if module is None or not isinstance(comm, module.Comm):
        raise InvalidArgument(
            f"from_mpi needs a communicator of mpi4py, such as MPI.COMM_WORLD, got {type(comm).__name__}"
        )
    if mpi is None:
        raise BackendUnavailable("from_mpi: MPI has been finalised, or belongs to the parent of this forked process")
    if comm == mpi.COMM_NULL:
        raise InvalidArgument("from_mpi got MPI.COMM_NULL: call it on the ranks of the communicator only")
    if comm.Is_inter():
        raise InvalidArgument("from_mpi needs an intracommunicator: make one of this intercommunicator by Merge()")
    if comm != mpi.COMM_SELF and mpi.COMM_WORLD.Get_size() == 1:
        _check_started_by_mpi()
    return mpi


def _check_started_by_mpi() -> None:
    """Raises InvalidArgument if a launcher has started several ranks, of which MPI knows nothing: each would be alone.

    COMM_SELF is one rank by itself everywhere.
    """
    place = _place()
    if place is not None and place.world_size > 1:
        script = os.path.basename(sys.argv[0]) or "script.py"
        start = f"start them with `mpiexec -n {place.world_size} python {script}`"
        raise InvalidArgument(
            f"from_mpi: MPI.COMM_WORLD has one rank, but {place.source} has started {place.world_size} ranks: "
            f"{CONNECT_SRUN if place.source == SLURM else start}, or call gs.init_process_group() in place of from_mpi"
        )


def _key(mpi: Any) -> int:
    global _keyval
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval()  # a duplicate of a communicator does not inherit what it holds
        job.before_finalize(_end)
    return _keyval


def _local_rank(comm: Any) -> int:
    """Returns this process's number among the processes of the job on its machine, as its launcher says."""
    place = _place()
    return comm.Get_rank() if place is None else place.local_rank


def _place() -> RankEnvironment | None:
    """Returns this process's rank as its launcher says it, if it does."""
    try:
        return read_environment()
    except InvalidArgument:  # variables that do not matter here
        return None


def _current_device(backend: str) -> str | None:
    """Returns CuPy's current device if the program has chosen one."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not (backend == "nccl" or (backend == "auto" and count_gpus() > 0)):
        return None
    number = int(cupy.cuda.runtime.getDevice())
    return f"cuda:{number}" if number else None


def _end() -> None:
    """Ends all communicators of this module: before MPI is finalised, or at exit."""
    error = uncaught_error()
    with contextlib.ExitStack() as stack:  # does all, whatever one of them raises; the last one first
        for server, _ in _servers.values():
            stack.callback(server.stop)
            stack.callback(server.wait_until_empty, _LEAVING_SECONDS if error is None else _FAILED_SECONDS)
        for communicator, client in _open:
            stack.callback(_close, communicator, client, error)
        _open.clear()
        _servers.clear()


def _close(communicator: Communicator, client: RendezvousClient | None, error: BaseException | None) -> None:
    if error is None:
        communicator.end_messages(_LEAVING_SECONDS)
        communicator.close_tree()
        return
    communicator.abort(describe(error), culprit=culprit_of(error))
    if client is not None:
        client.report_failure(describe(error), culprit=culprit_of(error))
    with contextlib.suppress(GradsyncError):  # the first error is the one to tell
        communicator.close_tree()


def _forget_after_fork() -> None:
    _open.clear()
    _servers.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget_after_fork)

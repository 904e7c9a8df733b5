"""Hosting: decides which process hosts the rendezvous server and where the secret comes from, then joins.

| the ranks were started by | host and address | the secret |
| --- | --- | --- |
| gradsync's launcher | the launcher | it hands both down, the secret by a descriptor |
| any, with GRADSYNC_ADDRESS | who runs there, such as `gradsync serve` | GRADSYNC_SECRET_FILE |
| any, with `address=` | rank 0, there | GRADSYNC_SECRET_FILE, or on this machine rank 0's file |
| another, all on this machine | rank 0, at a free port of 127.0.0.1 | rank 0's file has both |
| another, on several machines | rank 0, told over MPI; else at MASTER_ADDR | told over MPI; else GRADSYNC_SECRET_FILE |

Rank 0's file is in the user's runtime directory (`secret_files.py`), named after the job. It is removed when all ranks
have joined. One that is left by a run that was killed is recognised, because nobody at its address knows its secret.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradsync.arguments import check_address, is_loopback, join_address, parse_address
from gradsync.environment import ADDRESS, SECRET_FILE, log_warning, read_secret, value_of
from gradsync.errors import (
    AuthenticationError,
    InvalidArgument,
    RendezvousTimeout,
)
from gradsync.launchers import SLURM, SOURCES_WITH_MPI, RankEnvironment
from gradsync.machine import address_for_others, own_addresses
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.connection import NO_ANSWER, WrongServer
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for
from gradsync.rendezvous.sockets import bind_listener, look_up

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer

_LOOPBACK = "127.0.0.1"
_FROM_MASTER = "MASTER_ADDR and MASTER_PORT"  # the source of an address
_TRY_SECONDS = 2.0  # how long a rank tries to reach the server that rank 0's file names, before it reads the file again
_LOOK_SECONDS = 0.01  # long enough to read the file once
_FIRST_PORT = _PORTS = 15_000

#: How ranks ask rank 0 over MPI, without the rendezvous: takes this rank's text, what rank 0 answers to the texts of
#: all (a text for each rank), and a deadline in monotonic seconds; returns the answer to this rank.
Ask = Callable[[str, Callable[[list[str]], list[str]], float], str]


class RendezvousPoint(NamedTuple):
    """The address at which a world's ranks find their server. Each rank computes this address on its own.

    Attributes:
        address: host:port; None if rank 0 chooses a free port.
        name: the name of the rendezvous in errors, and in the path of rank 0's secret file.
        source: the argument or variable that gave the address; "" if there is none.
    """

    address: str | None
    name: str
    source: str = ""


@dataclass
class JoinedRendezvous:
    """A rendezvous that this process has joined, kept so that the next `join` can use it again.

    Attributes:
        point: the address at which the ranks find the server.
        world_size: the number of ranks.
        endpoint: the server's address, and the run's secret.
        server: the server, if this rank hosts it.
        path: the secret file for the other ranks; None if there is no file, or the file has been removed.
        is_closed: whether the rendezvous is closed; the next `join` then makes a new one.
    """

    point: RendezvousPoint
    world_size: int
    endpoint: Endpoint
    server: RendezvousServer | None = None
    path: str | None = None
    is_closed: bool = False

    def withdraw(self) -> None:
        """Removes the secret file for the other ranks."""
        path, self.path = self.path, None
        if path is not None:
            with contextlib.suppress(OSError):  # the server must be closed in any case
                os.unlink(path)

    def close(self, *, wait_seconds: float) -> None:
        """Removes the secret file. If this rank hosts the server, waits until the other ranks have left, and stops it.

        Args:
            wait_seconds: how long to wait at most.
        """
        self.is_closed = True
        self.withdraw()  # first: once the port is free, a later run may write its own file there
        if self.server is not None:
            self.server.wait_until_empty(wait_seconds)
            self.server.stop()


def is_sent_over_mpi(own: RankEnvironment, address: str | None, backend: str) -> bool:
    """Whether rank 0 sends the address and the secret over MPI, if mpi4py is installed.

    So it is if no address is given, and the wanted backend is "mpi", or the launcher's variables tell of no other way.

    Raises:
        InvalidArgument: a variable says the secret, or where it is, and is wrong.
    """
    if address is not None or own.address is not None:
        return False
    if backend == "mpi":
        return True
    if own.source not in SOURCES_WITH_MPI or own.world_size == 1:
        return False
    if own.source == SLURM and own.run_name is None and read_secret() is None:
        return True  # a Slurm step on several machines: its address is useless without a secret
    return own.run_name is None and (own.master_addr is None or own.master_port is None)


def join(
    own: RankEnvironment,
    address: str | None,
    timeout_seconds: float,
    kept: JoinedRendezvous | None = None,
    *,
    ask: Ask | None = None,
) -> tuple[RendezvousClient, JoinedRendezvous]:
    """Joins the other ranks at the rendezvous; starts the server first if this rank hosts it.

    Args:
        own: this rank's environment.
        address: host:port from the caller; None takes the address from the environment.
        timeout_seconds: one deadline for the whole call.
        kept: the rendezvous that this process's last `join` returned. If its address and world size are the same,
            `join` uses it again; otherwise `join` closes it.
        ask: how this rank asks rank 0 for its address and secret over MPI; None if the ranks find both without MPI.
            It must be None on all ranks or on no rank.

    Returns:
        The joined client, and the rendezvous to keep for the next call.

    Raises:
        InvalidArgument: no address is known, or the address, the secret or the file of the secret is malformed.
        AuthenticationError: the run needs a secret and has none, or the secret is wrong.
        BackendUnavailable: this machine has no route to any other machine of an MPI job.
        RendezvousTimeout: the server did not answer, or a rank did not join, before the deadline.
        RendezvousError: the server refused this rank, or the port is in use.
        RankFailed: a rank died while joining.
    """
    deadline = time.monotonic() + timeout_seconds
    point = _rendezvous_point(own, address) if ask is None else RendezvousPoint(None, "over MPI")
    if kept is not None and (kept.point, kept.world_size) != (point, own.world_size):
        kept.close(wait_seconds=0.0)
    if kept is not None and kept.is_closed:  # by the line above, or by a join at another address, which then failed
        kept = None
    hosted_for_us = point.address is not None and point.address == own.address
    secret = read_secret()
    is_here = point.address is None or is_loopback(parse_address(point.address)[0])
    if ask is None and secret is None and (hosted_for_us or not is_here):
        needs = f"the server at {point.name} ({ADDRESS})" if hosted_for_us else f"a run across hosts ({point.name})"
        raise AuthenticationError(
            f"rank {own.rank}/{own.world_size}: {needs} needs a secret: put it into a file of mode 0600, and set "
            f"{SECRET_FILE} to its path on every rank" + ("; or leave it out" if hosted_for_us and is_here else "")
        )
    if ask is not None:
        joined = _ask_over_mpi(point, own, kept, ask, deadline)
    elif own.rank == 0 and not hosted_for_us:
        is_found_by_file = own.world_size > 1 and (secret is None or point.address is None)
        joined = kept or _start_hosting(point, own, secret, _LOOPBACK, is_found_by_file=is_found_by_file)
    elif secret is not None and point.address is not None:
        joined = JoinedRendezvous(point, own.world_size, Endpoint(point.address, secret))
    else:
        return _find(point, secret, own, kept, deadline, timeout_seconds)
    with _closing_at_failure(joined, kept):
        try:
            client = _connect(joined.endpoint, own, deadline, timeout_seconds)
        except RendezvousTimeout as error:
            why = _why_late(point, own, error, hosted_for_us=hosted_for_us)
            if not why:
                raise
            raise RendezvousTimeout(
                f"{error}; {why}",
                missing_ranks=error.missing_ranks,
                missing=error.missing,
                cause=error.cause,
            ) from None
        joined.withdraw()
        return client, joined


def _why_late(point: RendezvousPoint, own: RankEnvironment, error: RendezvousTimeout, *, hosted_for_us: bool) -> str:
    """Returns the most common cause if ranks do not come; "" if none is likely."""
    if hosted_for_us:
        return error.cause and (
            f"{ADDRESS} says that a server runs there, the launcher's or `gradsync serve`; for rank 0 to start one, "
            "pass address= instead"
        )
    if own.source == SLURM:
        return (
            f"SLURM_STEP_NUM_TASKS (or SLURM_NTASKS) says that Slurm has started {own.world_size} tasks: for one "
            "process alone in such a step, use GRADSYNC_BACKEND=local"
        )
    if point.source:
        return f"rank {own.rank} has the address {point.address} from {point.source}; every rank needs the same address"
    if own.run_name is not None and own.master_port is not None:
        return (
            f"rank {own.rank} waits for ranks on this machine, with MASTER_PORT={own.master_port}; every rank needs "
            f"the same, and no {ADDRESS}"
        )
    return ""


@contextlib.contextmanager
def _closing_at_failure(joined: JoinedRendezvous, kept: JoinedRendezvous | None) -> Iterator[None]:
    """Closes the server if the block fails, unless the rendezvous was kept from an earlier call."""
    try:
        yield
    except BaseException:
        if joined is not kept:
            joined.close(wait_seconds=0.0)
        raise


def _rendezvous_point(own: RankEnvironment, address: str | None) -> RendezvousPoint:
    if address is not None:
        return RendezvousPoint(check_address(address), address, "address=")
    if own.address is not None:
        return RendezvousPoint(own.address, own.address, ADDRESS)
    if own.world_size == 1:
        return RendezvousPoint(None, "alone")  # no other rank needs to find the server
    if own.run_name is not None:
        return RendezvousPoint(None, own.run_name)
    if own.master_addr is None or own.master_port is None:
        raise InvalidArgument(
            f"rank {own.rank}/{own.world_size} needs the address of the rendezvous, and none is set"
            f"{', nor SLURM_STEP_NODELIST, which srun sets' if own.source == SLURM else ''}: set MASTER_ADDR "
            "and MASTER_PORT, pass address=, or start with `gradsync run -n N script.py`. Under mpiexec it is "
            "enough to install mpi4py, built for the same MPI"
        )
    known = join_address(own.master_addr, _port_of(own.master_port))
    return RendezvousPoint(known, known, _FROM_MASTER)


def _port_of(master_port: int) -> int:
    """Returns the port of gradsync's server: MASTER_PORT belongs to torchrun, or to the script itself.

    It is below the ports that Linux gives to outgoing connections, by default 32768 and higher.
    """
    import zlib  # imported here: only runs on several machines need it

    return _FIRST_PORT + zlib.crc32(b"gradsync %d" % master_port) % _PORTS


def _another_port(point: RendezvousPoint) -> str:
    """Returns what to do if another program uses the port of a rendezvous."""
    if point.source == _FROM_MASTER:
        return "it is computed from MASTER_PORT: start again with another MASTER_PORT (torchrun: --master-port)"
    return f"name another port in {point.source}, on every rank"


def _start_hosting(
    point: RendezvousPoint,
    own: RankEnvironment,
    secret: bytes | None,
    free_port_of: str,
    *,
    is_found_by_file: bool,
) -> JoinedRendezvous:
    import secrets

    from gradsync.rendezvous.server import RendezvousServer

    secret = secret or secrets.token_bytes(32)
    host, port = (free_port_of, 0) if point.address is None else parse_address(point.address)
    # The port is bound before the secret is written: only the port's owner may publish a secret for it.
    if point.source == _FROM_MASTER:
        host = _reachable(host)
    listener = bind_listener(host, port, if_taken=_another_port(point))
    server = RendezvousServer(own.world_size, secret=secret, listener=listener, host_rank=0)
    joined = JoinedRendezvous(point, own.world_size, Endpoint(point.address or server.address, secret), server)
    with _closing_at_failure(joined, None):
        if is_found_by_file:
            joined.path = secret_path(point.name)  # set before the file exists, so that a failure removes the file
            publish(joined.path, Endpoint(server.address, secret))
        server.start()
    return joined


def _reachable(name: str) -> str:
    """Returns an address of this machine's name that other machines reach; warns if it has none."""
    found = list(dict.fromkeys([str(each[4][0]) for each in look_up(name, 0)]))
    for address in found:
        if not is_loopback(address):
            return address
    what = "MASTER_ADDR=" if value_of(os.environ, "MASTER_ADDR") else "the first host of Slurm's list of nodes is "
    log_warning(
        f"gradsync: {what}{name}, which is {' and '.join(found)} on this machine, where other machines cannot reach "
        "it: set MASTER_ADDR to this machine's address in the network, or correct /etc/hosts"
    )
    return name


def _find(
    point: RendezvousPoint,
    secret: bytes | None,
    own: RankEnvironment,
    kept: JoinedRendezvous | None,
    deadline: float,
    timeout_seconds: float,
) -> tuple[RendezvousClient, JoinedRendezvous]:
    """Joins the server that rank 0's secret file names.

    After the first join that file is gone, so a later join uses the kept rendezvous.
    """
    found = _wait_for_rank_0(point, None, own, deadline) if kept is None else kept.endpoint
    while True:
        endpoint = Endpoint(point.address or found.address, secret or found.secret)
        try:
            client = _connect(endpoint, own, deadline, timeout_seconds, reach_seconds=_TRY_SECONDS)
            return client, JoinedRendezvous(point, own.world_size, endpoint)
        except (AuthenticationError, WrongServer, RendezvousTimeout) as error:
            is_of_old = not isinstance(error, RendezvousTimeout) or bool(error.cause)
            if kept is not None or secret is not None or not is_of_old or time.monotonic() >= deadline:
                raise
            if isinstance(error, RendezvousTimeout) and error.cause == NO_ANSWER:
                # Perhaps rank 0 is held up, and its server answers later.
                found = wait_for(secret_path(point.name), found, time.monotonic() + _LOOK_SECONDS) or found
            else:
                # Nobody there knows the secret of the file: it is of an earlier run, and rank 0 will replace it.
                found = _wait_for_rank_0(point, found, own, deadline)


def _connect(
    endpoint: Endpoint,
    own: RankEnvironment,
    deadline: float,
    timeout_seconds: float,
    reach_seconds: float | None = None,
) -> RendezvousClient:
    return RendezvousClient.connect(
        endpoint.address,
        secret=endpoint.secret,
        rank=own.rank,
        world_size=own.world_size,
        timeout_seconds=max(0.1, deadline - time.monotonic()),
        shown_seconds=timeout_seconds,
        reach_seconds=reach_seconds,
    )


def _wait_for_rank_0(point: RendezvousPoint, stale: Endpoint | None, own: RankEnvironment, deadline: float) -> Endpoint:
    path = secret_path(point.name)
    who = f"rank {own.rank}/{own.world_size}"
    notice = f"gradsync: {who} waits for rank 0 to start hosting {point.name}"
    found = wait_for(path, stale, deadline, lambda: log_warning(notice))
    if found is None:
        raise RendezvousTimeout(
            f"{who}: rank 0 did not start hosting {point.name} on this machine before the deadline (no new file "
            f"{path}). Check that rank 0 runs, with the same MASTER_PORT. If ranks of this machine cannot see each "
            f"other's folder (containers, users, XDG_RUNTIME_DIR), or rank 0 runs on another machine, pass "
            f'address="host:port", and set {SECRET_FILE} to the path of a file with a secret, on every rank',
            missing_ranks=(0,),
        )
    return found


def _ask_over_mpi(
    point: RendezvousPoint, own: RankEnvironment, kept: JoinedRendezvous | None, ask: Ask, deadline: float
) -> JoinedRendezvous:
    """Has rank 0 host the server, and tell its address and secret. Every rank must call it."""
    is_here = own.local_world_size == own.world_size
    hosted = kept

    def answer(rows: list[str]) -> list[str]:
        nonlocal hosted
        if hosted is None:
            advice = f'; on every rank pass address="host:port", one that rank 0 can bind, and set {SECRET_FILE}'
            label, addresses = f"rank {own.rank}/{own.world_size}", [row.split() for row in rows]
            host = _LOOPBACK if is_here else address_for_others(label, addresses, advice)
            # A secret that outlives the run never goes over MPI, where other users could read it.
            hosted = _start_hosting(point, own, None, host, is_found_by_file=False)
        return [f"{hosted.endpoint.address}\n{hosted.endpoint.secret.hex()}"] * len(rows)

    try:
        mine = "" if is_here else " ".join(own_addresses())
        address, secret = ask(mine, answer, deadline).split("\n")
    except BaseException:
        if hosted is not None and hosted is not kept:
            hosted.close(wait_seconds=0.0)
        raise
    return hosted or JoinedRendezvous(point, own.world_size, Endpoint(address, bytes.fromhex(secret)))

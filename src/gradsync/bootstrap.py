"""From a rank's place to a joined rendezvous client: who hosts the server, and where the secret comes from.

| the ranks were started by | who hosts, and where | the secret |
| --- | --- | --- |
| gradsync | the launcher, at a free port | handed to its ranks by a descriptor |
| anything, beside `gradsync serve` | that server: GRADSYNC_ADDRESS, with GRADSYNC_HOSTED=1 | GRADSYNC_SECRET_FILE |
| anything, with GRADSYNC_ADDRESS | rank 0, there | the file, or on loopback one that rank 0 makes |
| torchrun, or by hand | rank 0, at MASTER_ADDR and the port beside MASTER_PORT | likewise |
| mpiexec or srun, on one machine | rank 0, at a free port | GRADSYNC_SECRET_FILE beside rank 0's file, or in it |
| srun, on several machines | rank 0, at the step's first host and a port that its number gives | GRADSYNC_SECRET_FILE |
| mpiexec or srun, with mpi4py | rank 0, at a free port of the address by which the others reach it | told over MPI |

A file that rank 0 makes lies in the user's runtime directory (`meeting_file.py`), and only until all ranks have met: a
rank of the next run must not find this one's. The last three rows count where MASTER_ADDR and MASTER_PORT are not set;
the very last one for backend "mpi", and on several machines where no other way is known. The generation is counted by
whoever hosts.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsync.arguments import check_address, join_address, parse_address, port_beside
from gradsync.environment import ADDRESS, HOSTED, SECRET_FILE, RankEnvironment, take_secret
from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousTimeout
from gradsync.rendezvous.client import RendezvousClient

if TYPE_CHECKING:
    from gradsync.meeting_file import Meeting
    from gradsync.rendezvous.server import RendezvousServer

_FREE_PORT = ("127.0.0.1", 0)
_BY_MPI = "told over MPI"

# What rank 0 has published, by where it hosts: for later generations, when the file is gone. Of one place at most:
# where the ranks meet elsewhere, rank 0 stops hosting.
_met: dict[str, Meeting] = {}


@dataclass
class Host:
    """A rendezvous server that this rank hosts.

    Attributes:
        where: its address as the ranks know it, or the name of the run by which they find it.
        world_size: number of ranks.
        secret: the run's secret.
        server: running.
        secret_path: the file for the others, while there is one.
    """

    where: str
    world_size: int
    secret: bytes
    server: RendezvousServer
    secret_path: str | None

    def withdraw(self) -> None:
        """Removes the file for the others."""
        path, self.secret_path = self.secret_path, None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self, *, wait_seconds: float) -> None:
        """Stops hosting, after giving the others `wait_seconds` to leave."""
        self.withdraw()  # first: once the port is free, a later run may put its own file there
        self.server.wait_until_empty(wait_seconds)
        self.server.stop()


def join(
    place: RankEnvironment,
    address: str | None,
    timeout_seconds: float,
    host: Host | None = None,
    *,
    over_mpi: bool = False,
) -> tuple[RendezvousClient, Host | None]:
    """Meets the other ranks.

    Args:
        place: this rank's place.
        address: host:port from the caller, or None for the environment's.
        timeout_seconds: for all of it.
        host: what this process hosts already; used again where it fits, else closed.
        over_mpi: rank 0 tells the others over MPI where it hosts, and no address is known; the same on all ranks.

    Returns:
        The joined client, and what this process hosts now.

    Raises:
        InvalidArgument: no address is known, or it is malformed.
        AuthenticationError: no secret across hosts, or a wrong one.
        RendezvousTimeout: the server, or a rank, was not there before the deadline.
        RendezvousError: refused, or the port is taken.
        RankFailed: a rank died while joining.
    """
    deadline = time.monotonic() + timeout_seconds
    if over_mpi:
        return _join_over_mpi(place, deadline, host)
    where = _where(place, address)
    _forget_met(but=where)
    host = _kept(host, where, place)
    secret = place.secret or take_secret()
    hosted_for_us = place.hosted and where == place.address
    if secret is None and (hosted_for_us or not _is_here(where)):
        raise _no_secret(place, where, hosted_for_us=hosted_for_us)
    if place.rank != 0 or hosted_for_us:
        return _connect(where, secret, place, deadline), host
    hosting = host or _start_hosting(where, secret, place)
    try:
        reached_at = where if ":" in where else hosting.server.address
        client = _connect(reached_at, hosting.secret, place, deadline)
        hosting.withdraw()
        return client, hosting
    except BaseException:
        if hosting is not host:
            hosting.close(wait_seconds=0.0)
        raise


def _join_over_mpi(place: RankEnvironment, deadline: float, host: Host | None) -> tuple[RendezvousClient, Host | None]:
    from gradsync.meeting_file import Meeting
    from gradsync.mpi_meeting import own_host, tell_meeting

    _forget_met(but=_BY_MPI)
    host = _kept(host, _BY_MPI, place)
    interface = own_host(place, deadline)
    hosting, meeting = host, None
    try:
        if place.rank == 0:
            hosting = host or _host_for_mpi(interface, place)
            meeting = Meeting(hosting.server.address, hosting.secret)
        meeting = tell_meeting(meeting, place, deadline)
        return _connect_to(meeting.address, meeting.secret, place, deadline), hosting
    except BaseException:
        if hosting is not None and hosting is not host:
            hosting.close(wait_seconds=0.0)
        raise


def _kept(host: Host | None, where: str, place: RankEnvironment) -> Host | None:
    """Returns what this process hosts already, where it fits; closes it otherwise."""
    if host is not None and (host.where, host.world_size) != (where, place.world_size):
        host.close(wait_seconds=0.0)
        return None
    return host


def _forget_met(*, but: str) -> None:
    """Forgets what was published elsewhere: those servers are gone once their ranks meet at another place."""
    for where in [where for where in _met if where != but]:
        del _met[where]


def _host_for_mpi(interface: str, place: RankEnvironment) -> Host:
    import secrets

    from gradsync.rendezvous.server import RendezvousServer

    take_secret()  # out of the environment; but none that outlives the run goes over MPI, where it could be read
    secret = secrets.token_bytes(32)
    server = RendezvousServer(place.world_size, secret=secret, host=interface)
    server.start()
    return Host(_BY_MPI, place.world_size, secret, server, None)


def _where(place: RankEnvironment, address: str | None) -> str:
    """Returns the address of the server, or a name by which the ranks of this machine find it: without a colon."""
    if address is not None:
        return check_address(address)
    if place.address is not None:
        return place.address
    if place.world_size == 1:
        return "alone"  # nobody else needs to find it
    if place.run_name is not None:
        return place.run_name
    if place.master_addr is None or place.master_port is None:
        raise InvalidArgument(
            f"rank {place.rank}/{place.world_size} does not know where to meet the others: set MASTER_ADDR and "
            f"MASTER_PORT (or {ADDRESS}=host:port), pass address=, or start with `gradsync run -n N script.py`; "
            "under mpiexec it is enough that mpi4py is installed for its MPI"
        )
    # MASTER_PORT is its owner's (torchrun, or the script itself); ours is the one beside it.
    return join_address(place.master_addr, port_beside(place.master_port))


def _is_here(where: str) -> bool:
    """Tells whether only this machine can reach the server."""
    if ":" not in where:
        return True
    host, _ = parse_address(where)
    if host == "localhost":
        return True
    import ipaddress  # here, and more below: every rank's start-up counts, and few need it

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_secret(place: RankEnvironment, where: str, *, hosted_for_us: bool) -> AuthenticationError:
    who = f"rank {place.rank}/{place.world_size}"
    advice = f"put one into a file of mode 0600 and name it in {SECRET_FILE} on every rank"
    if not hosted_for_us:
        return AuthenticationError(f"{who}: a run across hosts needs a secret: {advice} (address {where})")
    return AuthenticationError(
        f"{who}: no secret for the server at {where} ({ADDRESS}, {HOSTED}=1). With `gradsync serve`, {advice}. But if "
        "`gradsync run` started a rank, and that rank this process: it has inherited the variables of a rank, and not "
        "the secret; for a run of its own, unset all variables whose names begin with GRADSYNC_"
    )


def _start_hosting(where: str, secret: bytes | None, place: RankEnvironment) -> Host:
    import secrets

    from gradsync.rendezvous.server import RendezvousServer

    others_look = place.world_size > 1 and (secret is None or ":" not in where)
    secret = secret or secrets.token_bytes(32)
    host, port = parse_address(where) if ":" in where else _FREE_PORT
    # The port is bound before the secret is written: only the port's owner may name the secret.
    server = RendezvousServer(place.world_size, secret=secret, host=host, port=port)
    try:
        path = _publish(where, server.address, secret) if others_look else None
    except BaseException:
        server.stop()
        raise
    server.start()
    return Host(where, place.world_size, secret, server, path)


def _publish(where: str, address: str, secret: bytes) -> str:
    from gradsync.meeting_file import Meeting, meeting_path, publish

    path = meeting_path(_file_name(where))
    publish(path, Meeting(address, secret))
    return path


def _file_name(where: str) -> str:
    return where.replace("localhost", "127.0.0.1")


def _connect(where: str, secret: bytes | None, place: RankEnvironment, deadline: float) -> RendezvousClient:
    """Joins a server: at once where address and secret are known, else as rank 0 publishes them."""
    if secret is not None and ":" in where:
        return _connect_to(where, secret, place, deadline)
    found = _met.get(where) or _wait_for_rank_0(where, None, place, deadline)
    while True:
        try:
            client = _connect_to(where if ":" in where else found.address, secret or found.secret, place, deadline)
        except AuthenticationError:
            if secret is not None:
                raise
            # The file was an earlier run's; rank 0 of this run replaces it after binding the port.
            found = _wait_for_rank_0(where, found, place, deadline)
        else:
            _met[where] = found
            return client


def _connect_to(address: str, secret: bytes, place: RankEnvironment, deadline: float) -> RendezvousClient:
    return RendezvousClient.connect(
        address,
        secret=secret,
        rank=place.rank,
        world_size=place.world_size,
        timeout_seconds=max(0.1, deadline - time.monotonic()),
    )


def _wait_for_rank_0(where: str, stale: Meeting | None, place: RankEnvironment, deadline: float) -> Meeting:
    from gradsync.meeting_file import meeting_path, wait_for

    path = meeting_path(_file_name(where))
    who = f"rank {place.rank}/{place.world_size}"

    def notice() -> None:
        import logging  # here: start-up counts

        logging.getLogger("gradsync").warning("gradsync: %s waits for rank 0 to start hosting %s", who, where)

    found = wait_for(path, stale, deadline, notice)
    if found is None:
        raise RendezvousTimeout(
            f"{who}: rank 0 did not start hosting {where} on this machine before the deadline (nothing new at {path}). "
            f"Is it started, with the same MASTER_ADDR and MASTER_PORT (we meet at the port beside it)? If it "
            f"runs elsewhere, name a secret in {SECRET_FILE} too; if a server runs already, set {ADDRESS} and "
            f"{HOSTED}=1",
            missing_ranks=(0,),
        )
    return found

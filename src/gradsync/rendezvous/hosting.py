"""From a rank's place to a joined rendezvous client: who hosts the server, where, and where the secret comes from.

| the ranks were started by | who hosts, and where | the secret |
| --- | --- | --- |
| gradsync | the launcher, at a free port | handed to its ranks by a descriptor |
| anything, beside `gradsync serve` | that server: GRADSYNC_ADDRESS, with GRADSYNC_HOSTED=1 | GRADSYNC_SECRET_FILE |
| anything, with GRADSYNC_ADDRESS | rank 0, there | the file, or on loopback one that rank 0 makes |
| torchrun, or by hand | rank 0, at MASTER_ADDR and the port beside MASTER_PORT | likewise |
| mpiexec or srun, on one machine | rank 0, at a free port | GRADSYNC_SECRET_FILE beside rank 0's file, or in it |
| srun, on several machines | rank 0, at the step's first host and a port that its number gives | GRADSYNC_SECRET_FILE |
| mpiexec or srun, with mpi4py | rank 0, at a free port of the address by which the others reach it | told over MPI |

A file that rank 0 makes lies in the user's runtime directory (`secret_files.py`), and only until all ranks have met: a
rank of the next run must not find this one's. The last three rows count where MASTER_ADDR and MASTER_PORT are not set;
the very last one for backend "mpi", and on several machines where no other way is known. The generation is counted by
whoever hosts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradsync.arguments import check_address, join_address, parse_address, port_beside
from gradsync.environment import ADDRESS, HOSTED, SECRET_FILE, RankEnvironment, take_secret
from gradsync.errors import AuthenticationError, BackendUnavailable, InvalidArgument, RendezvousTimeout
from gradsync.launchers import SLURM, SOURCES_WITH_MPI
from gradsync.machine import address_towards, own_addresses
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer

_LOOPBACK = "127.0.0.1"
_TOLD_ADDRESSES = 8
_ANY_PORT = 9  # nothing is sent there

#: Gives a short text of this rank to all, by another way than the rendezvous, and returns every rank's, by rank; the
#: second argument is the deadline, in monotonic seconds.
Share = Callable[[bytes, float], list[bytes]]


class Spot(NamedTuple):
    """Where the ranks of a world meet, as all of them know without having met.

    Attributes:
        address: host:port, or None: rank 0 takes a free port, and says which.
        name: what the others find it by, and errors call it.
        source: who has named the address; "" where there is none.
    """

    address: str | None
    name: str
    source: str = ""


@dataclass
class Meeting:
    """What this process keeps of a meeting, for those after it.

    Attributes:
        spot: where.
        world_size: number of ranks.
        endpoint: the server, and the run's secret.
        server: where this rank hosts it.
        path: the file for the others, while there is one.
        is_closed: whether it is of no use any more.
    """

    spot: Spot
    world_size: int
    endpoint: Endpoint
    server: RendezvousServer | None = None
    path: str | None = None
    is_closed: bool = False

    def withdraw(self) -> None:
        """Removes the file for the others."""
        path, self.path = self.path, None
        if path is not None:
            with contextlib.suppress(OSError):  # the server must stop all the same
                os.unlink(path)

    def close(self, *, wait_seconds: float) -> None:
        """Stops hosting, after giving the others `wait_seconds` to leave."""
        self.is_closed = True
        self.withdraw()  # first: once the port is free, a later run may put its own file there
        if self.server is not None:
            self.server.wait_until_empty(wait_seconds)
            self.server.stop()


def is_told_over_mpi(place: RankEnvironment, address: str | None, backend: str) -> bool:
    """Whether the ranks tell each other over MPI where they meet, where MPI is there for that.

    They do where no address is given, and either they want "mpi", or mpiexec tells nothing else.

    Args:
        place: this rank's place.
        address: host:port from the caller, or None.
        backend: what the ranks want; may be "auto".
    """
    if address is not None or place.address is not None:
        return False
    if backend == "mpi":
        return True
    if place.source not in SOURCES_WITH_MPI or place.world_size == 1:
        return False
    if place.source == SLURM and place.run_name is None and place.secret is None:
        return True  # several machines of a Slurm step, whose address is of no use without a secret
    return place.run_name is None and (place.master_addr is None or place.master_port is None)


def join(
    place: RankEnvironment,
    address: str | None,
    timeout_seconds: float,
    kept: Meeting | None = None,
    *,
    share: Share | None = None,
) -> tuple[RendezvousClient, Meeting]:
    """Meets the other ranks.

    Args:
        place: this rank's place.
        address: host:port from the caller, or None for the environment's.
        timeout_seconds: for all of it.
        kept: this process's last meeting; used again where it fits, else closed.
        share: by what rank 0 tells the others where it hosts, where no address is known; the same on all ranks.

    Returns:
        The joined client, and what to keep for the next meeting.

    Raises:
        InvalidArgument: no address is known, or it is malformed.
        AuthenticationError: no secret across hosts, or a wrong one.
        BackendUnavailable: no machine of an MPI job reaches another one.
        RendezvousTimeout: the server, or a rank, was not there before the deadline.
        RendezvousError: refused, or the port is taken.
        RankFailed: a rank died while joining.
    """
    deadline = time.monotonic() + timeout_seconds
    spot = _spot(place, address) if share is None else Spot(None, "over MPI")
    if kept is not None and (kept.spot, kept.world_size) != (spot, place.world_size):
        kept.close(wait_seconds=0.0)
    if kept is not None and kept.is_closed:  # now, or before a meeting elsewhere that has failed
        kept = None
    hosted_for_us = place.hosted and spot.address is not None and spot.address == place.address
    secret = place.secret or take_secret()
    if share is None and secret is None and (hosted_for_us or not _is_here(spot)):
        raise _no_secret(place, spot, hosted_for_us=hosted_for_us)
    if share is not None:
        meeting = _meeting_told_by_rank_0(spot, place, kept, share, deadline)
    elif place.rank == 0 and not hosted_for_us:
        others_look = place.world_size > 1 and (secret is None or spot.address is None)
        meeting = kept or _start_hosting(spot, place, secret, _LOOPBACK, is_found_by_file=others_look)
    elif secret is not None and spot.address is not None:
        start = place.start if hosted_for_us else None
        meeting = Meeting(spot, place.world_size, Endpoint(spot.address, secret, start))
    else:
        return _find(spot, secret, place, kept, deadline)
    with _closing_at_failure(meeting, kept):
        try:
            client = _connect(meeting.endpoint, place, deadline)
        except RendezvousTimeout as error:
            if not spot.source or hosted_for_us:
                raise
            # The commonest cause of all: some ranks have one address, some another.
            raise RendezvousTimeout(
                f"{error}; rank {place.rank} has the address {spot.address} from {spot.source}: every rank needs the "
                "same",
                missing_ranks=error.missing_ranks,
                missing=error.missing,
                cause=error.cause,
            ) from None
        meeting.withdraw()
        return client, meeting


@contextlib.contextmanager
def _closing_at_failure(meeting: Meeting, kept: Meeting | None) -> Iterator[None]:
    """Stops hosting where the block fails, but for what was hosted before."""
    try:
        yield
    except BaseException:
        if meeting is not kept:
            meeting.close(wait_seconds=0.0)
        raise


def _spot(place: RankEnvironment, address: str | None) -> Spot:
    if address is not None:
        return Spot(check_address(address), address, "address=")
    if place.address is not None:
        return Spot(place.address, place.address, ADDRESS)
    if place.world_size == 1:
        return Spot(None, "alone")  # nobody else needs to find it
    if place.run_name is not None:
        return Spot(None, place.run_name)
    if place.master_addr is None or place.master_port is None:
        raise InvalidArgument(
            f"rank {place.rank}/{place.world_size} does not know where to meet the others: set MASTER_ADDR and "
            f"MASTER_PORT (or {ADDRESS}=host:port), pass address=, or start with `gradsync run -n N script.py`; "
            "under mpiexec it is enough that mpi4py is installed for its MPI"
        )
    # MASTER_PORT is its owner's (torchrun, or the script itself); ours is the one beside it.
    known = join_address(place.master_addr, port_beside(place.master_port))
    return Spot(known, known, "MASTER_ADDR and MASTER_PORT")


def _is_here(spot: Spot) -> bool:
    """Whether only this machine can reach the server."""
    if spot.address is None:
        return True
    host, _ = parse_address(spot.address)
    if host == "localhost":
        return True
    import ipaddress  # here, and more below: every rank's start-up counts, and few need it

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_secret(place: RankEnvironment, spot: Spot, *, hosted_for_us: bool) -> AuthenticationError:
    who = f"rank {place.rank}/{place.world_size}"
    advice = f"put one into a file of mode 0600 and name it in {SECRET_FILE} on every rank"
    if not hosted_for_us:
        return AuthenticationError(f"{who}: a run across hosts needs a secret: {advice} (address {spot.name})")
    return AuthenticationError(
        f"{who}: no secret for the server at {spot.name} ({ADDRESS}, {HOSTED}=1). With `gradsync serve`, {advice}. But "
        "if `gradsync run` started a rank, and that rank this process: it has inherited the variables of a rank, and "
        "not the secret; for a run of its own, unset all variables whose names begin with GRADSYNC_"
    )


def _start_hosting(
    spot: Spot, place: RankEnvironment, secret: bytes | None, free_port_of: str, *, is_found_by_file: bool
) -> Meeting:
    import secrets

    from gradsync.rendezvous.server import RendezvousServer

    secret = secret or secrets.token_bytes(32)
    host, port = (free_port_of, 0) if spot.address is None else parse_address(spot.address)
    # The port is bound before the secret is written: only the port's owner may name the secret.
    server = RendezvousServer(place.world_size, secret=secret, host=host, port=port)
    meeting = Meeting(spot, place.world_size, Endpoint(spot.address or server.address, secret), server)
    with _closing_at_failure(meeting, None):
        if is_found_by_file:
            meeting.path = secret_path(spot.name)  # known before there is a file, so that none is left
            publish(meeting.path, Endpoint(server.address, secret))
        server.start()
    return meeting


def _find(
    spot: Spot, secret: bytes | None, place: RankEnvironment, kept: Meeting | None, deadline: float
) -> tuple[RendezvousClient, Meeting]:
    """Joins the server that rank 0 publishes, or that this process has found before: the file is gone by then."""
    found = _wait_for_rank_0(spot, None, place, deadline) if kept is None else kept.endpoint
    while True:
        endpoint = Endpoint(spot.address or found.address, secret or found.secret)
        try:
            return _connect(endpoint, place, deadline), Meeting(spot, place.world_size, endpoint)
        except AuthenticationError:
            if secret is not None:
                raise
            # The file was an earlier run's; rank 0 of this run replaces it after binding the port.
            found = _wait_for_rank_0(spot, found, place, deadline)


def _connect(endpoint: Endpoint, place: RankEnvironment, deadline: float) -> RendezvousClient:
    return RendezvousClient.connect(
        endpoint.address,
        secret=endpoint.secret,
        rank=place.rank,
        world_size=place.world_size,
        timeout_seconds=max(0.1, deadline - time.monotonic()),
        start=endpoint.start,
    )


def _wait_for_rank_0(spot: Spot, stale: Endpoint | None, place: RankEnvironment, deadline: float) -> Endpoint:
    path = secret_path(spot.name)
    who = f"rank {place.rank}/{place.world_size}"

    def notice() -> None:
        import logging  # here: start-up counts

        logging.getLogger("gradsync").warning("gradsync: %s waits for rank 0 to start hosting %s", who, spot.name)

    found = wait_for(path, stale, deadline, notice)
    if found is None:
        raise RendezvousTimeout(
            f"{who}: rank 0 did not start hosting {spot.name} on this machine before the deadline (nothing new at "
            f"{path}). Is it started, with the same MASTER_ADDR and MASTER_PORT (we meet at the port beside it)? If it "
            f"runs elsewhere, name a secret in {SECRET_FILE} too; if a server runs already, set {ADDRESS} and "
            f"{HOSTED}=1",
            missing_ranks=(0,),
        )
    return found


def _meeting_told_by_rank_0(
    spot: Spot, place: RankEnvironment, kept: Meeting | None, share: Share, deadline: float
) -> Meeting:
    host = _own_host(place, share, deadline)
    if place.rank != 0:
        address, secret = share(b"", deadline)[0].decode().split("\n")
        return Meeting(spot, place.world_size, Endpoint(address, bytes.fromhex(secret)))
    # No secret that outlives the run goes over MPI, where it could be read.
    meeting = kept or _start_hosting(spot, place, None, host, is_found_by_file=False)
    with _closing_at_failure(meeting, kept):
        share(f"{meeting.endpoint.address}\n{meeting.endpoint.secret.hex()}".encode(), deadline)
    return meeting


def _own_host(place: RankEnvironment, share: Share, deadline: float) -> str:
    """Returns the address of this machine at which the other ranks reach it. Every rank must call it.

    The one from which this machine would send to another one of the job; loopback where there is no other.
    """
    if place.local_world_size == place.world_size:
        return _LOOPBACK
    mine = own_addresses()[:_TOLD_ADDRESSES]
    rows = share(" ".join(mine).encode(), deadline)
    others = [address for row in rows for address in row.decode(errors="replace").split()]
    for other in dict.fromkeys(others):
        address = address_towards(other, _ANY_PORT)
        if other not in mine and address in mine:
            return address
    raise BackendUnavailable(
        f"rank {place.rank}/{place.world_size}: this machine ({', '.join(mine) or 'no address'}) has no way to any "
        f"other one of the job ({', '.join(dict.fromkeys(others)) or 'no addresses'}): name an address that rank 0 can "
        f"bind in {ADDRESS}=host:port, with {SECRET_FILE}, on every rank"
    )

"""From a rank's place to a joined rendezvous client: who hosts the server, and where the secret comes from.

Our launcher hosts the server and hands the secret to its children. Without it (torchrun, srun, plain RANK) rank 0
hosts; the secret then comes from GRADSYNC_SECRET_FILE, or, on loopback, from a file that rank 0 leaves in the user's
runtime directory, named after the address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsync.environment import (
    ADDRESS,
    HOSTED,
    SECRET_FILE,
    RankEnvironment,
    check_address,
    take_secret,
)
from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousTimeout
from gradsync.rendezvous.client import RendezvousClient
from gradsync.secret_file import read_secret_file

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer

_LOOK_FOR_SECRET_EVERY_SECONDS = 0.02


@dataclass
class Host:
    """A rendezvous server that this rank hosts.

    Attributes:
        where: its address, as the ranks know it.
        world_size: number of ranks.
        secret: the run's secret.
        server: running.
        secret_path: the secret's file, when this rank made it for others.
    """

    where: str
    world_size: int
    secret: bytes
    server: RendezvousServer
    secret_path: str | None

    def close(self, *, wait_seconds: float) -> None:
        """Stops hosting, after giving the others `wait_seconds` to leave."""
        # The file goes first: once the port is free, a later run may put its own there.
        if self.secret_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.secret_path)
        self.server.wait_until_empty(wait_seconds)
        self.server.stop()


def join(
    place: RankEnvironment, address: str | None, timeout_seconds: float, host: Host | None = None
) -> tuple[RendezvousClient, Host | None]:
    """Meets the other ranks.

    Args:
        place: this rank's place.
        address: host:port from the caller, or None for the environment's.
        timeout_seconds: for all of it.
        host: what this process hosts already; used again where it fits, else closed.

    Returns:
        The joined client, and what this process hosts now.

    Raises:
        InvalidArgument: no address is known, or it is malformed.
        AuthenticationError: no secret across hosts, or a wrong one.
        RendezvousTimeout: the server, or a rank, was not there before the deadline.
        RendezvousError: refused, or the port is taken.
        RankFailed: a rank died while joining.
    """
    where = _address(place, address)
    deadline = time.monotonic() + timeout_seconds
    if host is not None and (host.where, host.world_size) != (where, place.world_size):
        host.close(wait_seconds=0.0)
        host = None
    secret = place.secret or take_secret()
    hosted_for_us = place.hosted and where == place.address
    if secret is None and (hosted_for_us or not _is_loopback(where)):
        raise AuthenticationError(
            f"rank {place.rank}/{place.world_size}: a run across hosts, or with `gradsync serve`, needs a secret: "
            f"put one into a file of mode 0600 and name it in {SECRET_FILE} on every rank (address {where})"
        )
    if place.rank != 0 or hosted_for_us:
        return _connect(where, secret, place, deadline), host
    hosting = host or _start_hosting(where, secret, place)
    try:
        # A world of one may host at any free port.
        reached_at = hosting.server.address if where.endswith(":0") else where
        return _connect(reached_at, hosting.secret, place, deadline), hosting
    except BaseException:
        if hosting is not host:
            hosting.close(wait_seconds=0.0)
        raise


def _address(place: RankEnvironment, address: str | None) -> str:
    if address is not None:
        return check_address(address)
    if place.address is not None:
        return place.address
    if place.world_size == 1:
        return "127.0.0.1:0"  # nobody else needs to find it
    if place.master_addr is None or place.master_port is None:
        raise InvalidArgument(
            f"rank {place.rank}/{place.world_size} does not know where to meet the others: set MASTER_ADDR and "
            f"MASTER_PORT (or {ADDRESS}=host:port), pass address=, or start with `gradsync run -n N script.py`"
        )
    # MASTER_PORT is its owner's (torchrun, or the script itself); ours is the one beside it.
    port = place.master_port + 1 if place.master_port < 65535 else place.master_port - 1
    host = f"[{place.master_addr}]" if ":" in place.master_addr else place.master_addr
    return f"{host}:{port}"


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _start_hosting(where: str, secret: bytes | None, place: RankEnvironment) -> Host:
    # Only a hosting rank pays for these imports: every rank's start-up counts.
    import secrets

    from gradsync.rendezvous.server import RendezvousServer

    address, _, port = where.rpartition(":")
    made_secret = secret is None
    secret = secret or secrets.token_bytes(32)
    # The port is bound before the secret is written: only the port's owner may name the secret.
    server = RendezvousServer(place.world_size, secret=secret, host=address.strip("[]"), port=int(port))
    try:
        path = _write_secret(where, secret) if made_secret and place.world_size > 1 else None
    except BaseException:
        server.stop()
        raise
    server.start()
    return Host(where, place.world_size, secret, server, path)


def _connect(where: str, secret: bytes | None, place: RankEnvironment, deadline: float) -> RendezvousClient:
    found = secret if secret is not None else _wait_for_secret(where, None, place, deadline)
    while True:
        try:
            return RendezvousClient.connect(
                where,
                secret=found,
                rank=place.rank,
                world_size=place.world_size,
                timeout_seconds=max(0.1, deadline - time.monotonic()),
            )
        except AuthenticationError:
            if secret is not None:
                raise
            # The file was an earlier run's; rank 0 of this run replaces it after binding the port.
            found = _wait_for_secret(where, found, place, deadline)


def _secret_path(where: str) -> str:
    """Returns where the secret for a loopback address lies, in a directory that only this user can enter."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if not os.path.isdir(base):
        import tempfile  # here for the same reason as in _start_hosting

        base = os.path.join(tempfile.gettempdir(), f"gradsync-{os.geteuid()}")
        os.makedirs(base, mode=0o700, exist_ok=True)
        status = os.lstat(base)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise AuthenticationError(
                f"{base} must be a directory of mode 0700 that belongs to this user; remove it, "
                f"or name a secret in {SECRET_FILE}"
            )
    return os.path.join(base, f"gradsync-{where.replace('localhost', '127.0.0.1')}.secret")


def _write_secret(where: str, secret: bytes) -> str:
    path = _secret_path(where)
    fresh = f"{path}.{os.getpid()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret.hex())
    os.replace(fresh, path)
    return path


def _wait_for_secret(where: str, stale: bytes | None, place: RankEnvironment, deadline: float) -> bytes:
    path = _secret_path(where)
    while time.monotonic() < deadline:
        if os.path.exists(path):
            try:
                found = read_secret_file(path)
            except InvalidArgument:
                if os.path.exists(path):
                    raise
                continue  # removed between the two looks
            if found != stale:
                return found
        time.sleep(_LOOK_FOR_SECRET_EVERY_SECONDS)
    raise RendezvousTimeout(
        f"rank {place.rank}/{place.world_size}: rank 0 did not start hosting {where} before the deadline "
        f"(no new secret at {path}). If rank 0 runs elsewhere, name a secret in {SECRET_FILE}; if a server runs "
        f"already, set {HOSTED}=1",
        missing_ranks=(0,),
    )

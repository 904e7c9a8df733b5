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
class Bootstrap:
    """This rank's connection to the others.

    Attributes:
        client: joined: all ranks are there.
        server: the server, when this rank hosts it.
        secret_path: the secret's file, when this rank made it.
    """

    client: RendezvousClient
    server: RendezvousServer | None = None
    secret_path: str | None = None

    def close(self, *, wait_seconds: float = 5.0) -> None:
        """Leaves in order; a hosting rank gives the others `wait_seconds` to leave first."""
        self.client.close()
        _stop_hosting(self.server, self.secret_path, wait_seconds)


def join(place: RankEnvironment, address: str | None, timeout_seconds: float) -> Bootstrap:
    """Meets the other ranks.

    Args:
        place: this rank's place.
        address: host:port from the caller, or None for the environment's.
        timeout_seconds: for all of it.

    Raises:
        InvalidArgument: no address is known, or it is malformed.
        AuthenticationError: no secret across hosts, or a wrong one.
        RendezvousTimeout: the server, or a rank, was not there before the deadline.
        RendezvousError: refused, or the port is taken.
        RankFailed: a rank died while joining.
    """
    where = _address(place, address)
    deadline = time.monotonic() + timeout_seconds
    secret = place.secret or take_secret()
    hosted_for_us = place.hosted and where == place.address
    if secret is None and (hosted_for_us or not _is_loopback(where)):
        raise AuthenticationError(
            f"rank {place.rank}/{place.world_size}: a run across hosts, or with `gradsync serve`, needs a secret: "
            f"put one into a file of mode 0600 and name it in {SECRET_FILE} on every rank (address {where})"
        )
    if place.rank != 0 or hosted_for_us:
        return Bootstrap(_connect(where, secret, place, deadline))
    return _host(where, secret, place, deadline)


def _address(place: RankEnvironment, address: str | None) -> str:
    if address is not None:
        return check_address(address)
    if place.address is not None:
        return place.address
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


def _host(where: str, secret: bytes | None, place: RankEnvironment, deadline: float) -> Bootstrap:
    # Only a hosting rank pays for these imports: every rank's start-up counts.
    import secrets

    from gradsync.rendezvous.server import RendezvousServer

    host, _, port = where.rpartition(":")
    made_secret = secret is None
    secret = secret or secrets.token_bytes(32)
    # The port is bound before the secret is written: only the port's owner may name the secret.
    server = RendezvousServer(place.world_size, secret=secret, host=host.strip("[]"), port=int(port))
    path = None
    try:
        server.start()
        path = _write_secret(where, secret) if made_secret else None
        client = RendezvousClient.connect(
            where,
            secret=secret,
            rank=place.rank,
            world_size=place.world_size,
            timeout_seconds=max(0.1, deadline - time.monotonic()),
        )
    except BaseException:
        _stop_hosting(server, path, 0.0)
        raise
    return Bootstrap(client, server, path)


def _stop_hosting(server: RendezvousServer | None, secret_path: str | None, wait_seconds: float) -> None:
    if server is not None:
        if wait_seconds:
            server.wait_until_empty(wait_seconds)
        server.stop()
    if secret_path is not None:
        # A later run on the same address may have replaced and removed it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(secret_path)


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
        import tempfile  # here for the same reason as in _host

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

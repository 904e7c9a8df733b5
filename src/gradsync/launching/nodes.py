"""The launchers of several machines, `gradsync run --nnodes` or `gs.launcher(rank_start=)`: the first hosts the server.

The launchers do not talk to each other. Each starts its own ranks, and all ranks dial the first launcher's server. When
a rank dies, the server tells all the others, and each launcher ends its own ranks as soon as one of them fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS, check_address, is_loopback, join_address, parse_address
from gradsync.environment import (
    HOW_TO_MAKE_A_SECRET_FILE,
    SECRET_FILE,
    log_warning,
    parse_secret,
    read_secret,
    read_secret_option,
)
from gradsync.errors import InvalidArgument, RendezvousError, RendezvousTimeout
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for
from gradsync.rendezvous.sockets import bind_listener, format_address


class Nodes(NamedTuple):
    """The machines of a run: how many, the number of this one, and the server's address and secret; by default one."""

    nnodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = b""


def check_nodes(
    nnodes: int | None, node_rank: int | None, rendezvous: str | None, secret_file: str | None, max_restarts: int
) -> Nodes:
    """Returns the machines of a run from the options of the command line.

    Raises:
        InvalidArgument: an option is missing, malformed or out of its range, or allowed only for several machines, or
            for one; or the secret cannot be read.
    """
    if nnodes is None:
        given = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--secret-file": secret_file}
        for option, value in given.items():
            if value is not None:
                raise InvalidArgument(f"{option} needs --nnodes, the number of machines")
        return Nodes()
    if node_rank is not None and node_rank >= nnodes:
        raise InvalidArgument(f"--node-rank needs to be from 0 to {nnodes - 1} with --nnodes {nnodes}, got {node_rank}")
    if nnodes == 1:
        return Nodes()
    if node_rank is None:
        raise InvalidArgument(f"--nnodes {nnodes} needs --node-rank, this machine's number from 0 to {nnodes - 1}")
    if max_restarts:
        raise InvalidArgument(
            f"--max-restarts works on one machine only, and --nnodes is {nnodes}: the launchers of several machines do "
            "not talk to each other; let the scheduler start all of them again after a failure"
        )
    if rendezvous is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --rendezvous HOST:PORT, the same on every machine: an address of the machine "
            "with --node-rank 0, and a port that is free there"
        )
    host, port = parse_address(check_address(rendezvous, "--rendezvous"))
    if host in ("0.0.0.0", "::"):
        raise InvalidArgument(
            f"--rendezvous needs an address of the machine with --node-rank 0, by which the others reach it, got {host}"
        )
    secret = read_secret() if secret_file is None else read_secret_option(secret_file)
    if secret is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --secret-file (or {SECRET_FILE}), so that nobody else can join the run: make one "
            f"with: {HOW_TO_MAKE_A_SECRET_FILE}, and copy it to every machine"
        )
    return Nodes(nnodes, node_rank, host, port, secret)


@contextlib.contextmanager
def shared_endpoint(
    host: str, port: int, secret: bytes | None, *, is_first: bool, words: str
) -> Iterator[tuple[Endpoint, socket.socket | None]]:
    """Yields the endpoint of the server that several launchers share, and on the first launcher the server's socket.

    Args:
        host, port: where the first launcher hosts the server; port 0 is any free port, which the log then names.
        secret: the secret of the run. None, if all launchers are on this machine: the first makes one, and the others
            find it in a file of mode 0600 in the user's runtime directory.
        is_first: whether this launcher is the first.
        words: the beginning of the advice if the address is wrong.

    Raises:
        RendezvousError: on the first launcher: the address does not belong to this machine, or the port is taken.
        RendezvousTimeout: on another launcher: the first has not come.
    """
    if not is_first:
        yield Endpoint(join_address(host, port), secret or _find_secret(host, port)), None
        return
    advice = f"{words}, and a port that is free there, the same on every machine"
    try:
        listener = bind_listener(host, port, if_taken=advice)
    except RendezvousError as error:
        text = str(error)
        raise RendezvousError(text if advice in text else f"{text}; {advice}") from None
    with listener:
        address, chosen = listener.getsockname()[:2]
        if port == 0:
            log_warning(
                f"gradsync: this launcher hosts the rendezvous: pass port={chosen} to those of the other machines"
            )
        if is_loopback(address) and not is_loopback(host):  # /etc/hosts of Debian and Docker
            log_warning(
                f"gradsync: warning: on this machine {host!r} has the address {address}, which no other machine can "
                f"reach; {words}, by which the others reach it"
            )
        with contextlib.nullcontext(secret) if secret else _told_secret(host, chosen) as known:
            yield Endpoint(format_address(listener), known), listener


@contextlib.contextmanager
def _told_secret(host: str, port: int) -> Iterator[bytes]:
    """Yields a new secret, which a file holds meanwhile. The lock on the file tells that its writer still lives."""
    address, secret = join_address(host, port), os.urandom(32)
    path = secret_path(address)
    publish(path, Endpoint(address, secret))
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield secret
        finally:
            os.unlink(path)


def _find_secret(host: str, port: int) -> bytes:
    """Returns the secret that the first launcher has put into a file; waits until it has come."""
    address = join_address(host, port)
    path, deadline = secret_path(address), time.monotonic() + DEFAULT_TIMEOUT_SECONDS
    while wait_for(path, None, deadline, lambda: log_warning(f"gradsync: waiting for the launcher at {address}")):
        with contextlib.suppress(OSError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return parse_secret(f"secret file {path!r}", file.readline())
        time.sleep(0.01)  # a file that nobody holds is of a launcher that was killed, or the lock is still to come
    raise RendezvousTimeout(
        f"no launcher hosted the rendezvous at {address} within {DEFAULT_TIMEOUT_SECONDS:g} s: start the one with "
        "rank_start 0 on this machine, with the same port",
        missing_ranks=(0,),
    )

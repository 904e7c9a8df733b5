"""Several launchers of one run, `gs.launcher(rank_start=)` or `gradsync run --nnodes`: the first hosts the server.

The launchers do not talk to each other. Each starts its own ranks, and all ranks dial the first launcher's server. When
a rank dies, the server tells all the others, and each launcher ends its ranks as soon as one of them fails.

The launchers need a common secret, from GRADSYNC_SECRET_FILE or GRADSYNC_SECRET on every node, or --secret-file. With
`gs.launcher` on loopback none needs to be set. The first launcher then writes a new secret to a file of mode 0600 in
the user's runtime directory, and the ranks of the other launchers read this file. If gradsync did not launch the ranks,
rank 0 makes and writes the secret (`rendezvous/hosting.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradsync.arguments import is_loopback, join_address, parse_address
from gradsync.environment import HOW_TO_MAKE_A_SECRET_FILE, SECRET, SECRET_FILE, read_secret_option, take_secret
from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousError
from gradsync.launching.output import Notices
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path
from gradsync.rendezvous.sockets import bind_listener, format_address


@dataclass(frozen=True)
class Nodes:
    """The machines of a run of `gradsync run`; made by `check_nodes`. By default one.

    Attributes:
        count: the number of machines.
        number: the number of this machine, from 0.
        host, port: the address of the rendezvous server; on one machine, any port of loopback.
        secret: the secret of the run; b"" on one machine.
    """

    count: int = 1
    number: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = field(default=b"", repr=False)

    @property
    def rendezvous(self) -> str:
        """The address of the rendezvous server, as the user wrote it."""
        return join_address(self.host, self.port)


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
    try:
        host, port = parse_address(rendezvous)
    except InvalidArgument as error:
        raise InvalidArgument(f"--rendezvous: {error}") from None
    if host in ("0.0.0.0", "::"):
        raise InvalidArgument(
            f"--rendezvous needs an address of the machine with --node-rank 0, by which the others reach it, got {host}"
        )
    secret = take_secret() if secret_file is None else read_secret_option(secret_file)
    if secret is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --secret-file (or {SECRET_FILE}), so that nobody else can join the run: make one "
            f"with: {HOW_TO_MAKE_A_SECRET_FILE}, and copy it to every machine"
        )
    return Nodes(nnodes, node_rank, host, port, secret)


@contextlib.contextmanager
def node_endpoint(nodes: Nodes, notices: Notices) -> Iterator[tuple[Endpoint | None, socket.socket | None]]:
    """Yields the endpoint of the rendezvous server for `gradsync run --nnodes`, and on node 0 the server's socket.

    Both are None on one machine: the supervisor then makes an endpoint.

    Raises:
        RendezvousError: on node 0, the address does not belong to this machine, or the port is taken.
    """
    if nodes.count == 1:
        yield None, None
        return
    if nodes.number > 0:
        yield Endpoint(nodes.rendezvous, nodes.secret), None
        return
    host = nodes.host
    try:
        listener = bind_listener(host, nodes.port, if_taken="name another port in --rendezvous, on every machine")
    except RendezvousError as error:
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
            raise
        raise RendezvousError(
            f"{error}; node 0 hosts the rendezvous server: start it on the machine with the address {host!r}, or name "
            "an address of this machine in --rendezvous, on every machine"
        ) from None
    with listener:
        address = listener.getsockname()[0]
        if host not in ("localhost", address) and is_loopback(address):  # /etc/hosts of Debian and Docker
            notices.print(
                f"gradsync: warning: on this machine {host!r} has the address {address}, which no other machine can "
                "reach; name another address in --rendezvous, on every machine"
            )
        yield Endpoint(format_address(listener), nodes.secret), listener


@contextlib.contextmanager
def launcher_endpoint(
    host: str, port: int, rank_start: int, *, has_others: bool
) -> Iterator[tuple[Endpoint | None, socket.socket | None]]:
    """Yields the endpoint of the rendezvous server for a call of `launcher`, and its socket if this process hosts it.

    The endpoint and the socket are None if this call starts all ranks and `host` is loopback: the supervisor then makes
    an endpoint. If `host` is loopback and the user has set no secret, the first launcher makes the secret. The other
    launchers get an endpoint with the secret b"". Their ranks read the secret from the first launcher's file, like
    ranks without a launcher (`rendezvous/hosting.py`).

    Args:
        host, port: the address at which the first launcher hosts the server.
        rank_start: the rank of this launcher's first process.
        has_others: whether other launchers start ranks of the same run.

    Raises:
        AuthenticationError: there is no secret, and other machines can reach the server.
        RendezvousError: the address cannot be bound.
    """
    is_on_loopback = is_loopback(host)
    if not has_others and is_on_loopback:
        yield None, None
        return
    secret = take_secret()
    if secret is None and not is_on_loopback:
        raise AuthenticationError(
            f"launcher at {host} needs a secret, because other machines can reach this address: put a secret into a "
            f"file of mode 0600 and set {SECRET_FILE} to its path on every node, or set {SECRET}; if all launchers run "
            "on one machine, master_ip='localhost' needs no secret"
        )
    if rank_start > 0:
        yield Endpoint(join_address(host, port), secret or b""), None
        return
    with bind_listener(host, port) as listener:
        address = format_address(listener)
        if has_others and port == 0:
            port = listener.getsockname()[1]
            import logging  # imported here to keep the start short

            logging.getLogger("gradsync").warning(
                "this launcher hosts the rendezvous at %s: pass port=%d to the launchers of the other nodes",
                address,
                port,
            )
        with contextlib.nullcontext(secret) if secret else _published_secret(address) as known:
            yield Endpoint(address, known), listener


@contextlib.contextmanager
def _published_secret(address: str) -> Iterator[bytes]:
    """Writes a new secret to a file, from which the ranks of this machine's other launchers read it.

    When the context ends, the function removes the file.
    """
    secret = os.urandom(32)
    path = secret_path(address)
    publish(path, Endpoint(address, secret))
    try:
        yield secret
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

"""What `gradsync run` is told about the other machines of a run: checked before anything starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from gradsync.arguments import check_seconds, parse_address
from gradsync.environment import HOW_TO_MAKE_A_SECRET_FILE, SECRET_FILE, read_secret_option, take_secret
from gradsync.errors import InvalidArgument
from gradsync.rendezvous.frames import MAX_RANKS


@dataclass(frozen=True)
class NodeOptions:
    """This machine among those of a run; made by `check_node_options`.

    Attributes:
        nnodes: number of machines.
        node_rank: number of this one.
        rendezvous: host:port where the launchers meet, as the user wrote it.
        secret: that they share.
        join_timeout_seconds: how long one waits for the others.
        node_address: this machine's address, where the user names it.
    """

    nnodes: int
    node_rank: int
    rendezvous: str
    secret: bytes = field(repr=False)
    join_timeout_seconds: float = 120.0
    node_address: str | None = None

    @property
    def name(self) -> str:
        """This node in messages."""
        return f"node {self.node_rank} of {self.nnodes}"


def check_node_options(
    nnodes: int,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
    join_timeout_seconds: float,
    node_address: str | None,
) -> NodeOptions:
    """Checks the options of a run on several machines.

    Raises:
        InvalidArgument: one is missing, malformed or out of its range, or the secret cannot be read.
    """
    check_seconds("gradsync run", "--join-timeout", join_timeout_seconds)
    if nnodes > MAX_RANKS:
        raise InvalidArgument(f"--nnodes needs to be at most {MAX_RANKS}, got {nnodes}")
    if node_rank is None:
        raise InvalidArgument(f"--nnodes {nnodes} needs --node-rank, this machine's number from 0 to {nnodes - 1}")
    if node_rank >= nnodes:
        raise InvalidArgument(f"--node-rank needs to be from 0 to {nnodes - 1} with --nnodes {nnodes}, got {node_rank}")
    if rendezvous is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --rendezvous HOST:PORT, the same on every machine: an address of the machine "
            "with --node-rank 0, and a port that is free there"
        )
    _check_rendezvous(rendezvous)
    if node_address is not None:
        _check_host("--node-address", node_address)
    secret = take_secret() if secret_file is None else read_secret_option(secret_file)
    if secret is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --secret-file (or {SECRET_FILE}), so that nobody else can join the run: make one "
            f"with: {HOW_TO_MAKE_A_SECRET_FILE}, and copy it to every machine"
        )
    return NodeOptions(nnodes, node_rank, rendezvous, secret, join_timeout_seconds, node_address)


def _check_rendezvous(rendezvous: str) -> None:
    try:
        host, _ = parse_address(rendezvous)
    except InvalidArgument as error:
        raise InvalidArgument(f"--rendezvous: {error}") from None
    _check_host("--rendezvous", host)


def _check_host(option: str, host: str) -> None:
    """Refuses addresses that mean something else on every machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return
    if address.is_unspecified or (address.version == 6 and address.is_link_local):
        raise InvalidArgument(
            f"{option} needs an address by which the other machines reach this one or node 0, got {host!r}, which "
            "names no particular machine"
        )

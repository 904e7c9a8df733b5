"""How the launchers of a run meet: each joins a generation of their rendezvous, and tells what it brings.

A new generation is formed for every start of the ranks, so that a launcher which was lost, and started again by
hand, is one of the next.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from gradsync.arguments import LARGEST_PORT, parse_address
from gradsync.errors import AuthenticationError, InvalidArgument, RankFailed, RendezvousError, RendezvousTimeout
from gradsync.launching.job import Network, NodePlace
from gradsync.launching.nodes.hosting import StartPorts
from gradsync.launching.nodes.node_options import NodeOptions
from gradsync.launching.nodes.node_report import SAME_VERSION
from gradsync.launching.notices import Notices
from gradsync.launching.told import from_told
from gradsync.machine import interface_of
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.connection import StreamEnded
from gradsync.rendezvous.secret_files import Endpoint
from gradsync.rendezvous.sockets import look_up

_NOTICE_SECONDS = 4.0  # out of step with the notices of the server, which would miss who just asks again
_AGAIN_SECONDS = 0.5
_TELLING_SECONDS = 30.0  # to hear what a launcher brings that has joined
_RANKS_SECRET = b"gradsync: the secret of the ranks of one start\0"


@dataclass(frozen=True)
class NodeRecord:
    """What a launcher tells the others of itself before a start.

    Attributes:
        node: its number.
        host: its host's name.
        pid: its process.
        address: by which its machine reaches the rendezvous.
        interface: that has this address, where it is known.
        n_ranks: how many ranks it starts.
        restart: how often it would have started them again then.
        max_restarts: how often at most.
        server: where the ranks meet; from node 0 only, like the next two.
        master_port: MASTER_PORT.
        nonce: in hexadecimal; with the secret of the run it makes that of the ranks.
    """

    node: int
    host: str
    pid: int
    address: str
    interface: str | None
    n_ranks: int
    restart: int
    max_restarts: int
    server: str = ""
    master_port: int = 0
    nonce: str = ""

    @property
    def name(self) -> str:
        """This node in messages."""
        return f"node {self.node} ({self.host}, {self.address})"

    @classmethod
    def from_bytes(cls, node: int, data: bytes) -> NodeRecord:
        """Returns what the launcher of a node has told of itself.

        Raises:
            RendezvousError: that cannot be of this node.
        """
        try:
            record = from_told(cls, data)
            bytes.fromhex(record.nonce)
            if record.node != node or record.n_ranks < 1 or not 0 <= record.master_port <= LARGEST_PORT:
                raise ValueError(f"node {record.node}, {record.n_ranks} ranks, port {record.master_port}")
            if record.server:
                parse_address(record.server)
            return record
        except ValueError as error:
            raise RendezvousError(f"what node {node} tells cannot be read: {error}; {SAME_VERSION}") from None


@dataclass(frozen=True)
class Meeting:
    """The launchers of a run that have met for one start.

    Attributes:
        client: this one's.
        own: what this one brings.
        nodes: what each brings, by node.
    """

    client: RendezvousClient
    own: NodeRecord
    nodes: tuple[NodeRecord, ...]

    @property
    def restart(self) -> int:
        """How often the ranks have been started before: one that was lost itself does not know."""
        return max(record.restart for record in self.nodes)

    @property
    def rank_start(self) -> int:
        """The first rank of this machine."""
        return sum(record.n_ranks for record in self.nodes[: self.own.node])

    @property
    def world_size(self) -> int:
        """How many ranks there are on all machines."""
        return sum(record.n_ranks for record in self.nodes)

    def place(self) -> NodePlace:
        """Returns this machine among the others, for the ranks."""
        return NodePlace(self.own.node, len(self.nodes), run_name=self.nodes[0].nonce[:8])

    def network(self) -> Network | None:
        """Returns by what this machine reaches the others; None where that is not known."""
        return None if self.own.interface is None else Network(self.own.interface, ":" in self.own.address)

    def endpoint(self, secret: bytes) -> Endpoint:
        """Returns where the ranks meet; the secret of this start is made here, and never travels."""
        nonce = bytes.fromhex(self.nodes[0].nonce)
        return Endpoint(self.nodes[0].server, hmac.digest(secret, _RANKS_SECRET + nonce, hashlib.sha256))


@dataclass(frozen=True)
class Offer:
    """What this launcher brings to the next start; see `NodeRecord`."""

    n_ranks: int
    max_restarts: int
    restart: int = 0


def meet(options: NodeOptions, address: str, offer: Offer, ports: StartPorts | None, notices: Notices) -> Meeting:
    """Joins the next generation of the launchers, and exchanges what each brings.

    Args:
        options: of the command line.
        address: where this launcher reaches the rendezvous.
        offer: what this one brings.
        ports: what node 0 holds ready.
        notices: where it is told who is missing.

    Raises:
        RendezvousTimeout: not all launchers came in time; the text has the names.
        AuthenticationError: the secrets differ.
        RendezvousError: the rendezvous refused this launcher, or is gone.
        InvalidArgument: the launchers were told different things.
        RankFailed: a launcher died meanwhile.
    """
    named = None if options.node_address is None else _check_own(options.node_address)
    client = _join(options, address, notices, is_again=offer.restart > 0)
    try:
        own = _own_record(options, named or client.own_host, offer, ports)
        record = json.dumps(asdict(own), separators=(",", ":"))  # short: thousands of nodes have room for one each
        told = client.exchange("nodes", record.encode(), timeout_seconds=_TELLING_SECONDS)
        nodes = tuple(NodeRecord.from_bytes(node, text) for node, text in enumerate(told))
        _check_alike(nodes)
    except InvalidArgument:
        client.close()
        raise
    except BaseException:
        client.abandon()
        raise
    return Meeting(client, own, nodes)


def _check_own(node_address: str) -> str:
    """Returns the address that the user names, in figures: looked at before it joins, and others count on it."""
    try:
        address = str(look_up(node_address, 0)[0][4][0])
    except OSError as error:
        raise InvalidArgument(f"--node-address {node_address!r} is not known on this machine: {error}") from None
    if interface_of(address) is None:
        raise InvalidArgument(f"--node-address {node_address!r} is no address of this machine; see: ip address")
    return address


def _own_record(options: NodeOptions, address: str, offer: Offer, ports: StartPorts | None) -> NodeRecord:
    return NodeRecord(
        options.node_rank,
        socket.gethostname(),
        os.getpid(),
        address,
        interface_of(address),
        offer.n_ranks,
        offer.restart,
        offer.max_restarts,
        *((ports.address, ports.master_port, ports.nonce.hex()) if ports is not None else ()),
    )


def _check_alike(nodes: tuple[NodeRecord, ...]) -> None:
    for record in nodes:
        if record.max_restarts != nodes[0].max_restarts:
            raise InvalidArgument(
                f"all machines need the same --max-restarts, node 0 has {nodes[0].max_restarts}, "
                f"{record.name} {record.max_restarts}"
            )


def _join(options: NodeOptions, address: str, notices: Notices, *, is_again: bool) -> RendezvousClient:
    """Joins, and tells every few seconds who is missing; node 0's server tells it there."""
    deadline = time.monotonic() + options.join_timeout_seconds
    heard = ""  # who is missing, as node 0 told it last: it may end its waiting first
    while True:
        left_seconds = max(deadline - time.monotonic(), 0.0)
        try:
            return RendezvousClient.connect(
                address,
                secret=options.secret,
                rank=options.node_rank,
                world_size=options.nnodes,
                timeout_seconds=min(left_seconds, _NOTICE_SECONDS) if options.node_rank else left_seconds,
                noun="node",
            )
        except AuthenticationError as error:
            raise AuthenticationError(f"{error}; --secret-file needs to hold the same on every machine") from None
        except RendezvousTimeout as error:
            reason = _reason(error, heard)
            heard = reason if error.missing_ranks else heard
        except RankFailed as error:
            reason = f"one left while others joined ({error})"
            time.sleep(_AGAIN_SECONDS)
        except RendezvousError as error:
            if not is_again and not isinstance(error.__cause__, StreamEnded):
                raise RendezvousError(f"{error} (--nnodes, --node-rank, --rendezvous)") from None
            reason = f"{error}{_once_heard(heard)}"
            time.sleep(_AGAIN_SECONDS)
        if time.monotonic() + _AGAIN_SECONDS >= deadline:
            raise RendezvousTimeout(
                f"{options.name}: not all nodes met at {options.rendezvous} within "
                f"{options.join_timeout_seconds:g} s (--join-timeout): {reason}"
            )
        notices.tell(f"gradsync: {options.name} waits for others at {options.rendezvous}: {reason}")


def _reason(error: RendezvousTimeout, heard: str) -> str:
    """Returns who is missing, or why node 0 cannot be reached, and who was missing when it could."""
    if error.missing:
        return f"missing: {error.missing}"
    cause = (error.cause or str(error)).removeprefix("no answer").lstrip()  # which is said already
    return f"missing: node 0 (no answer{' ' if cause.startswith('to ') else ': '}{cause}){_once_heard(heard)}"


def _once_heard(heard: str) -> str:
    return f"; before that, {heard}" if heard else ""

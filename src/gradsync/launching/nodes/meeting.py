"""How the launchers of several machines meet: node 0 hosts, each joins a generation and tells what it brings.

A new generation is formed for every start of the ranks, so that a launcher which was lost, and started again by
hand, is one of the next.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from gradsync.arguments import LARGEST_PORT, check_seconds, parse_address
from gradsync.environment import HOW_TO_MAKE_A_SECRET_FILE, SECRET_FILE, read_secret_option, take_secret
from gradsync.errors import AuthenticationError, InvalidArgument, RankFailed, RendezvousError, RendezvousTimeout
from gradsync.launching.free_port import reserved_port
from gradsync.launching.hosting import own_listener
from gradsync.launching.job import Network, NodePlace
from gradsync.launching.output import Notices
from gradsync.launching.rank_report import from_told
from gradsync.machine import interface_of
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.connection import StreamEnded
from gradsync.rendezvous.frames import MAX_RANKS
from gradsync.rendezvous.secret_files import Endpoint
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.sockets import format_address, look_up

SAME_VERSION = "run the same version of gradsync on every machine"

_NONCE_BYTES = 16

_NOTICE_SECONDS = 4.0  # out of step with the notices of the server, which would miss who just asks again
_AGAIN_SECONDS = 0.5
_TELLING_SECONDS = 30.0  # to hear what a launcher brings that has joined
_RANKS_SECRET = b"gradsync: the secret of the ranks of one start\0"


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


@contextlib.contextmanager
def hosting(options: NodeOptions, notices: Notices) -> Iterator[RendezvousServer | None]:
    """Runs the launchers' rendezvous server, on node 0; gives None on the others.

    Raises:
        InvalidArgument: the name stands for no particular machine.
        RendezvousError: the address is not this machine's, or the port is taken.
    """
    if options.node_rank != 0:
        yield None
        return
    host, port = parse_address(options.rendezvous)
    bound_host = options.node_address or _resolve(host, port, notices)
    with _listening(options, bound_host, port) as listener:
        server = RendezvousServer(
            options.nnodes, secret=options.secret, listener=listener, noun="node", host_rank=options.node_rank
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()


@dataclass(frozen=True)
class StartPorts:
    """What node 0 holds ready for one start of the ranks.

    Attributes:
        listener: of the ranks' rendezvous server.
        master_port: MASTER_PORT.
        nonce: makes the secret of this start.
    """

    listener: socket.socket
    master_port: int
    nonce: bytes

    @property
    def address(self) -> str:
        """Where the ranks meet."""
        return format_address(self.listener)


@contextlib.contextmanager
def start_ports(host: str) -> Iterator[StartPorts]:
    """Binds a port for the ranks' server on the interface of the launchers' one, and keeps MASTER_PORT free.

    Raises:
        RendezvousError: the address cannot be bound any more.
    """
    with own_listener(host, 0) as listener, reserved_port() as master_port:
        yield StartPorts(listener, master_port, os.urandom(_NONCE_BYTES))


@contextlib.contextmanager
def _listening(options: NodeOptions, host: str, port: int) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        try:
            another = "name another port in --rendezvous, on every machine"
            listener = stack.enter_context(own_listener(host, port, if_taken=another))
        except RendezvousError as error:
            if isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE:
                raise RendezvousError(f"{options.name}: {error}") from None
            raise RendezvousError(
                f"{options.name}: {error}; node 0 hosts the rendezvous: start it on the machine that "
                f"{options.rendezvous!r} names, or give its own address by --node-address"
            ) from None
        yield listener


def _resolve(host: str, port: int, notices: Notices) -> str:
    """Returns the address that a name stands for on this machine."""
    try:
        found = str(look_up(host, port)[0][4][0])
    except OSError as error:
        raise RendezvousError(
            f"--rendezvous: node 0 needs to know the address of {host!r}: {error}; give an address in figures, or name "
            "this machine's by --node-address"
        ) from None
    address = ipaddress.ip_address(found.partition("%")[0])
    if address.is_unspecified or (address.version == 6 and address.is_link_local):
        raise InvalidArgument(
            f"--rendezvous: {host!r} stands for {found}, which other machines cannot use; name another"
        )
    if address.is_loopback and host != "localhost" and host != found:
        notices.tell(
            f"gradsync: warning: {host!r} stands for {found} on this machine, where no other machine can reach it; "
            "name an address in figures, or this machine's by --node-address"
        )
    return found


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

"""What node 0 hosts: the rendezvous of the launchers for the whole run, and the ports of each start of the ranks."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from gradsync.arguments import parse_address
from gradsync.errors import InvalidArgument, RendezvousError
from gradsync.launching.free_port import reserved_port
from gradsync.launching.listening import own_listener
from gradsync.launching.nodes.node_options import NodeOptions
from gradsync.launching.notices import Notices
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.sockets import format_address, look_up

_NONCE_BYTES = 16


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

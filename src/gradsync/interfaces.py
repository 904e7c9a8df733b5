"""The addresses of this machine, and its interfaces: asked of the kernel, which tells of all in one answer."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator

# Source: include/uapi/linux/netlink.h, rtnetlink.h and if_addr.h.
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index of the interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_NEW_ADDRESS, _GET_ADDRESS, _DONE, _ERROR = 20, 22, 3, 2
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP: all of them
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_READ_BYTES = 65536
_OF_CONTAINERS = ("docker", "br-", "virbr", "cni", "flannel", "veth", "podman")


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has an address, e.g. "eth0"; None where no interface has it.

    Args:
        address: IPv4 or IPv6, in figures.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    mapped = wanted.ipv4_mapped if isinstance(wanted, ipaddress.IPv6Address) else None
    wanted = mapped or wanted
    for index, found in addresses():
        if found == wanted.packed:
            return socket.if_indextoname(index)
    return "lo" if wanted.is_loopback else None  # which has all of 127.0.0.0/8


def address_towards(host: str, port: int) -> str | None:
    """Returns the address from which this machine reaches a host, which may be itself; None where it does not.

    Nothing is sent: the kernel looks up the way.

    Args:
        host: its name or address.
        port: of a server there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # no address, or nothing that could have one
        return None


def own_addresses() -> list[str]:
    """Returns the addresses by which other machines may reach this one, in figures, IPv4 first.

    Not those of loopback, of links, and of bridges that container engines make: many machines have these alike.
    """
    found = [(socket.if_indextoname(index), ipaddress.ip_address(packed)) for index, packed in addresses()]
    usable = [
        address
        for name, address in found
        if not address.is_loopback and not address.is_link_local and not name.startswith(_OF_CONTAINERS)
    ]
    return [str(address) for address in sorted(usable, key=lambda address: address.version)]


def addresses() -> Iterator[tuple[int, bytes]]:
    """Gives the addresses of this machine, each with the index of its interface; none where it cannot be told."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(5.0)
            size = _HEADER.size + _ADDRESS.size
            kernel.send(_HEADER.pack(size, _GET_ADDRESS, _REQUEST_DUMP, 1, 0) + _ADDRESS.pack(0, 0, 0, 0, 0))
            while True:
                for kind, body in _messages(kernel.recv(_READ_BYTES)):
                    if kind in (_DONE, _ERROR):
                        return
                    if kind == _NEW_ADDRESS:
                        yield from _of_message(body)
    except OSError:
        return


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_padded(length) :]


def _of_message(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Gives the address of one message; of a point-to-point connection, that of this end."""
    *_, index = _ADDRESS.unpack_from(body)
    found: dict[int, bytes] = {}
    rest = body[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_padded(length) :]
    address = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
    if address is not None:
        yield index, address


def _padded(length: int) -> int:
    return max((length + 3) & ~3, 4)

"""By which interface the ranks of this machine reach the others: what NCCL is told."""

from __future__ import annotations

from gradsync.launching.job import Network
from gradsync.machine import address_towards, interface_of


def network_towards(host: str, port: int) -> Network | None:
    """Returns by what this machine reaches a host, which may be itself; None where that cannot be told.

    Args:
        host: its name or address.
        port: of a server there.
    """
    address = address_towards(host, port)
    interface = None if address is None else interface_of(address)
    return None if address is None or interface is None else Network(interface, ":" in address)

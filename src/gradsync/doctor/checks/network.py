"""The network: what ranks of one machine meet over, and what several machines would."""

from __future__ import annotations

from gradsync.doctor.finding import Finding, broken, ok, warning
from gradsync.doctor.surroundings import Surroundings
from gradsync.errors import InvalidArgument
from gradsync.launchers import read_port

_FEWEST_PORTS = 1000
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_network(here: Surroundings) -> list[Finding]:
    """Loopback, the interfaces, the host's own name."""
    if here.loopback_error:
        advice = "as root: ip link set lo up; a sandbox may forbid sockets"
        return [broken("network", f"no port of 127.0.0.1 can be listened at: {here.loopback_error}", advice)]
    outward = [each for each in here.interfaces if each.is_up and each.address and not each.address.startswith("127.")]
    shown = ", ".join(f"{each.name} {each.address}" for each in outward) or "loopback only: for ranks of this machine"
    for name in _INTERFACE_VARIABLES:
        missing = _missing_interfaces(here.environ.get(name, ""), [each.name for each in here.interfaces])
        if missing:
            return [
                warning("network", f"{shown}; {name} names {', '.join(missing)}, which is not here", f"unset {name}")
            ]
    if here.host_error:
        text = f"{shown}; the host's own name {here.host!r} has no address ({here.host_error})"
        return [
            warning(
                "network",
                text,
                f"several machines: --node-address; as root: echo '127.0.1.1 {here.host}' >> /etc/hosts",
            )
        ]
    return [ok("network", shown)]


def _missing_interfaces(value: str, present: list[str]) -> list[str]:
    """Returns the names in a list as NCCL takes it that begin no interface's name; "=eth0" is that very one."""
    if value.startswith("^"):
        return []
    exact = value.startswith("=")
    names = [name.strip() for name in value.removeprefix("=").split(",") if name.strip()]
    return [n for n in names if not any(p == n if exact else p.startswith(n.partition(":")[0]) for p in present)]


def check_ports(here: Surroundings) -> list[Finding]:
    """Ports that the kernel gives out, and one that MASTER_PORT asks for."""
    text = here.read("/proc/sys/net/ipv4/ip_local_port_range") or ""
    low, _, high = text.partition("\t")
    known = low.strip().isdigit() and high.strip().isdigit()
    if known and int(high) - int(low) < _FEWEST_PORTS:
        advice = "as root: sysctl net.ipv4.ip_local_port_range='32768 60999'"
        return [warning("ports", f"the kernel gives out only {int(high) - int(low) + 1} of them", advice)]
    try:
        read_port(here.environ, "MASTER_PORT")
    except InvalidArgument as error:
        return [broken("ports", str(error), "unset MASTER_PORT")]
    return [ok("ports", f"free ones from {int(low):,} to {int(high):,}" if known else "free ones can be had")]

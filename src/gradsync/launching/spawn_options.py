"""The options of `gs.spawn`: unknown ones refused, deprecated ones translated, all checked before anything starts."""

from __future__ import annotations

import difflib
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.arguments import check_integer, check_port, integer_of
from gradsync.environment import BACKENDS
from gradsync.errors import InvalidArgument
from gradsync.launching.gpus import choose_gpus, parse_gpus
from gradsync.launching.start_method_choice import chosen_start_method
from gradsync.machine import default_process_count

_KNOWN = ("start_method", "gpus", "ips", "backend", "print_config")
# What stands for each deprecated option today; None: nothing.
_DEPRECATED = {
    "selected_devices": "gpus",
    "cluster_node_ips": "ips",
    "node_ip": "ips",
    "started_port": None,
    "use_paddlecloud": None,
}


@dataclass(frozen=True)
class SpawnSettings:
    """What `gs.spawn` does, once its options are read.

    Attributes:
        nprocs: number of processes.
        start_method: how they start.
        backend: what `init_process_group("auto")` takes in them.
        gpus: CUDA_VISIBLE_DEVICES of each process; None: that of this process.
        port: of the rendezvous server; 0: a free one.
        print_config: whether to show all this.
    """

    nprocs: int
    start_method: str
    backend: str
    gpus: tuple[str, ...] | None
    port: int
    print_config: bool

    def table(self) -> str:
        """Gives the settings, one a line."""
        rows = {
            "nprocs": self.nprocs,
            "start_method": self.start_method,
            "backend": self.backend,
            "gpus": "as this process" if self.gpus is None else ",".join(self.gpus),
            "port": self.port or "a free one",
        }
        width = max(map(len, rows))
        return "\n".join(["gradsync.spawn", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def read_options(nprocs: int, options: Mapping[str, Any], *, stacklevel: int) -> SpawnSettings:
    """Reads the options of one call.

    Args:
        nprocs: number of processes, or -1.
        options: by name.
        stacklevel: of the warnings, as seen from the caller.

    Raises:
        InvalidArgument: an option is unknown, or has a value that does not fit.
        DeprecationWarning: as a warning, for each deprecated option.
    """
    given = _translate(options, stacklevel + 1)
    _check_ips(given.get("ips"))
    backend = given.get("backend", "auto")
    if backend not in BACKENDS:
        raise InvalidArgument(f"spawn needs a backend of {', '.join(BACKENDS)}, got {backend!r}")
    gpus = given.get("gpus")
    count = _count_processes(nprocs, gpus, backend)
    return SpawnSettings(
        count,
        chosen_start_method("spawn", given.get("start_method")),
        backend,
        None if gpus is None else tuple(choose_gpus(gpus, count, os.environ)),
        _checked_port(given.get("started_port")),
        bool(given.get("print_config", False)),
    )


def _translate(options: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
    """Gives the options under today's names; None stands for an option that is not given."""
    given = {name: value for name, value in options.items() if name in _KNOWN and value is not None}
    for name, value in options.items():
        if name in _DEPRECATED:
            new_name = _DEPRECATED[name]
            warnings.warn(f"spawn: {_what_to_do(name, new_name)}", DeprecationWarning, stacklevel=stacklevel + 1)
            if value is not None:
                given.setdefault(new_name or name, value)
        elif name not in _KNOWN:
            raise InvalidArgument(_unknown(name))
    return given


def _what_to_do(name: str, new_name: str | None) -> str:
    if new_name is not None:
        return f"the option {name} is deprecated; use {new_name}"
    if name == "started_port":
        return "the option started_port is deprecated; without it the ranks meet at a free port"
    return f"the option {name} is deprecated and does nothing: PaddleCloud is out of scope"


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, (*_KNOWN, *_DEPRECATED), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"spawn has no option {name!r}{hint} (it has {', '.join(_KNOWN)})"


def _count_processes(nprocs: int, gpus: str | Sequence[int | str] | None, backend: str) -> int:
    if integer_of(nprocs) != -1:
        return check_integer("spawn", "nprocs", nprocs, 1)
    if gpus is not None:
        return len(parse_gpus(gpus))
    return default_process_count("cpu" if backend == "shm" else "auto")


def _check_ips(ips: str | Sequence[str] | None) -> None:
    """Refuses machines other than this one."""
    if ips is None:
        return
    for ip in ips.split(",") if isinstance(ips, str) else ips:
        if not isinstance(ip, str) or not _is_here(ip.strip()):
            raise InvalidArgument(
                f"spawn starts processes on this machine only, and ips names another one: {ip!r} in {ips!r}; call a "
                "function that gs.launcher(rank_start=...) has decorated on each machine"
            )


def _is_here(host: str) -> bool:
    """Tells whether a host is this machine: only its own addresses can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, ValueError):  # no address of this machine, or nothing that could be one
        return False
    return bool(host)


def _checked_port(port: Any) -> int:
    if port is None:
        return 0
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port)
    return check_port("spawn", "started_port", port)

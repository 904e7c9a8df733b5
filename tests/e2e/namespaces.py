"""Machines made of network namespaces: each with an address of its own, on one bridge, so that a link can be cut.

They share the kernel, the files and the process ids of this machine; network, host name and, where asked for, process
ids are their own. Names are made of this process's id, so that tests that run at the same time do not meet.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_networks = itertools.count()
_GONE_WITHIN_SECONDS = 10.0


class Machine:
    """One namespace.

    Attributes:
        name: of the namespace.
        host: its host's name.
        ipv4, ipv6: its addresses.
    """

    def __init__(self, network: str, number: int) -> None:
        self.name = f"{network}n{number}"
        self.host = f"host{number}"
        self.ipv4 = f"10.77.0.{number + 1}"
        self.ipv6 = f"fd77::{number + 1}"
        self.port = f"{network}p{number}"  # its end at the bridge
        self._network = network

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a program there; its process id is that of the program itself."""
        shell = 'hostname "$0" && exec "$@"'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", shell, self.host, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def pids(self) -> list[int]:
        """Gives the processes that are there."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def take_link_down(self) -> None:
        """Cuts the machine off as a pulled cable does: it sees that its own link is down."""
        _ip("link", "set", self.port, "down")

    def drop_packets(self) -> None:
        """Cuts the machine off as a firewall does: its link stays up, and what is sent is lost without a word."""
        _ip("link", "set", self.port, "nomaster")

    def rejoin(self) -> None:
        """Ends either."""
        _ip("link", "set", self.port, "master", self._network)
        _ip("link", "set", self.port, "up")

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("link", "set", self.port, "master", self._network, "up")
        _ip("-n", self.name, "addr", "add", f"{self.ipv4}/24", "dev", "eth0")
        _ip("-n", self.name, "addr", "add", f"{self.ipv6}/64", "dev", "eth0", "nodad")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for arguments in (("link", "delete", self.port), ("netns", "delete", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*arguments)


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Gives so many machines on one network, which are gone afterwards, with all that runs on them."""
    network = f"gs{os.getpid() % 100_000:x}x{next(_networks)}"
    made = [Machine(network, number) for number in range(count)]
    try:
        _ip("link", "add", network, "type", "bridge")
        _ip("link", "set", network, "up")
        for machine in made:
            machine.make()
        yield made
    finally:
        for machine in made:
            machine.remove()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", network)


def why_none() -> str | None:
    """Says why there can be no such machines here; None where there can."""
    for program in ("ip", "unshare", "hostname"):
        if shutil.which(program) is None:
            return f"network namespaces: the program {program!r} is missing"
    try:
        with machines(1) as [machine], machine.start("true") as process:
            _, error = process.communicate(timeout=30)
            return f"network namespaces: {error.strip()}" if process.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return f"network namespaces cannot be made here: {told.strip()}"


def left_behind(machines: Sequence[Machine]) -> list[str]:
    """Names the processes that still run there, after a moment for the last to end."""
    deadline = time.monotonic() + _GONE_WITHIN_SECONDS
    while left := [(machine, pid) for machine in machines for pid in machine.pids()]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    return [f"{machine.host}: {_command_line(pid)}" for machine, pid in left]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"process {pid}"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout

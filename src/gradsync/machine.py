"""This machine: identity, processes, cores, GPUs, memory, addresses; calls with a timeout, interruptible waits."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from gradsync.errors import BackendUnavailable

#: The variables that set the number of threads of linear algebra libraries.
BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_LOOK_EVERY_SECONDS = 0.02
# Source: netdevice(7), SIOCGIFCONF; the size of struct ifreq on 64-bit Linux.
_SIOCGIFCONF, _IFREQ_BYTES, _MOST_ADDRESSES = 0x8912, 40, 1000
_OF_CONTAINERS = ("docker", "br-", "virbr", "cni", "flannel", "veth", "podman")

_Result = TypeVar("_Result")


# -- Processes --------------------------------------------------------------------------------------------------------


class ProcessStat(NamedTuple):
    """A process's entry in /proc.

    Attributes:
        state: one letter: "R" running, "S" sleeping, "T" stopped, "Z" ended and not waited for.
        parent: its parent's pid; 0 if the parent is not in this pid namespace.
        start_time: its start in clock ticks since the boot; it differs between processes that had the same pid.
    """

    state: str
    parent: int
    start_time: str


def read_stat(pid: int) -> ProcessStat | None:
    """Returns a process's entry in /proc; None if there is none, or /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the process's name before ")" may contain any character
        return ProcessStat(fields[0].decode(), int(fields[1]), fields[19].decode())
    except (OSError, IndexError):
        return None


def boot_id() -> str:
    """Returns the kernel's boot id, which differs between hosts with the same name; "" if there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_identity() -> str:
    """Returns a text that is equal for two processes if they can see each other's pids; "" if it is unknown.

    A container has its host's boot id, but its own pids, so the text includes the pid namespace.
    """
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


class Latch:
    """A flag that threads can wait for, and that can be set and cleared.

    It is used instead of an Event, whose inner lock stays held if Ctrl-C comes as a wait begins; the thread that sets
    the Event would then wait for ever. Here each wait has a lock of its own.
    """

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set
        self._waiting: list[threading.Lock] = []

    def set(self) -> None:
        """Sets the flag, and wakes all waiting threads."""
        self.is_set = True
        with contextlib.suppress(IndexError):  # none is left
            while True:
                self._waiting.pop().release()

    def clear(self) -> None:
        """Clears the flag."""
        self.is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the flag is set; returns False after `seconds`."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        limit = -1 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        was_set = self.is_set or waiting.acquire(timeout=limit)  # in this order: who sets it releases what was added
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiting)
        return was_set or self.is_set


def run_with_timeout(
    function: Callable[[], _Result], name: str, seconds: float, check: Callable[[], None] | None = None
) -> _Result:
    """Calls a function that may hang in C, with a deadline, on a daemon thread; a hanging thread is left behind.

    Args:
        function: the function.
        name: the thread's name.
        seconds: the deadline.
        check: called while waiting; an exception from it ends the wait.

    Raises:
        TimeoutError: the deadline came first.
    """
    outcome: list[_Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    deadline = time.monotonic() + seconds
    threading.Thread(target=run, name=name, daemon=True).start()
    while not ended.wait(_LOOK_EVERY_SECONDS):
        if check is not None:
            check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{name} did not return within {seconds:g} s")
    if errors:
        raise errors[0]
    return outcome[0]


# -- Cores and GPUs ---------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def blas_thread_variables(n_processes: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns variables that divide the cores among the linear algebra threads of `n_processes` ranks.

    Args:
        n_processes: number of ranks on this machine.
        environ: the environment; variables that the user has set are not changed.

    Returns:
        The variables to add, each with max(1, usable cores // n_processes).
    """
    threads = str(max(1, usable_cores() // max(1, n_processes)))
    return {name: threads for name in BLAS_VARIABLES if name not in environ}


def begin_on_core(number: int) -> None:
    """Moves the calling thread to one of its allowed cores, then allows all of them again.

    Ranks that started together often share a core. If every core is busy, the kernel does not move them: then each
    collective waits until the other rank is scheduled, 26 us instead of 5 for 4 KB on two ranks.

    Args:
        number: the rank's number on this machine, modulo the number of cores.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(usable)[number % len(usable)]})
        os.sched_setaffinity(0, usable)


def count_gpus(environ: Mapping[str, str] = os.environ, device_folder: str = "/dev") -> int:
    """Returns the number of NVIDIA GPUs that a process with this environment may use, without initialising CUDA.

    Args:
        environ: the variables; CUDA_VISIBLE_DEVICES limits the count.
        device_folder: the folder of the driver's device files.
    """
    try:
        present = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(device_folder))
    except OSError:
        present = 0
    visible = visible_gpus(environ)
    return present if visible is None or present == 0 else len(visible)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, or None if it is not set."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = []
    for entry in map(str.strip, visible.split(",")):
        # CUDA stops at the first entry that is not a device.
        if entry in ("", "-1", "NoDevFiles"):
            break
        names.append(entry)
    return tuple(names)


def default_process_count(device_type: str = "auto") -> int:
    """Returns the number of visible GPUs, or of usable cores if there is no GPU.

    Args:
        device_type: "auto", "cpu" (cores) or "gpu".

    Raises:
        BackendUnavailable: device_type is "gpu", and there is no GPU.
    """
    gpus = 0 if device_type == "cpu" else count_gpus()
    if device_type == "gpu" and gpus == 0:
        raise BackendUnavailable("device_type 'gpu' needs a visible NVIDIA GPU, found none")
    return gpus or usable_cores()


# -- Memory -----------------------------------------------------------------------------------------------------------


class MemoryGroup(NamedTuple):
    """A memory control group (cgroup). Values that cannot be read are None. Its counts include the groups inside it.

    Attributes:
        directory: the folder of its files.
        is_v1: whether it belongs to cgroup version 1.
    """

    directory: str
    is_v1: bool

    def kills(self) -> int | None:
        """Returns the number of its processes that the kernel has killed because memory ran out."""
        return numbered_line(f"{self.directory}/{'memory.oom_control' if self.is_v1 else 'memory.events'}", "oom_kill")

    def limit_hits(self) -> int | None:
        """Returns how often its limit was reached."""
        if self.is_v1:
            return _number(f"{self.directory}/memory.failcnt")
        return numbered_line(f"{self.directory}/memory.events", "oom")

    def limit(self) -> int | None:
        """Returns its limit in bytes, or None."""
        limit = _number(f"{self.directory}/{'memory.limit_in_bytes' if self.is_v1 else 'memory.max'}")
        return None if limit is None or limit >= 1 << 60 else limit  # in version 1 a value near 2**63 means no limit

    def available(self) -> int | None:
        """Returns the number of bytes that its processes can still allocate; None without a limit."""
        limit = self.limit()
        used = _number(f"{self.directory}/{'memory.usage_in_bytes' if self.is_v1 else 'memory.current'}")
        if limit is None or used is None:
            return None
        # The cache of files not used lately, which the kernel drops first.
        cached = numbered_line(
            f"{self.directory}/memory.stat", "total_inactive_file" if self.is_v1 else "inactive_file"
        )
        return max(0, limit - used + (cached or 0))


def memory_groups(proc: str = "/proc") -> list[MemoryGroup]:
    """Returns this process's memory control group and its parents, innermost first.

    Args:
        proc: the mount point of the proc file system.
    """
    paths = _group_paths(f"{proc}/self/cgroup")
    for kind, path in (("cgroup", paths.get("memory")), ("cgroup2", paths.get(""))):
        if path is None:
            continue
        for root, mount_point in _mounts(f"{proc}/self/mountinfo", kind):
            groups = [MemoryGroup(directory, kind == "cgroup") for directory in _upwards(root, mount_point, path)]
            # Hierarchies without the memory controller have no such files.
            if groups := [group for group in groups if group.kills() is not None]:
                return groups
    return []


def available_memory_bytes(proc: str = "/proc") -> float:
    """Returns the kernel's estimate of the memory that can be allocated without swapping, within the cgroups' limits.

    Returns infinity if there is no estimate. If a process allocates more, the kernel does not refuse the allocation,
    but kills the process when it first uses the memory.

    Args:
        proc: the mount point of the proc file system.
    """
    sizes = [group.available() for group in memory_groups(proc)]
    for line in _lines(f"{proc}/meminfo"):
        name, _, size = line.partition(":")
        if name == "MemAvailable" and (number := size.split()[:1]) and number[0].isdigit():
            sizes.append(int(number[0]) * 1024)
    return min((size for size in sizes if size is not None), default=math.inf)


def numbered_line(path: str, name: str) -> int | None:
    """Returns the number after a name, in a file with lines "name number"; None if there is none."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None


def _group_paths(file: str) -> dict[str, str]:
    """Reads /proc/self/cgroup: the group's path by controller; the controller of version 2 is ""."""
    paths: dict[str, str] = {}
    for line in _lines(file):
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _mounts(file: str, kind: str) -> Iterator[tuple[str, str]]:
    """Reads /proc/self/mountinfo: root and mount point of the mounts of one kind."""
    for line in _lines(file):
        mount, _, system = line.partition(" - ")
        fields = mount.split()
        if len(fields) >= 5 and system.split()[:1] == [kind]:
            yield _unescaped(fields[3]), _unescaped(fields[4])


def _upwards(root: str, mount_point: str, path: str) -> list[str]:
    """Returns the directories of a group and its parents, as far as they are mounted here."""
    # In a container only a part of the hierarchy may be mounted, and the path may be outside of it.
    is_inside = ".." not in path.split("/") and f"{path}/".startswith(f"{root.rstrip('/')}/")
    names = [name for name in path[len(root.rstrip("/")) :].split("/") if name] if is_inside else []
    return ["/".join((mount_point.rstrip("/"), *names[:depth])) for depth in range(len(names), -1, -1)]


def _unescaped(field: str) -> str:
    """Returns a path without the kernel's octal escapes for blanks."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _number(path: str) -> int | None:
    """Reads a file with a single number; None for "max", which is no limit in version 2."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


# -- Network: only for launchers, and ranks on several machines ------------------------------------------------------


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with an address, e.g. "eth0"; None if no interface has it.

    Args:
        address: a numeric IPv4 or IPv6 address.
    """
    import ipaddress

    wanted = ipaddress.ip_address(address.partition("%")[0])
    mapped = wanted.ipv4_mapped if isinstance(wanted, ipaddress.IPv6Address) else None
    wanted = mapped or wanted
    for name, found in addresses():
        if found == wanted.packed:
            return name
    return "lo" if wanted.is_loopback else None  # "lo" has all addresses of 127.0.0.0/8


def address_towards(host: str, port: int) -> str | None:
    """Returns the address from which this machine reaches a host, which may be itself; None if there is no route.

    No data is sent: the kernel only looks up the route.

    Args:
        host: the host's name or address.
        port: a port of the host.
    """
    import socket

    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # no address or no route, or an invalid name
        return None


def own_addresses() -> list[str]:
    """Returns the numeric addresses at which other machines may reach this one, IPv4 first.

    Loopback and link-local addresses and those of container bridges are left out: they are equal on many machines.
    """
    import ipaddress

    found = [(name, ipaddress.ip_address(packed)) for name, packed in addresses()]
    usable = [
        address
        for name, address in found
        if not address.is_loopback and not address.is_link_local and not name.startswith(_OF_CONTAINERS)
    ]
    return [str(address) for address in sorted(usable, key=lambda address: address.version)]


def addresses() -> Iterator[tuple[str, bytes]]:
    """Yields this machine's addresses as (name of the interface, packed address); none if the kernel gives none."""
    import fcntl
    import socket
    import struct
    from array import array

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as kernel:
        records = array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
        request = bytearray(struct.pack("iP", len(records), records.buffer_info()[0]))
        fcntl.ioctl(kernel, _SIOCGIFCONF, request)
        for at in range(0, struct.unpack_from("i", request)[0], _IFREQ_BYTES):
            name, packed = struct.unpack_from("16s4x4s", records, at)
            yield name.partition(b"\0")[0].decode().partition(":")[0], packed  # an alias is called "eth0:1"
    for line in _lines("/proc/net/if_inet6"):
        address, *_, name = line.split()
        yield name, bytes.fromhex(address)

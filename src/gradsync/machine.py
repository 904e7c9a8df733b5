"""This machine: its identity, its processes, cores, GPUs, memory and network addresses; calls that may hang, and waits
that Ctrl-C may cut off.
"""

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

#: How libraries of linear algebra learn how many threads to start.
BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_LOOK_EVERY_SECONDS = 0.02
# Source: include/uapi/linux/netlink.h, rtnetlink.h and if_addr.h.
_HEADER = "=IHHII"  # length, type, flags, sequence, port
_ADDRESS = "=BBBBI"  # family, prefix length, flags, scope, index of the interface
_ATTRIBUTE = "=HH"  # length, type
_NEW_ADDRESS, _GET_ADDRESS, _DONE, _ERROR = 20, 22, 3, 2
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP: all of them
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_READ_BYTES = 65536
_OF_CONTAINERS = ("docker", "br-", "virbr", "cni", "flannel", "veth", "podman")

_Result = TypeVar("_Result")


# -- Processes --------------------------------------------------------------------------------------------------------


class ProcessStat(NamedTuple):
    """What /proc says of a process.

    Attributes:
        state: one letter: "R" runs, "S" sleeps, "T" is stopped, "Z" has ended and was not waited for.
        parent: its parent's pid; 0: none in this pid namespace.
        start_time: in clock ticks since the boot; tells it from an earlier process of that pid.
    """

    state: str
    parent: int
    start_time: str


def read_stat(pid: int) -> ProcessStat | None:
    """Returns what /proc says of a process; None where there is none, or /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
        return ProcessStat(fields[0].decode(), int(fields[1]), fields[19].decode())
    except (OSError, IndexError):
        return None


def boot_id() -> str:
    """Returns an id that differs between hosts of one name; "" where the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_identity() -> str:
    """Returns a text that is equal for two processes that see each other's pids; "" where that cannot be known.

    A container has the boot id of its host, and pids of its own: so the pid namespace is part of it.
    """
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


class Latch:
    """Something that threads wait for, and that may come and go.

    Not an Event: the lock inside one stays taken where Ctrl-C comes as a wait begins, and then the thread that is to
    set it waits for ever. Here each wait has a lock of its own.
    """

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set
        self._waiting: list[threading.Lock] = []

    def set(self) -> None:
        """Lets all threads go on that wait."""
        self.is_set = True
        with contextlib.suppress(IndexError):  # none is left
            while True:
                self._waiting.pop().release()

    def clear(self) -> None:
        """Lets threads wait from now on."""
        self.is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is set, for so many seconds at most; returns whether it was."""
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
    """Calls a function that may hang in C, on a daemon thread, which is left behind where it does.

    Args:
        function: what to call.
        name: of the thread.
        seconds: the deadline.
        check: called while waiting; what it raises ends the wait.

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
    """Returns the thread-count variables that keep `n_processes` ranks from fighting for the cores.

    Args:
        n_processes: number of ranks that share this machine.
        environ: the variables; those that the user has set already are left alone.

    Returns:
        The variables to add, each with max(1, usable cores // n_processes).
    """
    threads = str(max(1, usable_cores() // max(1, n_processes)))
    return {name: threads for name in BLAS_VARIABLES if name not in environ}


def begin_on_core(number: int) -> None:
    """Moves the calling thread to one of the cores it may use, and lets it go from there.

    Ranks that started together often share a core. Where every core has something else to do, the kernel leaves them
    there: each collective then waits for another rank's turn, 26 us instead of 5 for 4 KB on two ranks.

    Args:
        number: of the rank on this machine; counts round where there are fewer cores.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(usable)[number % len(usable)]})
        os.sched_setaffinity(0, usable)


def count_gpus(environ: Mapping[str, str] = os.environ, device_folder: str = "/dev") -> int:
    """Returns how many NVIDIA GPUs a process started from here may use, without touching CUDA.

    Args:
        environ: the variables; CUDA_VISIBLE_DEVICES limits the count.
        device_folder: where the driver puts its device files.
    """
    try:
        present = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(device_folder))
    except OSError:
        present = 0
    visible = visible_gpus(environ)
    return present if visible is None or present == 0 else len(visible)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, or None where it is not set."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = []
    for entry in map(str.strip, visible.split(",")):
        # CUDA stops at the first entry that is no device.
        if entry in ("", "-1", "NoDevFiles"):
            break
        names.append(entry)
    return tuple(names)


def default_process_count(device_type: str = "auto") -> int:
    """Returns one process per visible GPU, or per usable core where there is no GPU.

    Args:
        device_type: "auto", "cpu" (cores) or "gpu".

    Raises:
        BackendUnavailable: "gpu", and there is none.
    """
    gpus = 0 if device_type == "cpu" else count_gpus()
    if device_type == "gpu" and gpus == 0:
        raise BackendUnavailable("device_type 'gpu' needs a visible NVIDIA GPU, found none")
    return gpus or usable_cores()


# -- Memory -----------------------------------------------------------------------------------------------------------


class MemoryGroup(NamedTuple):
    """A memory control group. What cannot be read of it is None. The counts have those of the groups inside it in them.

    Attributes:
        directory: where its files are.
        is_v1: whether these are those of version 1.
    """

    directory: str
    is_v1: bool

    def kills(self) -> int | None:
        """Returns how many of its processes the kernel has ended for want of memory."""
        return numbered_line(f"{self.directory}/{'memory.oom_control' if self.is_v1 else 'memory.events'}", "oom_kill")

    def limit_hits(self) -> int | None:
        """Returns how often its limit stood in the way."""
        if self.is_v1:
            return _number(f"{self.directory}/memory.failcnt")
        return numbered_line(f"{self.directory}/memory.events", "oom")

    def limit(self) -> int | None:
        """Returns its limit in bytes, where it has one."""
        limit = _number(f"{self.directory}/{'memory.limit_in_bytes' if self.is_v1 else 'memory.max'}")
        return None if limit is None or limit >= 1 << 60 else limit  # near 2**63 says "none" in version 1

    def available(self) -> int | None:
        """Returns how many bytes its processes can still take, where it has a limit."""
        limit = self.limit()
        used = _number(f"{self.directory}/{'memory.usage_in_bytes' if self.is_v1 else 'memory.current'}")
        if limit is None or used is None:
            return None
        # Of files that nobody has used lately; the kernel drops them first.
        cached = numbered_line(
            f"{self.directory}/memory.stat", "total_inactive_file" if self.is_v1 else "inactive_file"
        )
        return max(0, limit - used + (cached or 0))


def memory_groups(proc: str = "/proc") -> list[MemoryGroup]:
    """Returns this process's memory control group and those above it, innermost first.

    Args:
        proc: where the proc file system is mounted.
    """
    paths = _group_paths(f"{proc}/self/cgroup")
    for kind, path in (("cgroup", paths.get("memory")), ("cgroup2", paths.get(""))):
        if path is None:
            continue
        for root, mount_point in _mounts(f"{proc}/self/mountinfo", kind):
            groups = [MemoryGroup(directory, kind == "cgroup") for directory in _upwards(root, mount_point, path)]
            # Other controllers' hierarchies have no such files, nor have groups whose parents keep the controller.
            if groups := [group for group in groups if group.kills() is not None]:
                return groups
    return []


def available_memory_bytes(proc: str = "/proc") -> float:
    """Returns what can be allocated without swapping, and within the limits of the control groups, as the kernel says.

    Infinity where it says nothing. Beyond it the kernel does not refuse memory but ends the process that touches it.

    Args:
        proc: where the proc file system is mounted.
    """
    sizes = [group.available() for group in memory_groups(proc)]
    for line in _lines(f"{proc}/meminfo"):
        name, _, size = line.partition(":")
        if name == "MemAvailable" and (number := size.split()[:1]) and number[0].isdigit():
            sizes.append(int(number[0]) * 1024)
    return min((size for size in sizes if size is not None), default=math.inf)


def numbered_line(path: str, name: str) -> int | None:
    """Returns the number behind a name in a file with lines of both; None where there is none."""
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None


def _group_paths(file: str) -> dict[str, str]:
    """Reads /proc/self/cgroup: the path in each hierarchy by controller; version 2 has the controller ""."""
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
    """Returns the directory of a group and those above it, as far as they are mounted here."""
    # In a container the mount may show a part of the hierarchy only, and the path may lead out of it.
    is_inside = ".." not in path.split("/") and f"{path}/".startswith(f"{root.rstrip('/')}/")
    names = [name for name in path[len(root.rstrip("/")) :].split("/") if name] if is_inside else []
    return ["/".join((mount_point.rstrip("/"), *names[:depth])) for depth in range(len(names), -1, -1)]


def _unescaped(field: str) -> str:
    """Undoes the kernel's way to write blanks in paths."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _number(path: str) -> int | None:
    """Reads a file with a number alone; version 2 writes "max" for no limit."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


# -- Network: only launchers and ranks of several machines come here -------------------------------------------------


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has an address, e.g. "eth0"; None where no interface has it.

    Args:
        address: IPv4 or IPv6, in figures.
    """
    import ipaddress
    import socket

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
    import socket

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
    import ipaddress
    import socket

    found = [(socket.if_indextoname(index), ipaddress.ip_address(packed)) for index, packed in addresses()]
    usable = [
        address
        for name, address in found
        if not address.is_loopback and not address.is_link_local and not name.startswith(_OF_CONTAINERS)
    ]
    return [str(address) for address in sorted(usable, key=lambda address: address.version)]


def addresses() -> Iterator[tuple[int, bytes]]:
    """Yields this machine's addresses, each after the index of its interface; none where the kernel does not say."""
    import socket
    import struct

    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(5.0)
            size = struct.calcsize(_HEADER) + struct.calcsize(_ADDRESS)
            request = struct.pack(_HEADER, size, _GET_ADDRESS, _REQUEST_DUMP, 1, 0)
            kernel.send(request + struct.pack(_ADDRESS, 0, 0, 0, 0, 0))
            while True:
                for (_, kind, *_), body in _records(kernel.recv(_READ_BYTES), _HEADER):
                    if kind in (_DONE, _ERROR):
                        return
                    if kind == _NEW_ADDRESS:
                        *_, index = struct.unpack_from(_ADDRESS, body)
                        attributes = _records(body[struct.calcsize(_ADDRESS) :], _ATTRIBUTE)
                        found = {which: value for (_, which), value in attributes}
                        # Of a point-to-point connection, the address of this end.
                        address = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
                        if address is not None:
                            yield index, address
    except OSError:
        return


def _records(data: bytes, header: str) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yields header and body of each record of a netlink message; each begins with its length, padded to 4 bytes."""
    import struct

    size = struct.calcsize(header)
    while len(data) >= size:
        fields = struct.unpack_from(header, data)
        if fields[0] < size:
            return
        yield fields, data[size : fields[0]]
        data = data[(fields[0] + 3) & ~3 :]

"""This machine: its identity, processes, cores, GPUs, memory and addresses.

And run_with_timeout(), for functions that may hang, and Latch, a flag for which threads can wait.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gradsync.errors import BackendUnavailable, InvalidArgument

if TYPE_CHECKING:
    import socket

#: The variables that set the number of threads of linear algebra libraries.
BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_ANY_PORT = 9  # no data is sent to this port
_MOST_OWN_ADDRESSES = 8  # ranks tell each other theirs
_CHECK_EVERY_SECONDS = 0.02
# Source: netdevice(7) on SIOCGIFCONF. _IFREQ_BYTES is the size of struct ifreq on 64-bit Linux.
_SIOCGIFCONF, _IFREQ_BYTES, _MOST_ADDRESSES = 0x8912, 40, 1000
_OF_CONTAINERS = ("docker", "br-", "virbr", "cni", "flannel", "veth", "podman")

_Result = TypeVar("_Result")


# -- Processes --------------------------------------------------------------------------------------------------------


class ProcessStat(NamedTuple):
    """A process's entry in /proc.

    Attributes:
        state: a letter, such as "R" for running, "S" for sleeping, "T" for stopped, and "Z" for one that has ended and
            whose parent has not waited for it.
        parent: the parent's pid; 0 if it is not in this pid namespace.
        start_time: when it started, in clock ticks since the boot: another for each process that has had this pid.
    """

    state: str
    parent: int
    start_time: str


def read_stat(pid: int) -> ProcessStat | None:
    """Returns a process's entry in /proc; None if there is none, or /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before ")" may have any character
        return ProcessStat(fields[0].decode(), int(fields[1]), fields[19].decode())
    except (OSError, IndexError):
        return None


def current_folder() -> str:
    """Returns the path of the current directory.

    Raises:
        InvalidArgument: the directory has been removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InvalidArgument("the current directory has been removed; change to one that exists (cd)") from None


def boot_id() -> str:
    """Returns the kernel's boot id, which differs between any two hosts and boots; "" if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine_identity() -> str:
    """Returns text that is the same for all processes in one pid namespace of this machine; "" if unknown.

    A container has the boot id of its host, but may have pids of its own.
    """
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


class Latch:
    """A flag for which threads can wait. Any thread can set or clear it.

    To set it never waits. To set a threading.Event may wait for ever: if Ctrl-C comes as a wait for the Event begins,
    its inner lock may stay held. Here each wait has a lock of its own.
    """

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set
        self._waiting: list[threading.Lock] = []

    def set(self) -> None:
        """Sets the flag, and wakes all waiting threads."""
        self.is_set = True
        with contextlib.suppress(IndexError):  # nobody waits any more
            while True:
                self._waiting.pop().release()

    def clear(self) -> None:
        """Clears the flag."""
        self.is_set = False

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the flag is set; returns False if it is not within `seconds`."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting.append(waiting)
        limit = -1 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        # The flag after the lock: set() first sets the flag, and then releases the locks.
        was_set = self.is_set or waiting.acquire(timeout=limit)
        with contextlib.suppress(ValueError):
            self._waiting.remove(waiting)
        return was_set or self.is_set


HOW_TO_RAISE_THE_LIMIT = "raise the limit of processes and threads (ulimit -u; in a container, the pids limit)"


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread.

    Raises:
        BackendUnavailable: the system allows no more threads.
    """
    try:
        thread.start()
    except RuntimeError:
        raise BackendUnavailable(f"the thread {thread.name!r} cannot be started; {HOW_TO_RAISE_THE_LIMIT}") from None


def run_with_timeout(
    function: Callable[[], _Result], name: str, seconds: float, check: Callable[[], None] | None = None
) -> _Result:
    """Returns what a function returns that may hang in C: on a daemon thread, which is abandoned at a deadline.

    Args:
        function: what to call.
        name: the thread's name.
        seconds: how long it may take.
        check: called again and again meanwhile. If it raises, the wait ends.

    Raises:
        TimeoutError: the function did not return in time.
        BaseException: what the function or `check` raised.
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
    start_thread(threading.Thread(target=run, name=name, daemon=True))
    while not ended.wait(_CHECK_EVERY_SECONDS):
        if check is not None:
            check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{name} did not return within {seconds:g} s")
    if errors:
        raise errors[0]
    return outcome[0]


# -- Cores and GPUs ---------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Returns how many cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def blas_thread_variables(n_processes: int) -> dict[str, str]:
    """Returns environment variables that divide the cores among the linear algebra threads of `n_processes` ranks.

    Each has the value of OMP_NUM_THREADS if the user has set it, since every library follows it where it has no
    variable of its own; else max(1, usable cores // n_processes).
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal():  # not set, or a list, which only OpenMP knows
        threads = str(max(1, usable_cores() // n_processes))
    return dict.fromkeys(BLAS_VARIABLES, threads)


def begin_on_core(number: int) -> None:
    """Moves the calling thread to one of its allowed cores, and then allows all of them again.

    Ranks that start together often share a core, and the kernel does not move them while every core is busy. Each
    collective then waits for the kernel to schedule the other rank: one of 4 KB on two ranks took 26 us on one core,
    and 5 us on two.

    Args:
        number: the local rank, which says which core it is; after the last one comes the first again.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {sorted(usable)[number % len(usable)]})
        os.sched_setaffinity(0, usable)


def count_gpus(environ: Mapping[str, str] = os.environ, device_folder: str = "/dev") -> int:
    """Returns how many NVIDIA GPUs a process with this environment may use. Does not initialise CUDA.

    If the machine has one, those that CUDA_VISIBLE_DEVICES names count, whether they exist or not.

    Args:
        environ: the variables of that process.
        device_folder: where the driver's device files are.
    """
    try:
        present = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(device_folder))
    except OSError:
        present = 0
    visible = visible_gpus(environ)
    return present if visible is None or present == 0 else len(visible)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, up to the first that is invalid; None if it is not set."""
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
    """Returns the default number of ranks: of visible GPUs, or of usable cores if there is no GPU.

    Args:
        device_type: "cpu" counts cores, "gpu" GPUs, and "auto" cores only if there is no GPU.

    Raises:
        BackendUnavailable: device_type is "gpu", and there is no GPU.
    """
    gpus = 0 if device_type == "cpu" else count_gpus()
    if device_type == "gpu" and gpus == 0:
        raise BackendUnavailable("device_type 'gpu' needs a visible NVIDIA GPU, found none")
    return gpus or usable_cores()


# -- Memory -----------------------------------------------------------------------------------------------------------


def memory_groups(root: str = "") -> list[str]:
    """Returns the folders of this process's memory control group (cgroup v2) and of its parents, innermost first.

    Args:
        root: a folder that tests use instead of "/".
    """
    own = next((line[3:] for line in _lines(f"{root}/proc/self/cgroup") if line.startswith("0::")), "")
    # In a container the path may begin with names of the host that it does not see. Then only the folder itself has
    # files, which are of the container's group.
    names = [name for name in own.split("/") if name]
    folders = ["/".join((f"{root}/sys/fs/cgroup", *names[:depth])) for depth in range(len(names), -1, -1)]
    return [folder for folder in folders if _lines(f"{folder}/memory.max")]


def available_memory_bytes(root: str = "") -> float:
    """Returns an estimate of the bytes that this process can allocate without swapping, within the limits of cgroups.

    Infinity if there is none. By default the kernel does not refuse more, but may kill a process that uses it.

    Args:
        root: a folder that tests use instead of "/".
    """
    free_kb = numbered_line(f"{root}/proc/meminfo", "MemAvailable:")
    sizes = [math.inf if free_kb is None else free_kb * 1024, *map(_left_in, memory_groups(root))]
    return min(sizes)


def _left_in(group: str) -> float:
    """Returns the bytes that are left to a control group's processes; infinity without a limit."""
    limit, used = (_lines(f"{group}/{name}") for name in ("memory.max", "memory.current"))
    if not (limit and used and limit[0].isdigit() and used[0].isdigit()):
        return math.inf
    # Files that were not used recently: the kernel drops their copies in memory first.
    dropped = numbered_line(f"{group}/memory.stat", "inactive_file") or 0
    return max(0, int(limit[0]) - int(used[0]) + dropped)


def numbered_line(path: str, name: str) -> int | None:
    """Returns the number after a name, in a file with lines "name number"; None if the file has no such line."""
    for line in _lines(path):
        key, number, *_ = [*line.split(), "", ""]
        if key == name and number.isdigit():
            return int(number)
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError:
        return []


# -- Network: only for launchers, and ranks on several machines ------------------------------------------------------

_MOST_RESERVATIONS = 64
# Descriptors: Python would print a warning for each socket object that is still open at exit.
_reservations: deque[int] = deque()


def free_port() -> int:
    """Returns a TCP port that is not in use, for a server on any interface of this machine.

    This process keeps a socket bound to each of its 64 newest ports, so that the kernel gives them to nobody who asks
    for any free port. A server can bind the port all the same if it sets SO_REUSEADDR, as nearly all do (socketserver
    only with `allow_reuse_address`). Another program may still ask for this very number, and once this process has
    ended nothing keeps the port.

    Raises:
        OSError: no port is free, or too many files are open.
    """
    reservation = reserve_port()
    port: int = reservation.getsockname()[1]
    _reservations.append(reservation.detach())
    if len(_reservations) > _MOST_RESERVATIONS:
        os.close(_reservations.popleft())
    return port


def reserve_port() -> socket.socket:
    """Returns a socket that keeps a free port until it is closed; it does not listen."""
    import socket

    has_ipv6 = socket.has_dualstack_ipv6()
    reservation = socket.socket(socket.AF_INET6 if has_ipv6 else socket.AF_INET)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if has_ipv6:
            reservation.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # the port is free in IPv4 too
        reservation.bind(("", 0))
    except OSError:
        reservation.close()
        raise
    return reservation


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with an address, such as "eth0"; None if none has it.

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
    """Returns this machine's own address on the route to a host, which may be this machine; None without a route.

    Nothing is sent: the kernel knows.

    Args:
        host, port: the host's name or address, and any port.
    """
    import socket

    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # no address or no route, or an invalid name
        return None


def address_for_others(label: str, addresses: Sequence[Sequence[str]], advice: str = "") -> str:
    """Returns the one of this machine's addresses from which it sends to the other machines of a job.

    Args:
        label: this rank, for the error.
        addresses: those of each rank's machine; the first are this machine's.
        advice: the end of the error.

    Raises:
        BackendUnavailable: there is no route to any of them.
    """
    mine = addresses[0]
    others = [each for each in dict.fromkeys(chain.from_iterable(addresses)) if each not in mine]
    for other in others:
        if (address := address_towards(other, _ANY_PORT)) is not None and address in mine:
            return address
    raise BackendUnavailable(
        f"{label}: this machine ({', '.join(mine) or 'no address'}) has no route to the other machines of the job "
        f"({', '.join(others) or 'no addresses'}){advice}"
    )


def own_addresses() -> list[str]:
    """Returns the numeric addresses at which other machines may reach this machine, at most eight, IPv4 first.

    The list leaves out loopback addresses, link-local addresses and addresses of container bridges, because many
    machines have the same addresses of these kinds.
    """
    import ipaddress

    found = [(name, ipaddress.ip_address(packed)) for name, packed in addresses()]
    usable = [
        address
        for name, address in found
        if not address.is_loopback and not address.is_link_local and not name.startswith(_OF_CONTAINERS)
    ]
    return [str(address) for address in sorted(usable, key=lambda address: address.version)[:_MOST_OWN_ADDRESSES]]


def addresses() -> Iterator[tuple[str, bytes]]:
    """Yields this machine's addresses as pairs (name of the interface, packed address), if the kernel gives any."""
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
            yield name.partition(b"\0")[0].decode().partition(":")[0], packed  # "eth0:1" is an alias of eth0
    for line in _lines("/proc/net/if_inet6"):
        address, *_, name = line.split()
        yield name, bytes.fromhex(address)


# -- What a Python lacks that was built on an old system, as those of conda and older ones of uv -----------------------


def memory_file(name: str, *, can_be_sealed: bool = False) -> int:
    """Makes an anonymous file in memory (memfd), which programs that this process starts do not inherit.

    Raises:
        OSError: the system has none, or forbids it.
    """
    flags = 1 | 2 * can_be_sealed  # MFD_CLOEXEC and MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _call_libc("memfd_create", name.encode(), flags)


def open_process(pid: int) -> int:
    """Returns a descriptor that is readable once a process has ended (pidfd); -1 before Linux 5.3.

    Raises:
        OSError: there is no such process, or this process may open no more files.
    """
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        return _call_libc("syscall", 434, pid, 0)  # the number of pidfd_open, on every processor
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):  # containers forbid unknown calls
            return -1
        raise


def _call_libc(function: str, *arguments: int | bytes) -> int:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, function):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), function)
    result: int = getattr(library, function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), function)
    return result

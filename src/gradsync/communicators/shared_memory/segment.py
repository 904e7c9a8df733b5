"""The memory of the ranks of one host: an anonymous memfd, which all of them open.

A memfd has no name, so nothing remains after all processes were killed, and /dev/shm does not limit it. The first rank
creates it. The others open it through the first rank's folder in /proc, which the kernel permits to processes of the
same user, and check that it is what the first rank's ticket says. The ticket comes through the authenticated
rendezvous. Source: UCX shares memory in the same way, see its option UCX_POSIX_USE_PROC_LINK.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import sys
from collections.abc import Sequence

from gradsync.communicators.shared_memory.compiled import Kernels
from gradsync.environment import PLAIN_KERNELS
from gradsync.errors import BackendUnavailable, RankFailed
from gradsync.machine import available_memory_bytes, machine_identity, memory_file, read_stat
from gradsync.rendezvous.client import RendezvousClient

_NAME = "gradsync"
# From Linux's mman.h and fcntl.h: Python has not the first, and not the others if it was built on an old system.
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_MAX_REASON_BYTES = 500  # the server limits what all ranks together send in an exchange
_MAX_PATH_BYTES = 200  # of a longer path, the end
_END = b"\0"
# What platform.machine() says where stores are seen in their order, and where only the kernels in C see to that.
_ORDERED, _ORDERED_IN_C = ("x86_64", "AMD64"), ("aarch64",)


def share_memory(
    client: RendezvousClient, key: str, part_bytes: int, kernels: Kernels, timeout_seconds: float
) -> mmap.mmap:
    """Returns memory with a part for each member of the client. Every member must call this function.

    Each rank allocates its own part, which then lies on its NUMA node. All ranks say so before any of them writes: a
    write would allocate the page, and kill the process (SIGBUS) if there is no memory.

    Args:
        client: this rank's client of the rendezvous server.
        key: a name that no earlier call of this generation has used.
        part_bytes: the size of each part, in whole pages; the same on all ranks.
        kernels: those that this rank runs.
        timeout_seconds: how long this rank waits for the others, twice.

    Raises:
        BackendUnavailable: this rank cannot make, open, allocate or map the memory; or the ranks run different kernels,
            which all of them raise.
        RankFailed: another rank cannot, or died.
        RendezvousTimeout: another rank did not come in time.
        CollectiveTimeout, RendezvousError: the world has failed, or the connection to the server was lost.
    """
    rank, refusal = client.rank, None
    with contextlib.ExitStack() as closing:  # the first rank's descriptor stays open until all have opened it
        ticket = b""
        try:
            if rank == 0:
                descriptor = create_segment(client.world_size * part_bytes)
                closing.callback(os.close, descriptor)
                ticket = _ticket_of(descriptor)
        except BackendUnavailable as error:
            refusal = error
        tickets = client.exchange(f"{key}/ticket", _sign(kernels) + ticket, timeout_seconds=timeout_seconds)
        _check_kernels(client, tickets)
        ticket = tickets[0].partition(_END)[2]
        try:
            if ticket and rank > 0:
                descriptor = _open_segment(ticket)
                closing.callback(os.close, descriptor)
            if ticket:
                _allocate(descriptor, rank * part_bytes, part_bytes)
                mapping = _map(descriptor)
        except BackendUnavailable as error:
            refusal = error
        reason = str(refusal or "").encode()[:_MAX_REASON_BYTES]
        reasons = client.exchange(f"{key}/ready", reason, timeout_seconds=timeout_seconds)
    if any(reasons) and rank > 0 and ticket and _has_ended(ticket):  # that is why, though nobody has told yet
        number = client.world_ranks[0]
        raise RankFailed(f"{client.label}: rank {number} died while the ranks connected", rank=number, phase="joining")
    if refusal is not None:
        raise refusal
    for other, reason in enumerate(reasons):
        if reason:
            number, text = client.world_ranks[other], reason.decode(errors="replace")
            raise RankFailed(f"{client.label}: rank {number} cannot share memory: {text}", rank=number, phase="joining")
    with contextlib.suppress(OSError):  # Linux before 5.14: the pages are mapped at their first use, which is slower
        mapping.madvise(_MADV_POPULATE_WRITE)
    return mapping


def _sign(kernels: Kernels) -> bytes:
    """Returns what a ticket begins with: the kernels that the rank runs."""
    return f"{kernels.kind} {kernels.layout} ".encode() + kernels.file.encode()[-_MAX_PATH_BYTES:] + _END


def _check_kernels(client: RendezvousClient, tickets: Sequence[bytes]) -> None:
    """Checks that all ranks run the same kernels: others expect other things of the memory.

    Raises:
        BackendUnavailable: they do not; all ranks raise this error.
    """
    signed = [ticket.partition(_END)[0].decode(errors="replace").split(" ", 2) for ticket in tickets]
    running = [Kernels(kind, int(layout), file) for kind, layout, file in signed]
    for number, other in zip(client.world_ranks, running, strict=True):
        if other[:2] != running[0][:2]:
            raise BackendUnavailable(
                f"{client.label}: all ranks need the same kernels for shared memory: rank {client.world_ranks[0]} runs "
                f"{running[0]}, and rank {number} {other}: install the same gradsync for all ranks, with or without a "
                f"C compiler; {PLAIN_KERNELS}=1 on all ranks makes all run those in NumPy"
            )


def create_segment(size_bytes: int) -> int:
    """Makes shared memory of zeros, none of it allocated yet, and returns its file descriptor.

    Raises:
        BackendUnavailable: the kernel has no memfd, or there is not enough memory.
    """
    _check_available(size_bytes)
    try:
        descriptor = memory_file(_NAME, can_be_sealed=True)
    except OSError as error:
        raise BackendUnavailable(f"shared memory needs memfd_create (Linux 3.17 or newer): {error}") from error
    try:
        os.ftruncate(descriptor, size_bytes)
        # If a peer truncated the memory, the other processes would be killed by SIGBUS.
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError as error:
        os.close(descriptor)
        raise _cannot_allocate(size_bytes, error) from error
    return descriptor


def check_allocation(size_bytes: int) -> None:
    """Raises BackendUnavailable if this process cannot allocate shared memory of this size now."""
    descriptor = create_segment(size_bytes)
    try:
        _allocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, begin: int, size_bytes: int) -> None:
    """Allocates a part, on the NUMA node of the calling thread."""
    _check_available(size_bytes)
    try:
        os.posix_fallocate(descriptor, begin, size_bytes)
    except OSError as error:
        raise _cannot_allocate(size_bytes, error) from error


def _check_available(size_bytes: int) -> None:
    """Asks the kernel's estimate first: if shared memory uses up all memory, the kernel kills processes."""
    available_bytes = available_memory_bytes()
    if size_bytes > available_bytes:
        raise BackendUnavailable(
            f"cannot allocate {size_bytes} bytes of shared memory: {available_bytes} bytes are available"
        )


def _cannot_allocate(size_bytes: int, error: OSError) -> BackendUnavailable:
    kind = "there is not enough memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
    return BackendUnavailable(f"cannot allocate {size_bytes} bytes of shared memory: {kind}")


def _map(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
    except OSError as error:  # the address space has no room
        raise BackendUnavailable(f"cannot map the shared memory: {error}") from error


def _identity(descriptor: int) -> str:
    """Returns what no other open file has at this time: the name, device, inode and size."""
    found = os.fstat(descriptor)
    return f"{os.readlink(f'/proc/self/fd/{descriptor}')} {found.st_dev} {found.st_ino} {found.st_size}"


def _ticket_of(descriptor: int) -> bytes:
    """Returns the text from which `_open_segment` finds a segment of this process."""
    try:
        _check_proc()
        identity = _identity(descriptor)
    except OSError as error:
        raise _cannot_open(error) from error
    return f"{machine_identity()}\n{os.getpid()}\n{descriptor}\n{identity}".encode()


def _open_segment(ticket: bytes) -> int:
    """Opens the segment of another process, and returns this process's file descriptor.

    Raises:
        BackendUnavailable: the other process is not on this host, does not see the same processes, is gone, or belongs
            to a different user.
    """
    machine, pid, number, identity = ticket.decode().split("\n")
    try:
        if not machine or machine != machine_identity():
            raise OSError("that rank runs on another host, or in a container that hides its processes")
        _check_proc()
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if _identity(descriptor) != identity:
                raise OSError(f"/proc/{pid}/fd/{number} is another file than that of the first rank")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    except OSError as error:
        raise _cannot_open(error) from error


def _has_ended(ticket: bytes) -> bool:
    """Whether the process of this machine that a ticket is of has ended."""
    machine, pid, *_ = ticket.decode().split("\n")
    stat = read_stat(int(pid))
    return machine == machine_identity() and (stat is None or stat.state in "ZX")


def _check_proc() -> None:
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("the /proc of this process belongs to another pid namespace")


def _cannot_open(error: OSError) -> BackendUnavailable:
    return BackendUnavailable(
        "shared memory needs all ranks on one host, in one pid namespace with its own /proc (of Docker containers: "
        f"--pid=host); the memory of the first rank of this group cannot be opened from here: {error}"
    )


def check_platform(kernels: Kernels, machine: str | None = None) -> None:
    """Checks that the others see what a rank writes in order: on x86-64 they do, on aarch64 the kernels in C see to it.

    Args:
        kernels: those that this rank runs.
        machine: the processor, as platform.machine() names it; without it, this machine's.

    Raises:
        BackendUnavailable: this machine does not run Linux on such a processor, or lacks the kernels that it needs.
    """
    machine = machine or platform.machine()
    if sys.platform != "linux" or machine not in (*_ORDERED, *_ORDERED_IN_C):
        raise BackendUnavailable(f"shared memory needs Linux on x86-64 or aarch64, this is {sys.platform} on {machine}")
    if machine in _ORDERED_IN_C and kernels.kind != "C":
        raise BackendUnavailable(
            f"shared memory on {machine} needs gradsync's kernels in C: {kernels.why_plain}: {kernels.remedy}"
        )

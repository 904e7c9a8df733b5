"""The shared memory of the ranks on one host: an anonymous memfd, which all ranks open.

A memfd has no name, so nothing remains after all processes were killed. A small /dev/shm does not limit the size of a
memfd. The first rank creates the memfd. The other ranks open the memfd through the first rank's folder in /proc. The
kernel permits this to processes of the same user, and to privileged processes. The first rank sends the number of the
file descriptor through the authenticated rendezvous. Source: UCX shares memory in the same way, see its option
UCX_POSIX_USE_PROC_LINK.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import sys
from collections.abc import Callable

from gradsync.errors import BackendUnavailable
from gradsync.machine import available_memory_bytes, machine_identity

_MADV_POPULATE_WRITE = 23  # from Linux's mman.h; not in Python's mmap


def create_segment(size_bytes: int) -> int:
    """Makes shared memory that is filled with zeros, and returns its file descriptor.

    The memory is allocated before its first use, so that a lack of memory is an error, and not a SIGBUS at the first
    access. /dev/shm does not limit the size of a memfd, and if a memfd uses all memory, the kernel kills processes. So
    _reserve() first checks the kernel's estimate of the available memory.

    Args:
        size_bytes: the size of the memory in bytes.

    Raises:
        BackendUnavailable: the kernel has no memfd, or there is not enough memory.
    """
    try:
        descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise BackendUnavailable(f"shared memory needs memfd_create (Linux 3.17 or newer): {error}") from error
    try:
        os.ftruncate(descriptor, size_bytes)
        _reserve(descriptor, size_bytes)
        # If a peer truncated the memory, the other processes would be killed by SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise _cannot_allocate(size_bytes, error) from error
    except BackendUnavailable:
        os.close(descriptor)
        raise
    return descriptor


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Allocates a segment, but does not create its page table entries.

    Raises:
        BackendUnavailable: there is not enough memory.
    """
    _check_available(size_bytes)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise _cannot_allocate(size_bytes, error) from error


def _check_available(size_bytes: int) -> None:
    available_bytes = available_memory_bytes()
    if size_bytes > available_bytes:
        raise BackendUnavailable(
            f"cannot allocate {size_bytes} bytes of shared memory: {available_bytes} bytes are available"
        )


def _cannot_allocate(size_bytes: int, error: OSError) -> BackendUnavailable:
    kind = "there is not enough memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
    return BackendUnavailable(f"cannot allocate {size_bytes} bytes of shared memory: {kind}")


def map_segment(descriptor: int) -> mmap.mmap:
    """Maps the whole segment for reading and writing, and closes the descriptor.

    Args:
        descriptor: the segment's file descriptor.

    Raises:
        BackendUnavailable: the address space of this process has no room for the segment.
    """
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise BackendUnavailable(f"cannot map the shared memory: {error}") from error
    finally:
        os.close(descriptor)


def populate(mapping: mmap.mmap, begin: int, end: int) -> None:
    """Makes the kernel create the page table entries of the bytes [begin, end) now.

    Otherwise the kernel creates the page table entries at the first access, during a collective, and this can take
    longer than the collective itself. Do not call this function for memory that may never be used, because the call
    takes time at the start of a rank.
    """
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, begin, end - begin)
    except OSError:  # Linux before 5.14
        for page in range(begin, end, mmap.PAGESIZE):
            mapping[page]


def share_segment(
    make: Callable[[], int] | None, broadcast: Callable[[bytes], bytes], await_all: Callable[[], None]
) -> int:
    """Shares memory of the first rank with the other ranks. Every rank must call this function.

    Args:
        make: on the first rank, a function that makes the shared memory and returns its file descriptor. On the other
            ranks, None.
        broadcast: a function; broadcast(data) returns the data of the first rank, on every rank.
        await_all: a function that returns when all ranks have called it.

    Returns:
        This rank's file descriptor of the memory.

    Raises:
        BackendUnavailable: the first rank could not make the memory, or this rank could not open it.
    """
    if make is not None:
        try:
            descriptor = make()
        except BackendUnavailable:
            broadcast(b"")
            raise
    else:
        ticket = broadcast(b"")
        if not ticket:
            raise BackendUnavailable("the first rank could not make the shared memory")
        try:
            descriptor = open_segment(ticket)
        except BackendUnavailable:
            await_all()  # the other ranks wait for this rank
            raise
    try:
        if make is not None:
            broadcast(ticket_of(descriptor))
        await_all()  # the first rank keeps its descriptor open until all ranks have opened the memory
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def ticket_of(descriptor: int) -> bytes:
    """Returns the text from which `open_segment` in another process finds a segment of this process."""
    return f"{machine_identity()}\n{os.getpid()}\n{descriptor}".encode()


def open_segment(ticket: bytes) -> int:
    """Opens the segment of another process, and returns this process's file descriptor.

    Raises:
        BackendUnavailable: the other process is not on this host, does not see the same processes, is gone, or belongs
            to a different user.
    """
    machine, pid, descriptor = ticket.decode().split("\n")
    try:
        if not machine or machine != machine_identity():
            raise OSError("that rank runs on another host, or in a container that hides its processes")
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailable(
            "shared memory needs all ranks on one host, in one pid namespace (of Docker containers: --pid=host); "
            f"the memory of the first rank of this group cannot be opened from here: {error}"
        ) from error


def check_platform() -> None:
    """Checks that the processor guarantees the order of stores that the barrier needs.

    Raises:
        BackendUnavailable: this machine does not run Linux on x86-64.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise BackendUnavailable(f"shared memory needs Linux on x86-64, this is {sys.platform} on {machine}")

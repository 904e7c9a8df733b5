"""The shared memory of the ranks on one host: an anonymous memfd, whose file descriptor is passed to all ranks.

A memfd has no name, so nothing remains after all processes were killed. A small /dev/shm does not limit the size of a
memfd. The root creates the memfd and passes the descriptor over a local socket. The address of the socket and a token
are sent through the authenticated rendezvous.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import mmap
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable

import numpy as np

from gradsync.errors import BackendUnavailable, RendezvousTimeout
from gradsync.machine import available_memory_bytes

_MADV_POPULATE_WRITE = 23  # from Linux's mman.h; not in Python's mmap
_TOKEN_BYTES = 32
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CHECK_EVERY_SECONDS = 0.05

# Measured: a reduction of 100 MB takes a tenth to a third less time on huge pages, because the processor looks up fewer
# addresses than with 4 KB pages. Linux gives huge pages to a memfd only if the administrator has enabled this, or if
# the program requests each page by MADV_COLLAPSE (Linux 6.1), which takes some milliseconds. Without huge pages
# everything works too, but more slowly.
HUGE_PAGE_BYTES = 2 * 1024 * 1024

_MADV_COLLAPSE = 25  # from Linux's mman.h; not in Python's mmap
_ATTEMPTS = 4


def create_segment(size_bytes: int, *, allocated: bool = True) -> int:
    """Makes shared memory that is filled with zeros, and returns its file descriptor.

    The memory is allocated here, so that a lack of memory is an error now, and not a SIGBUS at the first access.
    /dev/shm does not limit the size of a memfd, and after too large an allocation the kernel would kill processes. So
    this function first checks the kernel's estimate of the available memory.

    Args:
        size_bytes: the size of the memory in bytes.
        allocated: whether to allocate the memory now. Otherwise the caller must allocate the memory by `reserve` before
            its first use.

    Raises:
        BackendUnavailable: the kernel has no memfd, or there is not enough memory.
    """
    try:
        descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise BackendUnavailable(f"shared memory needs memfd_create (Linux 3.17 or newer): {error}") from error
    try:
        os.ftruncate(descriptor, size_bytes)
        if allocated:
            reserve(descriptor, 0, size_bytes)
        # If a peer truncated the memory, the other processes would be killed by SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise _cannot_allocate(size_bytes, error) from error
    except BackendUnavailable:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, begin: int, end: int) -> None:
    """Allocates the bytes [begin, end) of a segment, but does not create their page table entries.

    Raises:
        BackendUnavailable: there is not enough memory.
    """
    _check_available(end - begin)
    try:
        os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        raise _cannot_allocate(end - begin, error) from error


def _check_available(size_bytes: int) -> None:
    available_bytes = available_memory_bytes()
    if size_bytes > available_bytes:
        raise BackendUnavailable(
            f"cannot allocate {size_bytes} bytes of shared memory: {available_bytes} bytes are available"
        )


def _cannot_allocate(size_bytes: int, error: OSError) -> BackendUnavailable:
    kind = "there is not enough memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
    return BackendUnavailable(f"cannot allocate {size_bytes} bytes of shared memory: {kind}")


def map_segment(descriptor: int, *, on_huge_pages: bool = False) -> mmap.mmap:
    """Maps the whole segment for reading and writing, and closes the descriptor.

    Args:
        descriptor: the segment's file descriptor.
        on_huge_pages: whether to map the segment at an address that is aligned for huge pages.

    Raises:
        BackendUnavailable: the address space of this process has no room for the segment.
    """
    try:
        if on_huge_pages:
            return _map_for_huge_pages(descriptor)
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise BackendUnavailable(f"cannot map the shared memory: {error}") from error
    finally:
        os.close(descriptor)


def populate(mapping: mmap.mmap, begin: int, end: int) -> None:
    """Makes the kernel create the page table entries of the bytes [begin, end) now.

    Otherwise the kernel creates the page table entries at the first access, during a collective, and creating them
    takes longer than the collective itself. Do not call this function for memory that may never be used, because the
    call takes time at the start of a rank.
    """
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, begin, end - begin)
    except OSError:  # Linux before 5.14
        for page in range(begin, end, mmap.PAGESIZE):
            mapping[page]


class SegmentOffer:
    """The root's side of the transfer: passes the file descriptor to each peer that knows the token.

    Attributes:
        ticket: the token and the address of the socket, which the root must send to its peers through the authenticated
            rendezvous.

    Raises:
        BackendUnavailable: this process has no free file descriptor.
    """

    def __init__(self) -> None:
        self._token = os.urandom(_TOKEN_BYTES)
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise BackendUnavailable(f"cannot offer the shared memory to the other ranks: {error}") from error
        # A socket in the abstract namespace leaves no file behind.
        name = b"\0gradsync-" + os.urandom(16).hex().encode()
        self._listener.bind(name)
        self._listener.listen(128)
        self.ticket = self._token + name

    def serve(self, descriptor: int, peers: int, deadline: float, check: Callable[[int], None]) -> None:
        """Passes the descriptor to other processes of the same user.

        Args:
            descriptor: the segment's file descriptor.
            peers: the number of processes that must get the descriptor.
            deadline: the latest time, in time.monotonic() seconds.
            check: a function; check(served) raises an error if a rank has failed. This method calls it while it waits,
                with the number of processes that have got the descriptor.

        Raises:
            RendezvousTimeout: not all peers had connected at the deadline.
        """
        self._listener.settimeout(_CHECK_EVERY_SECONDS)
        served = 0
        while served < peers:
            check(served)
            if time.monotonic() > deadline:
                raise RendezvousTimeout(
                    f"only {served} of {peers} ranks fetched the shared memory before the deadline; "
                    "check that all ranks are on this host, in one network namespace"
                )
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            with connection:
                served += self._serve_one(connection, descriptor)

    def _serve_one(self, connection: socket.socket, descriptor: int) -> bool:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        if _PEER_CREDENTIALS.unpack(credentials)[1] != os.getuid():
            return False
        connection.settimeout(1.0)
        try:
            token = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            if not hmac.compare_digest(token, self._token):
                return False
            socket.send_fds(connection, [b"\x01"], [descriptor])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Closes the socket, so that no further peer can connect."""
        self._listener.close()


def take_segment(ticket: bytes, timeout_seconds: float) -> int:
    """The peer's side of the transfer: returns the file descriptor that the root passes.

    Raises:
        BackendUnavailable: this process cannot reach the root, so the ranks cannot share memory.
    """
    token, name = ticket[:_TOKEN_BYTES], ticket[_TOKEN_BYTES:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(name)
            connection.sendall(token)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise BackendUnavailable(
            f"shared memory needs all ranks on one host, in one network namespace; "
            f"the first rank of this group cannot be reached from here: {error}"
        ) from error
    if not descriptors:
        raise BackendUnavailable("the first rank of this group closed the connection without sending the shared memory")
    os.set_inheritable(descriptors[0], False)  # recv_fds drops MSG_CMSG_CLOEXEC (CPython up to 3.13)
    return descriptors[0]


def pass_segment(
    make: Callable[[], int] | None,
    peers: int,
    broadcast: Callable[[bytes], bytes],
    timeout_seconds: float,
    check: Callable[[int], None],
) -> int:
    """Passes shared memory from the first rank to the other ranks. Every rank must call this function.

    Args:
        make: on the first rank, a function that makes the shared memory and returns its file descriptor. On the other
            ranks, None.
        peers: the number of the other ranks.
        broadcast: a function; broadcast(data) returns the data of the first rank, on every rank.
        timeout_seconds: how long a rank waits.
        check: see SegmentOffer.serve.

    Returns:
        This rank's file descriptor of the memory.

    Raises:
        BackendUnavailable: the first rank could not make the memory, or this rank could not get it.
        RendezvousTimeout: another rank did not get the memory in time.
    """
    deadline = time.monotonic() + timeout_seconds
    if make is None:
        ticket = broadcast(b"")
        if not ticket:
            raise BackendUnavailable("the first rank could not make the shared memory")
        return take_segment(ticket, max(1.0, deadline - time.monotonic()))
    with contextlib.ExitStack() as stack:
        try:
            offer = stack.enter_context(contextlib.closing(SegmentOffer()))
            descriptor = make()
        except BackendUnavailable:
            broadcast(b"")
            raise
        try:
            broadcast(offer.ticket)
            offer.serve(descriptor, peers, deadline, check)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def check_platform() -> None:
    """Checks that the processor guarantees the order of stores that the barrier needs.

    Raises:
        BackendUnavailable: this machine does not run Linux on x86-64.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise BackendUnavailable(f"shared memory needs Linux on x86-64, this is {sys.platform} on {machine}")


def _map_for_huge_pages(descriptor: int) -> mmap.mmap:
    """Maps a whole segment, if possible at an address that is a multiple of the huge page size.

    The descriptor remains open.

    Raises:
        OSError: the address space of this process has no room for the segment.
    """
    size_bytes = os.fstat(descriptor).st_size
    with contextlib.ExitStack() as gaps:
        for _ in range(_ATTEMPTS):
            mapping = mmap.mmap(descriptor, size_bytes)
            excess_bytes = _address(mapping) % HUGE_PAGE_BYTES
            if not excess_bytes:
                return mapping
            # Linux puts each new mapping below the last one. So after a mapping of the excess size, the next mapping
            # begins at a multiple.
            mapping.close()
            gaps.enter_context(mmap.mmap(-1, excess_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return mmap.mmap(descriptor, size_bytes)


def take_huge_pages(mapping: mmap.mmap, begin: int, end: int, seconds: float) -> None:
    """Asks the kernel to move a part of a mapping to huge pages, within a time limit.

    Args:
        mapping: a mapping that _map_for_huge_pages has made.
        begin, end: the offsets of this part in the mapping, both multiples of the huge page size. The part must be
            allocated.
        seconds: the time limit.
    """
    deadline = time.monotonic() + seconds
    for page in range(begin, end, HUGE_PAGE_BYTES):
        if time.monotonic() > deadline:
            return
        try:
            mapping.madvise(_MADV_COLLAPSE, page, HUGE_PAGE_BYTES)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # EAGAIN: only this page cannot be moved now
                return


def _address(mapping: mmap.mmap) -> int:
    address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return address

"""Shared memory of the ranks on one host: an anonymous memfd, passed as a descriptor.

A memfd has no name, so nothing remains if every process is killed, and it does not count against a small /dev/shm. The
root creates it and passes the descriptor over a local socket. The socket's address and its token are sent through the
authenticated rendezvous.
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
_LOOK_FOR_FAILURES_EVERY_SECONDS = 0.05
_PAGE_BYTES = 4096  # the unit of the memory's layout

# Measured: a reduction over 100 MB takes a tenth to a third less time on huge pages, because the processor looks up
# fewer addresses than with 4 KB pages. Linux gives a memfd huge pages only if the administrator has enabled them, or on
# request by MADV_COLLAPSE (Linux 6.1), which takes some milliseconds for each. Without huge pages everything works too,
# but slower.
HUGE_PAGE_BYTES = 2 * 1024 * 1024

_MADV_COLLAPSE = 25  # from Linux's mman.h; not in Python's mmap
_ATTEMPTS = 4


def create_segment(size_bytes: int, *, allocated: bool = True) -> int:
    """Returns a descriptor of new, zeroed shared memory.

    The memory is allocated here, so that a lack of memory is an error now, and not a SIGBUS at the first access. A
    memfd is not limited by /dev/shm, and too large an allocation would end in an out-of-memory kill; so the kernel's
    estimate of the available memory is checked first.

    Args:
        size_bytes: the memory's size.
        allocated: whether to allocate it now; otherwise `reserve` must allocate it before it is used.

    Raises:
        BackendUnavailable: the kernel has no memfd, or not enough memory.
    """
    try:
        descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise BackendUnavailable(f"shared memory needs memfd_create (Linux 3.17 or newer): {error}") from error
    try:
        os.ftruncate(descriptor, size_bytes)
        if allocated:
            reserve(descriptor, 0, size_bytes)
        # A peer that truncated the memory would kill the others by SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise _cannot_allocate(size_bytes, error) from error
    except BackendUnavailable:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, begin: int, end: int) -> None:
    """Allocates these bytes of a segment, without page table entries.

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
        descriptor: the segment's descriptor.
        on_huge_pages: whether to map it at an address that is aligned for huge pages.

    Raises:
        BackendUnavailable: this process has no address space for it.
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
    """Makes the kernel create the page table entries for these bytes now.

    Otherwise the kernel makes them at the first access, in the middle of a collective, which takes longer than the
    collective. Leave out memory that may never be used: its entries would cost start-up time.
    """
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, begin, end - begin)
    except OSError:  # Linux before 5.14
        for page in range(begin, end, mmap.PAGESIZE):
            mapping[page]


class SegmentOffer:
    """The root's side: passes a descriptor to each peer that knows the token.

    Attributes:
        ticket: the token and the socket's address, to be sent to peers through the authenticated rendezvous.
    """

    def __init__(self) -> None:
        self._token = os.urandom(_TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # The abstract namespace leaves no file behind.
        name = b"\0gradsync-" + os.urandom(16).hex().encode()
        self._listener.bind(name)
        self._listener.listen(128)
        self.ticket = self._token + name

    def serve(self, descriptor: int, peers: int, deadline: float, check_for_failure: Callable[[], None]) -> None:
        """Passes the descriptor to `peers` processes of the same user.

        Args:
            descriptor: the segment's descriptor.
            peers: the number of processes.
            deadline: the deadline, in time.monotonic() seconds.
            check_for_failure: called while waiting; raises if a rank has failed.

        Raises:
            RendezvousTimeout: not all peers had connected at the deadline.
        """
        self._listener.settimeout(_LOOK_FOR_FAILURES_EVERY_SECONDS)
        served = 0
        while served < peers:
            check_for_failure()
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
        """Stops listening."""
        self._listener.close()


def take_segment(ticket: bytes, timeout_seconds: float) -> int:
    """A peer's side: returns the descriptor that the root offers.

    Raises:
        BackendUnavailable: the root cannot be reached from here, so the ranks cannot share memory.
    """
    token, name = ticket[:_TOKEN_BYTES], ticket[_TOKEN_BYTES:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(timeout_seconds)
        try:
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


def whole_pages(size_bytes: int) -> int:
    """Returns the size rounded up to whole pages."""
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def check_platform() -> None:
    """Checks that the processor has the memory ordering that the barrier needs.

    Raises:
        BackendUnavailable: not Linux on x86-64.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise BackendUnavailable(f"shared memory needs Linux on x86-64, this is {sys.platform} on {machine}")


def _map_for_huge_pages(descriptor: int) -> mmap.mmap:
    """Maps a whole segment at an address that is a multiple of the huge page size, if possible.

    The descriptor stays open.

    Raises:
        OSError: this process has no address space for it.
    """
    size_bytes = os.fstat(descriptor).st_size
    with contextlib.ExitStack() as gaps:
        for _ in range(_ATTEMPTS):
            mapping = mmap.mmap(descriptor, size_bytes)
            excess_bytes = _address(mapping) % HUGE_PAGE_BYTES
            if not excess_bytes:
                return mapping
            # Linux maps from the top down, so a mapping of the excess moves the next mapping down to a multiple.
            mapping.close()
            gaps.enter_context(mmap.mmap(-1, excess_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return mmap.mmap(descriptor, size_bytes)


def take_huge_pages(mapping: mmap.mmap, begin: int, end: int, seconds: float) -> None:
    """Asks the kernel to move this part of a mapping to huge pages, within a time limit.

    Args:
        mapping: a mapping from _map_for_huge_pages.
        begin, end: the part, allocated; multiples of the huge page size.
        seconds: the time limit.
    """
    deadline = time.monotonic() + seconds
    for page in range(begin, end, HUGE_PAGE_BYTES):
        if time.monotonic() > deadline:
            return
        try:
            mapping.madvise(_MADV_COLLAPSE, page, HUGE_PAGE_BYTES)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # EAGAIN: only this page is in use now
                return


def _address(mapping: mmap.mmap) -> int:
    address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return address

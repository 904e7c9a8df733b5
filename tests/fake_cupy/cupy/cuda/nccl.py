"""CuPy's binding of NCCL, between processes. See _hub.py for where the ranks meet.

It checks more than NCCL does: arguments, memory, streams, devices and overlaps. Not there: commSplit.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from ._devices import current_device
from ._errors import INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, UNHANDLED_CUDA_ERROR, CUDARuntimeError, NcclError
from ._hub import DTYPES, HOST, OPS, STREAMS, SUM, UNIQUE_ID_BYTES, Call, Member, join, open_hubs, waits_for_ever
from ._work import Ticket, WorkQueue
from .memory import find_block

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
available = True

_handles = itertools.count(0x5700_0000_0010, 0x10)
_group = threading.local()
_LOOK_SECONDS = 0.01  # while another collective has the device
_Buffer = tuple[int, int] | None  # address and size


def get_version() -> int:
    return int(os.environ.get("FAKE_CUPY_NCCL_VERSION", "23203"))


def get_build_version() -> int:
    return 22501


def get_unique_id() -> bytes:
    """An id for a new communicator; it is served by this process."""
    return open_hubs()


class _Operation(NamedTuple):
    """A call that was checked, and the bytes that it reads and writes."""

    communicator: NcclCommunicator
    call: Call
    source: np.ndarray | None = None
    target: np.ndarray | None = None
    queue: WorkQueue | None = None


def groupStart() -> None:  # noqa: N802
    """Begins a group: groupEnd launches the calls of this thread from now on, together."""
    if not getattr(_group, "depth", 0):
        _group.depth, _group.operations, _group.error = 0, [], None
    _group.depth += 1


def groupEnd() -> None:  # noqa: N802
    """Launches the calls since groupStart, or none of them if NCCL has refused one."""
    if not getattr(_group, "depth", 0):
        raise NcclError(INVALID_USAGE, "groupEnd without groupStart")
    _group.depth -= 1
    if _group.depth:
        return
    if _group.error is not None:
        raise _group.error
    batches: dict[tuple[NcclCommunicator, WorkQueue], list[_Operation]] = {}
    for operation in _group.operations:
        batches.setdefault((operation.communicator, operation.queue), []).append(operation)
    for (communicator, queue), operations in batches.items():
        with communicator._call():
            communicator._launch(queue, operations)


class NcclCommunicator:
    """A communicator of this thread's device; returns when all ranks have made theirs.

    Args:
        ndev: number of ranks.
        commId: from get_unique_id of one of them.
        rank: this one.
    """

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
        self.comm = 0
        if not isinstance(commId, bytes) or len(commId) != UNIQUE_ID_BYTES:
            raise TypeError("commId is 128 bytes")
        if not 0 <= rank < ndev:
            raise NcclError(INVALID_ARGUMENT, f"invalid rank requested: {rank} of {ndev}")
        self._device = current_device()
        self._world_size, self._rank = ndev, rank
        self._calling = threading.Lock()
        self._blocks_host = False  # with CUDA_LAUNCH_BLOCKING=1 in every call, and while ranks connect
        self._ended = threading.Event()  # aborted or destroyed
        self._failure: tuple[int, str] | None = None
        self._last: Ticket | None = None
        self._connected: set[tuple[int, int]] = set()  # ways of messages; (-1, -1) for collectives
        host = os.environ.get("NCCL_HOSTID", socket.gethostname())
        may_share = get_version() >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        self._connections: list[Connection] = []
        self._connections = join(commId, Member(rank, ndev, HOST, host, self._device.pci_bus_id, may_share))
        self.comm = next(_handles)

    def __del__(self) -> None:
        if self.comm and not sys.is_finalizing():  # when no thread would end what destroy waits for
            self.destroy()

    # -- Collectives and messages ---------------------------------------------------------------------------------

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        with self._call(count, datatype, op):
            call = Call("allReduce", count, datatype, op)
            self._submit(call, (sendbuf, call.nbytes), (recvbuf, call.nbytes), stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        with self._call(count, datatype, op, root):
            call = Call("reduce", count, datatype, op, root)
            self._submit(call, (sendbuf, call.nbytes), self._at(root, recvbuf, call.nbytes), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        with self._call(count, datatype, SUM, root):
            call = Call("broadcast", count, datatype, peer=root)
            self._submit(call, self._at(root, sendbuff, call.nbytes), (recvbuff, call.nbytes), stream)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        with self._call(recvcount, datatype, op):
            call = Call("reduceScatter", recvcount, datatype, op)
            whole = call.nbytes * self._world_size
            self._submit(call, (sendbuf, whole), (recvbuf, call.nbytes), stream, self._rank * call.nbytes)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        with self._call(count, datatype):
            call = Call("allGather", count, datatype)
            whole = call.nbytes * self._world_size
            self._submit(call, (sendbuf, call.nbytes), (recvbuf, whole), stream, -self._rank * call.nbytes)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        with self._call(count, datatype, SUM, peer):
            call = Call("send", count, datatype, peer=peer)
            self._submit(call, (sendbuf, call.nbytes), None, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        with self._call(count, datatype, SUM, peer):
            call = Call("recv", count, datatype, peer=peer)
            self._submit(call, None, (recvbuf, call.nbytes), stream)

    # -- State and end --------------------------------------------------------------------------------------------

    def check_async_error(self) -> None:
        """Raises the failure of an operation, if any; may be called beside other calls."""
        if not self.comm:
            raise NcclError(INVALID_ARGUMENT, "the communicator was aborted or destroyed")
        if self._failure is not None:
            raise NcclError(*self._failure)

    def destroy(self) -> None:
        """Waits for the operations of this communicator and, as NCCL may, until all ranks have come here; ends it."""
        if self.comm:
            with self._call():
                if self._last is not None:
                    self._last.wait()
                if waits_for_ever() and self._world_size > 1:
                    self._blocks_host = True
                    with suppress(NcclError):
                        self._exchange(HOST, [_Operation(self, Call("commDestroy"))])
                self._end()

    def abort(self) -> None:
        """Ends the operations of this communicator now, with undefined data, and the communicator.

        What others have queued behind its operations goes on.
        """
        if self.comm:
            if self._blocks_host:  # NCCL lets a thread abort a call in which another thread is stuck
                self._end()
                return
            with self._call():
                self._end()

    def _end(self) -> None:
        self.comm = 0
        self._ended.set()
        for connection in self._connections:  # wakes who waits for an answer, and may still use it
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    # -- Checking -------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, count: int = 0, datatype: int = 0, op: int = SUM, root: int = 0) -> Iterator[None]:
        """The context of every call: needs a communicator that exists, and no other call at the same time."""
        if not self._calling.acquire(blocking=False):
            raise NcclError(INVALID_USAGE, "two threads call the same communicator at once")
        try:
            if not self.comm:
                raise NcclError(INVALID_ARGUMENT, "the communicator was aborted or destroyed")
            if count < 0:
                raise OverflowError("can't convert negative value to size_t")
            if not (0 <= root < self._world_size and 0 <= datatype < len(DTYPES) and 0 <= op < len(OPS)):
                raise NcclError(INVALID_ARGUMENT, f"root or peer {root}, type {datatype}, operation {op}")
            yield
        except NcclError as error:
            if getattr(_group, "depth", 0):
                _group.error = _group.error or error
            raise
        finally:
            self._calling.release()

    def _at(self, root: int, address: int, size: int) -> _Buffer:
        """A buffer that only the root uses."""
        return (address, size) if self._rank == root else None

    def _bytes(self, buffer: _Buffer, name: str) -> np.ndarray | None:
        """The bytes of a buffer, which must be memory of the communicator's device."""
        if buffer is None:
            return None
        address, size = buffer
        block = find_block(address, size)
        if block is None or block.device_id != self._device.device_id:
            raise NcclError(INVALID_ARGUMENT, f"{name} 0x{address:x} of {size} bytes is not in memory of this device")
        return block.bytes[address - block.address :][:size]

    def _submit(self, call: Call, send: _Buffer, receive: _Buffer, stream: int, in_place_offset: int = 0) -> None:
        """Checks the rest, and launches; `in_place_offset` is where recvbuf may begin within sendbuf."""
        if self._failure is not None:
            raise NcclError(*self._failure)
        queue = self._device.find_queue(stream)
        if queue is None:
            raise NcclError(INVALID_ARGUMENT, f"device {self._device.device_id} has no stream 0x{stream:x}")
        if call.count == 0 and not call.is_of_two:
            return  # NCCL discards it: no rank waits for it. Source: NCCL, src/enqueue.cc, taskAppend.
        source, target = self._bytes(send, "sendbuff"), self._bytes(receive, "recvbuff")
        has_both = source is not None and target is not None
        if has_both and receive[0] != send[0] + in_place_offset and np.may_share_memory(source, target):
            raise NcclError(INVALID_ARGUMENT, "sendbuff and recvbuff overlap, and not as an in-place call may")
        operation = _Operation(self, call, source, target, queue)
        if getattr(_group, "depth", 0):
            _group.operations.append(operation)
        else:
            self._launch(queue, [operation])

    # -- Launching ------------------------------------------------------------------------------------------------

    def _launch(self, queue: WorkQueue, operations: list[_Operation]) -> None:
        """Queues operations, after those that were launched before on any stream."""
        if self._world_size > 1:
            self._connect([operation.call for operation in operations])
        previous = self._last if self._last is not None and self._last.queue is not queue else None
        try:
            self._last = queue.submit(lambda: self._execute(previous, operations))
        except CUDARuntimeError as error:
            raise NcclError(UNHANDLED_CUDA_ERROR, str(error)) from error
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":  # the host waits for every kernel
            self._blocks_host = True
            self._last.wait()
            self._blocks_host = False

    def _connect(self, calls: list[Call]) -> None:
        """Connects ranks that meet for the first time: the host waits for the others, whatever the stream has to do.

        All ranks before the first collective; two before the first messages between them, for as many as their groups
        have. Source: NCCL, src/group.cc (ncclCollPreconnectFunc, ncclP2PPreconnectFunc), NCCL_RUNTIME_CONNECT is 1.
        """
        ways: dict[int, set[tuple[int, int]]] = {}
        for call in calls:
            way = (self._rank, call.peer) if call.kind == "send" else (call.peer, self._rank)
            way = way if call.is_of_two else (-1, -1)
            if way not in self._connected:
                ways.setdefault(call.peer if call.is_of_two else -1, set()).add(way)
        needed = [Call("connect") if p == -1 else Call("meet", peer=p, ways=frozenset(w)) for p, w in ways.items()]
        if not needed:
            return
        self._blocks_host = True
        try:
            self._exchange(HOST, [_Operation(self, call) for call in needed])
        except NcclError:
            if waits_for_ever():
                self._ended.wait()
            raise
        finally:
            self._blocks_host = False
        self._connected.update(*ways.values())

    def _execute(self, previous: Ticket | None, operations: list[_Operation]) -> None:
        """What the stream does."""
        if previous is not None:
            previous.wait()
        while not self._device.kernel.acquire(timeout=_LOOK_SECONDS):
            if self._ended.is_set():
                return
        try:
            if self._ended.is_set() or self._failure is not None:
                return
            for operation in operations:
                if not operation.call.is_of_two:
                    self._exchange(STREAMS, [operation])
            self._exchange(STREAMS, [operation for operation in operations if operation.call.is_of_two])
        except NcclError as error:
            if waits_for_ever():  # in silence, as a kernel of NCCL, which nothing ends but an abort
                self._ended.wait()
            elif not self._ended.is_set():
                self._failure = error.status, error.detail
        finally:
            self._device.kernel.release()

    def _exchange(self, hub: int, operations: list[_Operation]) -> None:
        """Sends operations to a hub, and writes its answers."""
        if not operations:
            return
        if self._world_size == 1 and not operations[0].call.is_of_two:
            np.copyto(operations[0].target, operations[0].source)
            return
        connection = self._connections[hub]
        try:
            # Where the hub has refused, the reason is still there to be read.
            with suppress(OSError):
                connection.send([(o.call, b"" if o.source is None else o.source.tobytes()) for o in operations])
            status, results = connection.recv()
        except (EOFError, OSError):
            raise NcclError(REMOTE_ERROR, "the process that made the unique id has gone, or this was aborted") from None
        if status:
            raise NcclError(status, results)
        for operation, result in zip(operations, results, strict=True):
            if operation.target is not None:
                np.copyto(operation.target, np.frombuffer(result, np.uint8))

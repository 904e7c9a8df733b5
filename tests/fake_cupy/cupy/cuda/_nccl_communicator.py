"""The parts common to all calls of a communicator: joining, checking, launching, executing and ending."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from ._devices import current_device
from ._errors import CUDARuntimeError
from ._nccl_calls import (
    DTYPE_COUNT,
    OP_COUNT,
    SUM,
    UINT8,
    Call,
    Gone,
    receive_reply,
    send_call,
    waits_for_ever,
)
from ._nccl_errors import INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, UNHANDLED_CUDA_ERROR, NcclError
from ._nccl_hub import UNIQUE_ID_BYTES, Membership, connect
from ._work_queue import Ticket, WorkQueue
from .memory import address_space

_handles = itertools.count(0x5700_0000_0010, 0x10)
_group = threading.local()
_LOOK_SECONDS = 0.01  # while the device is taken


def get_version() -> int:
    """Returns the version of the library."""
    return int(os.environ.get("FAKE_CUPY_NCCL_VERSION", "23203"))


class _Operation(NamedTuple):
    """One operation, checked: its call, and the bytes that it reads and writes."""

    communicator: BaseCommunicator
    call: Call
    source: np.ndarray | None
    target: np.ndarray | None
    queue: WorkQueue | None


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
    batches: dict[tuple[BaseCommunicator, WorkQueue], list[_Operation]] = {}
    for operation in _group.operations:
        batches.setdefault((operation.communicator, operation.queue), []).append(operation)
    for (communicator, queue), operations in batches.items():
        with communicator._call():
            communicator._launch(queue, operations)


class BaseCommunicator:
    """All of a communicator but its collectives; see NcclCommunicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: None = None) -> None:  # noqa: N803
        self.comm = 0
        self._connection: socket.socket | None = None
        if not isinstance(commId, bytes):
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        if len(commId) != UNIQUE_ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {UNIQUE_ID_BYTES}.")
        if not 0 <= rank < ndev:
            raise NcclError(INVALID_ARGUMENT, f"invalid rank requested: {rank} of {ndev}")
        self._device = current_device()
        self._world_size, self._rank = ndev, rank
        self._calling = threading.Lock()
        self._blocks_host = False  # with CUDA_LAUNCH_BLOCKING=1 in every call, and while ranks connect
        self._ended = threading.Event()  # aborted or destroyed
        self._failure: tuple[int, str] | None = None
        self._last: Ticket | None = None
        self._connected: set[tuple[str, int]] = set()  # kind and peer of messages; and "connect" for collectives
        self._connection = self._join(commId)
        self.comm = next(_handles)

    def _join(self, unique_id: bytes) -> socket.socket:
        host = os.environ.get("NCCL_HOSTID", socket.gethostname())
        may_share = get_version() >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        membership = Membership(self._rank, self._world_size, host, self._device.pci_bus_id, may_share)
        return connect(unique_id, membership)

    def __del__(self) -> None:
        if self.comm and not sys.is_finalizing():  # when no thread would end what destroy waits for
            self.destroy()
        if self._connection is not None:
            self._connection.close()

    def size(self) -> int:
        with self._call():
            return self._world_size

    def rank_id(self) -> int:
        with self._call():
            return self._rank

    def device_id(self) -> int:
        with self._call():
            return self._device.device_id

    def check_async_error(self) -> None:
        """Raises the failure of an operation, if any; may be called beside other calls."""
        if not self.comm:
            raise NcclError(INVALID_ARGUMENT, "the communicator was aborted or destroyed")
        if self._failure is not None:
            raise NcclError(*self._failure)

    def destroy(self) -> None:
        """Waits for the operations of this communicator, and, as NCCL may, until all ranks have come here; ends it."""
        if self.comm:
            with self._call():
                if self._last is not None:
                    self._last.wait()
                if waits_for_ever() and self._world_size > 1:
                    self._blocks_host = True
                    with suppress(Gone, NcclError):
                        self._exchange([_Operation(self, Call("commDestroy", 0, UINT8), None, None, None)])
                self._end()

    def abort(self) -> None:
        """Ends the operations of this communicator now, with undefined data, and the communicator."""
        if self.comm:
            if self._blocks_host:  # NCCL lets a thread abort a call in which another thread is stuck
                self._end()
                return
            with self._call():
                self._end()

    # Checking.

    @contextmanager
    def _call(self) -> Iterator[None]:
        """The context of every call: requires a communicator that exists, and no other call at the same time."""
        if not self._calling.acquire(blocking=False):
            raise NcclError(INVALID_USAGE, "two threads call the same communicator at once")
        try:
            if not self.comm:
                raise NcclError(INVALID_ARGUMENT, "the communicator was aborted or destroyed")
            yield
        except NcclError as error:
            if getattr(_group, "depth", 0):
                _group.error = _group.error or error
            raise
        finally:
            self._calling.release()

    def _check_codes(self, count: int, datatype: int, op: int = SUM, root: int = 0) -> None:
        if count < 0:
            raise OverflowError("can't convert negative value to size_t")
        if not 0 <= root < self._world_size:
            raise NcclError(
                INVALID_ARGUMENT, f"invalid root {root} (root should be in the 0..{self._world_size} range)"
            )
        if not 0 <= datatype < DTYPE_COUNT:
            raise NcclError(INVALID_ARGUMENT, f"invalid type {datatype}")
        if not 0 <= op < OP_COUNT:
            raise NcclError(INVALID_ARGUMENT, f"invalid reduction operation {op}")

    def _at(self, root: int, address: int, size: int) -> tuple[int, int] | None:
        """Returns a buffer that only the root uses."""
        return (address, size) if self._rank == root else None

    def _buffer(self, buffer: tuple[int, int] | None, name: str) -> np.ndarray | None:
        """Returns the bytes of a buffer, which must be memory of the communicator's device."""
        if buffer is None:
            return None
        address, size = buffer
        block = address_space.find(address, size)
        if block is None:
            raise NcclError(INVALID_ARGUMENT, f"{name} 0x{address:x} of {size} bytes is not in device memory")
        if block.device_id != self._device.device_id:
            raise NcclError(
                INVALID_ARGUMENT,
                f"{name} is on device {block.device_id}, the communicator on device {self._device.device_id}",
            )
        begin = address - block.address
        return block.bytes[begin : begin + size]

    def _submit(
        self,
        call: Call,
        send: tuple[int, int] | None,
        receive: tuple[int, int] | None,
        stream: int,
        in_place_offset: int = 0,
    ) -> None:
        """Checks the rest, and launches; `in_place_offset` is where recvbuf may begin within sendbuf."""
        if self._failure is not None:
            raise NcclError(*self._failure)
        queue = self._device.find_queue(stream)
        if queue is None:
            raise NcclError(INVALID_ARGUMENT, f"device {self._device.device_id} has no stream 0x{stream:x}")
        if call.count == 0 and not call.is_message:
            return  # NCCL discards it: no rank waits for it. Source: NCCL, src/enqueue.cc, taskAppend.
        source, target = self._buffer(send, "sendbuff"), self._buffer(receive, "recvbuff")
        has_both = source is not None and target is not None
        if has_both and receive[0] != send[0] + in_place_offset and np.may_share_memory(source, target):
            raise NcclError(INVALID_ARGUMENT, "sendbuff and recvbuff overlap, and not as an in-place call may")
        operation = _Operation(self, call, source, target, queue)
        if getattr(_group, "depth", 0):
            _group.operations.append(operation)
        else:
            self._launch(queue, [operation])

    # Executing.

    def _launch(self, queue: WorkQueue, operations: list[_Operation]) -> None:
        """Queues operations, after those that were launched before on any stream."""
        if self._world_size > 1:
            self._connect(operations)
        previous = self._last if self._last is not None and self._last.queue is not queue else None
        try:
            self._last = queue.submit(lambda: self._execute(previous, operations))
        except CUDARuntimeError as error:
            raise NcclError(UNHANDLED_CUDA_ERROR, str(error)) from error
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":  # the host waits for every kernel
            self._blocks_host = True
            self._last.wait()
            self._blocks_host = False

    def _connect(self, operations: list[_Operation]) -> None:
        """Connects ranks that meet for the first time; the host waits for the others, whatever the stream has to do.

        All ranks before the first collective, two ranks before the first message between them in a direction. Source:
        NCCL, src/group.cc (ncclCollPreconnectFunc, ncclP2PPreconnectFunc) and NCCL_RUNTIME_CONNECT, which is 1.
        """
        first = {}
        for operation in operations:
            call = operation.call
            way = (call.kind, call.root) if call.is_message else ("connect", 0)
            if way not in self._connected:
                call = call._replace(count=0) if call.is_message else Call("connect", 0, UINT8)
                first[way] = operation._replace(call=call, source=None, target=None)
        if not first:
            return
        if self._last is not None:
            self._last.wait()  # one connection to the hub: NCCL would not wait for the stream
        self._connected.update(first)
        self._blocks_host = True
        try:
            self._exchange(sorted(first.values(), key=lambda operation: operation.call.kind == "recv"))
        except Gone:
            self._lose_hub()
            raise NcclError(REMOTE_ERROR, "a peer has gone, or this communicator was aborted") from None
        except NcclError:
            if waits_for_ever():
                self._ended.wait()
            raise
        finally:
            self._blocks_host = False

    def _execute(self, previous: Ticket | None, operations: list[_Operation]) -> None:
        if previous is not None:
            previous.wait()
        while not self._device.kernel.acquire(timeout=_LOOK_SECONDS):
            if self._ended.is_set():
                return
        try:
            self._run(operations)
        finally:
            self._device.kernel.release()

    def _run(self, operations: list[_Operation]) -> None:
        if self._ended.is_set() or self._failure is not None:
            return
        try:
            for operation in operations:
                if not operation.call.is_message:
                    self._exchange([operation])
            # Every send leaves before the first answer is waited for, as ranks that exchange need it.
            messages = [operation for operation in operations if operation.call.is_message]
            if messages:
                self._exchange(sorted(messages, key=lambda operation: operation.call.kind == "recv"))
        except Gone:
            self._lose_hub()
        except NcclError as error:
            if waits_for_ever():  # as a kernel of NCCL does, in silence, which nothing ends but an abort
                self._ended.wait()
            else:
                self._failure = error.status, error.detail

    def _exchange(self, operations: list[_Operation]) -> None:
        """Sends operations to the hub and receives the answers."""
        if self._world_size == 1 and not operations[0].call.is_message:
            np.copyto(operations[0].target, operations[0].source)
            return
        with suppress(Gone):  # the reason is still there to be read
            for operation in operations:
                send_call(self._connection, operation.call, operation is operations[-1], operation.source)
        for operation in operations:
            status, data = receive_reply(self._connection)
            if status:
                raise NcclError(status, data.tobytes().decode())
            if operation.target is not None and operation.target.size:
                np.copyto(operation.target, data if data.size else operation.source)

    def _lose_hub(self) -> None:
        """The process that made the id is gone, or this communicator was aborted."""
        if waits_for_ever():
            self._ended.wait()
        elif not self._ended.is_set():
            self._failure = REMOTE_ERROR, "the process that made the unique id has gone"

    def _end(self) -> None:
        self.comm = 0
        self._ended.set()
        # Wakes the operation that waits for an answer; it may still use the socket, which is closed later.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

"""A synchronous NCCL for arrays in host memory, instead of CuPy's NcclCommunicator.

Each call moves its bytes at once, through a thread of rank 0, and returns when the result is there; so a call that
waits for another rank waits in the call, not on a stream. Arguments are checked as CuPy's binding takes them: exact
integers, an id of 128 bytes, pointers to device memory. Calls that differ between the ranks are an error, where NCCL
would hang.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]
DTYPES += [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]  # by ncclDataType_t
SUM, PROD, MAX, MIN, AVG = range(5)
UFUNCS = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum, AVG: np.add}
INVALID_USAGE, REMOTE_ERROR = 5, 6
DEVICE = 2  # cudaMemoryTypeDevice
CONNECT_SECONDS = 60

of_cupy: dict[str, Any] = {}  # what is replaced
ends: list[str] = []  # for tests: what has ended communicators in this process, in its order
_groups = threading.local()  # .calls: those of the open group of this thread, if one is open


def install() -> None:
    """Replaces what cupy.cuda.nccl has; its ids, constants and errors stay."""
    from cupy.cuda import nccl

    replacements = {"NcclCommunicator": NcclCommunicator, "groupStart": group_start, "groupEnd": group_end}
    for name, replacement in replacements.items():
        of_cupy[name] = getattr(nccl, name)
        setattr(nccl, name, replacement)
    ctypes.CDLL = _open_library  # type: ignore[misc,assignment]


_open = ctypes.CDLL


def _open_library(name: Any, *arguments: Any, **options: Any) -> Any:
    library = _open(name, *arguments, **options)
    if os.path.basename(str(name)).startswith("libnccl.so"):
        library.ncclCommRevoke = _revoke  # which CuPy does not have, so gradsync asks the library for it
    return library


def _revoke(communicator: int, flags: int) -> int:
    ends.append("revoke")
    _by_pointer[communicator]._shut_down()
    return 0


def group_start() -> None:
    _groups.calls = []


def group_end() -> None:
    calls = getattr(_groups, "calls", None)
    if calls is None:
        raise _error(INVALID_USAGE)
    _groups.calls = None
    for _, call in sorted(calls, key=lambda call: call[0] != "send"):  # what is sent waits for nobody
        call()


_by_pointer: weakref.WeakValueDictionary[int, NcclCommunicator] = weakref.WeakValueDictionary()


class NcclCommunicator:
    """One rank of a communicator; the methods have the names and arguments of CuPy's."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803 - CuPy's name
        _check_integers(ndev, rank)
        if not isinstance(commId, bytes) or len(commId) != 128:
            raise TypeError(f"an id of 128 bytes, got {commId!r}")
        self._size, self._rank = ndev, rank
        address = "\0nccl-" + hashlib.sha256(commId).hexdigest()
        if rank == 0:
            _Exchange(address, ndev)
        self._connection = _connect(address)
        self._connection.send(rank)
        self.comm = id(self)
        _by_pointer[self.comm] = self

    def allReduce(self, source, target, count, dtype, op, stream) -> None:  # noqa: N802 - CuPy's names, here and below
        _check_integers(source, target, count, dtype, op, stream)

        def call() -> None:
            sources = self._exchange(("allReduce", count, dtype, op), _values(source, count, dtype))
            _values(target, count, dtype)[...] = _reduced(sources, dtype, op)

        self._call("allReduce", call)

    def reduce(self, source, target, count, dtype, op, root, stream) -> None:
        _check_integers(source, target, count, dtype, op, root, stream)

        def call() -> None:
            sources = self._exchange(("reduce", count, dtype, op, root), _values(source, count, dtype))
            if self._rank == root:
                _values(target, count, dtype)[...] = _reduced(sources, dtype, op)

        self._call("reduce", call)

    def reduceScatter(self, source, target, count, dtype, op, stream) -> None:  # noqa: N802
        _check_integers(source, target, count, dtype, op, stream)

        def call() -> None:
            values = _values(source, count * self._size, dtype)
            whole = _reduced(self._exchange(("reduceScatter", count, dtype, op), values), dtype, op)
            _values(target, count, dtype)[...] = whole[self._rank * count :][:count]

        self._call("reduceScatter", call)

    def broadcast(self, source, target, count, dtype, root, stream) -> None:
        _check_integers(source, target, count, dtype, root, stream)

        def call() -> None:
            sources = self._exchange(("broadcast", count, dtype, root), _values(source, count, dtype))
            _values(target, count, dtype)[...] = np.frombuffer(sources[root], DTYPES[dtype])

        self._call("broadcast", call)

    def allGather(self, source, target, count, dtype, stream) -> None:  # noqa: N802
        _check_integers(source, target, count, dtype, stream)

        def call() -> None:
            sources = self._exchange(("allGather", count, dtype), _values(source, count, dtype))
            _values(target, count * self._size, dtype)[...] = np.frombuffer(b"".join(sources), DTYPES[dtype])

        self._call("allGather", call)

    def send(self, source, count, dtype, peer, stream) -> None:
        _check_integers(source, count, dtype, peer, stream)
        self._call("send", lambda: self._ask("send", peer, _values(source, count, dtype).tobytes()))

    def recv(self, target, count, dtype, peer, stream) -> None:
        _check_integers(target, count, dtype, peer, stream)

        def call() -> None:
            _values(target, count, dtype)[...] = np.frombuffer(self._ask("recv", peer, None), DTYPES[dtype])

        self._call("recv", call)

    def check_async_error(self) -> None:
        """Nothing fails after its call has returned."""

    def destroy(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        ends.append("abort")
        self._shut_down()

    def _shut_down(self) -> None:
        """Ends the call in which another thread may wait, too."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def _call(self, name: str, call: Callable[[], Any]) -> None:
        calls = getattr(_groups, "calls", None)
        if calls is None:
            call()
        else:
            calls.append((name, call))

    def _exchange(self, what: tuple[Any, ...], values: np.ndarray) -> list[bytes]:
        """Returns the bytes of every rank."""
        parts: list[bytes] = self._ask("collective", what, values.tobytes())
        return parts

    def _ask(self, *question: Any) -> Any:
        try:
            self._connection.send(question)
            answer = self._connection.recv()
        except (EOFError, OSError):  # revoked or aborted, or rank 0 has died
            ends.append(str(question[0]))
            raise _error(REMOTE_ERROR) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Exchange:
    """In rank 0: hands the bytes of the ranks around, with a thread for each rank."""

    def __init__(self, address: str, size: int) -> None:
        self._size = size
        self._listener = Listener(address, "AF_UNIX", backlog=size)
        self._changed = threading.Condition()
        self._collectives: dict[int, dict[int, tuple[Any, bytes]]] = {}  # by their number: the part of each rank
        self._messages: dict[tuple[int, int], list[bytes]] = {}  # by source and destination
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            for _ in range(self._size):
                threading.Thread(target=self._serve, args=(self._listener.accept(),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        number = 0
        try:
            rank = connection.recv()
            while True:
                kind, what, data = connection.recv()
                if kind == "collective":
                    connection.send(self._collective(number, rank, what, data))
                    number += 1
                elif kind == "send":
                    with self._changed:
                        self._messages.setdefault((rank, what), []).append(data)
                        self._changed.notify_all()
                    connection.send(None)
                else:
                    connection.send(self._message(what, rank))
        except (EOFError, OSError):
            connection.close()

    def _message(self, source: int, destination: int) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._messages.get((source, destination)))
            return self._messages[source, destination].pop(0)

    def _collective(self, number: int, rank: int, what: Any, data: bytes) -> list[bytes] | Exception:
        with self._changed:
            parts = self._collectives.setdefault(number, {})
            parts[rank] = what, data
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(parts) == self._size)
            self._collectives.pop(number, None)
        calls = {what for what, _ in parts.values()}
        if len(calls) > 1:
            return AssertionError(f"the ranks call NCCL differently: {calls}")
        return [parts[rank][1] for rank in range(self._size)]


def _connect(address: str) -> Connection:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return Client(address, "AF_UNIX")
        except ConnectionRefusedError:  # rank 0 does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _values(pointer: int, count: int, dtype: int) -> np.ndarray:
    """Returns a NumPy array over "device memory"."""
    import cupy

    kind = np.dtype(DTYPES[dtype])
    if count == 0:
        return np.empty(0, kind)
    if cupy.cuda.runtime.pointerGetAttributes(pointer).type != DEVICE:
        raise AssertionError(f"NCCL got {pointer:#x}, which is not device memory")
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(pointer), kind)


def _reduced(sources: list[bytes], dtype: int, op: int) -> np.ndarray:
    """Reduces in rank order; floating values in float64, and rounds once."""
    kind = np.dtype(DTYPES[dtype])
    wide = kind if kind.kind in "iu" else np.dtype(np.float64)
    with np.errstate(all="ignore"):  # a kernel of CuPy leaves memory as it was: any bits are possible
        parts = [np.frombuffer(source, kind).astype(wide) for source in sources]
        result = parts[0]
        for part in parts[1:]:
            result = UFUNCS[op](result, part)
        return (result / len(parts) if op == AVG else result).astype(kind)


def _check_integers(*arguments: Any) -> None:
    for argument in arguments:
        if type(argument) is not int:  # NumPy's integers would pass CuPy too, but cost time
            raise TypeError(f"NCCL takes integers, got {argument!r}")


def _error(code: int) -> Exception:
    from cupy.cuda import nccl

    error: Exception = nccl.NcclError(code)
    return error

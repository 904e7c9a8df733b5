"""Calls of the ranks, their format on a socket, and the reduction of several ranks' values."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, NamedTuple

import numpy as np

KINDS = (
    "allReduce",
    "reduce",
    "broadcast",
    "allGather",
    "reduceScatter",
    "send",
    "recv",
    "commDestroy",
    "connect",
)
SUM, PROD, MAX, MIN, AVG = range(5)
UINT8 = 1
_OP_NAMES = ("sum", "prod", "max", "min", "avg")
_DTYPE_NAMES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
)
_ITEM_SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2)
DTYPE_COUNT, OP_COUNT = len(_DTYPE_NAMES), len(_OP_NAMES)

_CALL = struct.Struct("<B?QiiiQ")  # kind, whether it ends its batch, count, dtype, op, root, bytes that follow
_REPLY = struct.Struct("<BQ")  # status, bytes that follow: a result, or the text of an error


class Call(NamedTuple):
    """One operation of one rank, without its data; `root` is the peer of a send and a recv."""

    kind: str
    count: int
    datatype: int
    op: int = SUM
    root: int = 0

    def __str__(self) -> str:
        details = [f"count {self.count}", _DTYPE_NAMES[self.datatype]]
        if self.kind in ("allReduce", "reduce", "reduceScatter"):
            details.append(_OP_NAMES[self.op])
        if self.kind in ("reduce", "broadcast"):
            details.append(f"root {self.root}")
        if self.is_message:
            details.append(f"peer {self.root}")
        return f"{self.kind}({', '.join(details)})"

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks."""
        return self.kind in ("send", "recv")

    @property
    def nbytes(self) -> int:
        """Bytes of `count` elements."""
        return self.count * _ITEM_SIZES[self.datatype]


class Gone(Exception):
    """The other end of a connection is closed."""


def waits_for_ever() -> bool:
    """Returns whether a missing peer means a hang, as with NCCL, instead of an error."""
    return os.environ.get("FAKE_CUPY_HANG") == "1"


def timeout_seconds() -> float:
    """Returns how long a peer may be missing."""
    return float(os.environ.get("FAKE_CUPY_TIMEOUT", "20"))


def send_call(connection: socket.socket, call: Call, ends_batch: bool, payload: np.ndarray | None) -> None:
    """Sends a call of this rank to the hub; `payload` is bytes."""
    size = 0 if payload is None else payload.size
    head = _CALL.pack(KINDS.index(call.kind), ends_batch, call.count, call.datatype, call.op, call.root, size)
    _send(connection, head, payload)


def receive_call(connection: socket.socket) -> tuple[Call, bool, np.ndarray]:
    """Returns the next call of a rank, whether it ends a batch, and its data as bytes."""
    head = _receive(connection, _CALL.size).tobytes()
    kind, ends_batch, count, datatype, op, root, size = _CALL.unpack(head)
    return Call(KINDS[kind], count, datatype, op, root), ends_batch, _receive(connection, size)


def send_reply(connection: socket.socket, status: int, payload: Any = b"") -> None:
    """Ends an operation of a rank."""
    data = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload.view(np.uint8)
    _send(connection, _REPLY.pack(status, data.size), data)


def receive_reply(connection: socket.socket) -> tuple[int, np.ndarray]:
    """Returns the status of an operation and its result, or the text of the error, as bytes."""
    status, size = _REPLY.unpack(_receive(connection, _REPLY.size).tobytes())
    return status, _receive(connection, size)


def _send(connection: socket.socket, head: bytes, payload: np.ndarray | None) -> None:
    try:
        if payload is None or payload.size < 65536:
            connection.sendall(head + (b"" if payload is None else payload.tobytes()))
        else:
            connection.sendall(head)
            connection.sendall(payload.data)
    except OSError:
        raise Gone from None


def _receive(connection: socket.socket, size: int) -> np.ndarray:
    data = np.empty(size, np.uint8)
    view, done = memoryview(data), 0
    while done < size:
        try:
            count = connection.recv_into(view[done:])
        except OSError:
            raise Gone from None
        if count == 0:
            raise Gone
        done += count
    return data


def numpy_dtype(datatype: int) -> np.dtype:
    """Returns NumPy's dtype for NCCL's code."""
    name = _DTYPE_NAMES[datatype]
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def reduce_contributions(contributions: list[np.ndarray], op: int) -> np.ndarray:
    """Reduces arrays as a ring does: each part of them begins on another rank, and is rounded at every hop.

    The average multiplies each contribution by 1 / n, both rounded to the dtype, as src/enqueue.cc has it.
    Min and max pass a NaN over where another rank has a number, as fminf and fmaxf do.
    Source: NCCL, src/device/all_reduce.h (runRing) and src/device/reduce_kernel.h.
    """
    ranks, dtype = len(contributions), contributions[0].dtype
    is_floating = dtype.kind in "fV"  # bfloat16 is of kind V
    wide = np.dtype(np.float32) if is_floating and dtype.itemsize == 2 else dtype
    function = {SUM: np.add, AVG: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}[op]
    parts = []
    with np.errstate(all="ignore"):
        if op == AVG and is_floating:
            factor = dtype.type(1 / ranks)
            contributions = [contribution * factor for contribution in contributions]
        for first, part in enumerate(zip(*(np.array_split(each, ranks) for each in contributions), strict=True), 1):
            result = part[first % ranks]
            for hop in range(1, ranks):
                added = part[(first + hop) % ranks]
                result = function(result.astype(wide), added.astype(wide)).astype(dtype)
            parts.append(result)
        result = np.concatenate(parts)
        return _divide(result, ranks) if op == AVG and not is_floating else result


def _divide(total: np.ndarray, count: int) -> np.ndarray:
    """Divides integers, rounded towards zero, as in C."""
    count = total.dtype.type(count)
    return (total - np.fmod(total, count)) // count

"""CuPy's binding of NCCL, over sockets. It checks more than NCCL does, and raises an error where NCCL would hang.

An operation meets its peers when its stream gets there, one of a device at a time. Reductions add up as a ring does,
and round at every hop. Ranks that meet for the first time are connected while the host waits: all before the first
collective, two before the first message between them, by all messages of their groups between the two. If the ranks
call different operations, or one rank does not call, the operation ends with undefined data, and check_async_error
names each rank's call. With FAKE_CUPY_HANG=1 it hangs without an error, as on a GPU; destroy then also hangs if
another rank does not call it.

Not modelled: commSplit, networks, speed and pressure on memory.
"""

from __future__ import annotations

from ._nccl_calls import SUM, Call
from ._nccl_communicator import BaseCommunicator, get_version, groupEnd, groupStart
from ._nccl_errors import NcclError
from ._nccl_hub import open_hub

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8 = 0
NCCL_UINT8 = 1
NCCL_INT32 = 2
NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = 3, 4, 5
NCCL_FLOAT16 = 6
NCCL_FLOAT32 = 7
NCCL_FLOAT64 = 8
NCCL_BFLOAT16 = 9

available = True

__all__ = [
    "NcclCommunicator",
    "NcclError",
    "get_build_version",
    "get_unique_id",
    "get_version",
    "groupEnd",
    "groupStart",
]


def get_build_version() -> int:
    """Returns the version that CuPy was built with."""
    return 22501


def get_unique_id() -> bytes:
    """Returns an id for a new communicator; it is served by this process."""
    return open_hub()


class NcclCommunicator(BaseCommunicator):
    """A communicator of this thread's device; returns when all ranks have made theirs.

    Args:
        ndev: number of ranks.
        commId: from get_unique_id of one of them.
        rank: this one.
    """

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        with self._call():
            self._check_codes(count, datatype, op)
            call = Call("allReduce", count, datatype, op)
            self._submit(call, (sendbuf, call.nbytes), (recvbuf, call.nbytes), stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        with self._call():
            self._check_codes(count, datatype, op, root)
            call = Call("reduce", count, datatype, op, root)
            self._submit(call, (sendbuf, call.nbytes), self._at(root, recvbuf, call.nbytes), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        with self._call():
            self._check_codes(count, datatype, SUM, root)
            call = Call("broadcast", count, datatype, root=root)
            self._submit(call, self._at(root, sendbuff, call.nbytes), (recvbuff, call.nbytes), stream)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        with self._call():
            self._check_codes(recvcount, datatype, op)
            call = Call("reduceScatter", recvcount, datatype, op)
            whole = call.nbytes * self._world_size
            self._submit(call, (sendbuf, whole), (recvbuf, call.nbytes), stream, self._rank * call.nbytes)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        with self._call():
            self._check_codes(count, datatype)
            call = Call("allGather", count, datatype)
            whole = call.nbytes * self._world_size
            self._submit(call, (sendbuf, call.nbytes), (recvbuf, whole), stream, -self._rank * call.nbytes)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        with self._call():
            self._check_codes(count, datatype, SUM, peer)
            call = Call("send", count, datatype, root=peer)
            self._submit(call, (sendbuf, call.nbytes), None, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        with self._call():
            self._check_codes(count, datatype, SUM, peer)
            call = Call("recv", count, datatype, root=peer)
            self._submit(call, None, (recvbuf, call.nbytes), stream)

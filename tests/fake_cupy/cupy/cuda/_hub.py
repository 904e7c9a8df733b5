"""Where the ranks of one communicator meet: threads of the process that made the unique id.

Every rank sends its calls with its data, and gets the results once all whom they concern have called. NCCL hangs, or
corrupts data, where ranks call different things; the hub then answers with an error that says what each rank called.
There are two hubs for a communicator: one for what the host waits for, and one for what streams do.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import secrets
import threading
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from ._errors import INTERNAL_ERROR, INVALID_USAGE, REMOTE_ERROR, NcclError

UNIQUE_ID_BYTES = 128
SUM, PROD, MAX, MIN, AVG = range(5)
OPS = ("sum", "prod", "max", "min", "avg")
DTYPES = tuple(
    np.dtype(dtype)
    for dtype in ("i1", "u1", "i4", "u4", "i8", "u8", np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
)
HOST, STREAMS = 0, 1  # the hubs


class Call(NamedTuple):
    """One operation of one rank, without its data.

    Attributes:
        kind: NCCL's name of it; or "connect" and "meet", by which all ranks or two of them meet for the first time.
        count, datatype, op: as NCCL has them.
        peer: the root; of messages and "meet" the other rank.
        ways: of "meet", the messages for which the two connect, as (sender, receiver).
    """

    kind: str
    count: int = 0
    datatype: int = 1
    op: int = SUM
    peer: int = 0
    ways: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_of_two(self) -> bool:
        return self.kind in ("send", "recv", "meet")

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.datatype].itemsize

    def __str__(self) -> str:
        text = (
            f"{self.kind}(count {self.count}, {DTYPES[self.datatype].name}, {OPS[self.op]}, root or peer {self.peer})"
        )
        return text if self.count else f"{self.kind}({self.peer})"


class Member(NamedTuple):
    """A rank that joins one of the hubs."""

    rank: int
    size: int
    hub: int
    host: str  # NCCL_HOSTID, or the host's name
    device: str  # bus id
    may_share_device: bool


def waits_for_ever() -> bool:
    """Whether a rank that does not come means a hang, as with NCCL, instead of an error."""
    return os.environ.get("FAKE_CUPY_HANG") == "1"


def open_hubs() -> bytes:
    """Starts the hubs, and gives the unique id: their address, in Linux's abstract namespace, which leaves no file."""
    host = os.environ.get("FAKE_CUPY_ADDRESS")
    listener = Listener((host, 0) if host else f"\0fake-nccl-{secrets.token_hex(16)}", backlog=64)
    threading.Thread(target=_serve, args=(listener,), name="NCCL hub", daemon=True).start()
    return repr(listener.address).encode().ljust(UNIQUE_ID_BYTES, b" ")


def join(unique_id: bytes, member: Member) -> list[Connection]:
    """The connections to both hubs, once all ranks have joined.

    Raises:
        NcclError: the ranks cannot form a communicator, or nobody serves this id.
    """
    connections = []
    try:
        for hub in (HOST, STREAMS):
            connections.append(Client(ast.literal_eval(unique_id.decode().rstrip(" "))))
            connections[hub].send(member._replace(hub=hub))
        for connection in connections:
            status, text = connection.recv()
            if status:
                raise NcclError(status, text)
    except (OSError, EOFError):
        raise NcclError(REMOTE_ERROR, "nobody serves this unique id any more") from None
    return connections


def _serve(listener: Listener) -> None:
    joined: list[tuple[Member, Connection]] = []
    with listener:  # afterwards nobody else belongs to this communicator
        while not joined or len(joined) < 2 * joined[0][0].size:
            connection = listener.accept()
            joined.append((connection.recv(), connection))
    joined.sort(key=lambda pair: pair[0].rank)
    answer = _refusal([member for member, _ in joined if member.hub == HOST]) or (0, "")
    for _, connection in joined:
        with contextlib.suppress(OSError):
            connection.send(answer)
    if answer[0] == 0:
        for hub in (HOST, STREAMS):
            connections = [connection for member, connection in joined if member.hub == hub]
            threading.Thread(target=_Hub(connections).run, name="NCCL hub", daemon=True).start()


def _refusal(members: list[Member]) -> tuple[int, str] | None:
    """Why these ranks cannot form a communicator; None if they can."""
    if [member.rank for member in members] != list(range(members[0].size)):
        return INVALID_USAGE, f"ranks {[member.rank for member in members]} of {members[0].size} have joined"
    for one, other in itertools.combinations(members, 2):
        share = (one.host, one.device) == (other.host, other.device)
        if share and not (one.may_share_device and other.may_share_device):
            return INVALID_USAGE, f"Duplicate GPU detected : rank {one.rank} and rank {other.rank} on {one.device}"
    return None


@dataclass(eq=False)
class _Operation:
    """A call of one rank, its data, and its result, once that is known."""

    call: Call
    data: np.ndarray
    result: np.ndarray | None = None


class _Refused(Exception):
    """The ranks cannot go on."""


class _Hub:
    """Answers the calls of the ranks, until they have left or failed.

    Args:
        connections: by rank.
    """

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections
        self._open = {connection: rank for rank, connection in enumerate(connections)}
        self._batches: list[list[_Operation]] = [[] for _ in connections]  # answered as a whole

    def run(self) -> None:
        try:
            while self._open:
                for connection in wait(list(self._open)):
                    self._take(connection, self._open[connection])
                self._match_collectives()
                self._match_pairs()
                for rank in reversed(range(len(self._batches))):  # rank 0, whose process this is, may end at once
                    self._answer(rank)
                self._look_for_hope()
        except _Refused as refused:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.send((refused.args[0], f"{refused.args[1]}; {self._describe()}"))
        for connection in self._connections:
            connection.close()

    def _take(self, connection: Connection, rank: int) -> None:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            del self._open[connection]
        else:
            self._batches[rank] = [_Operation(call, np.frombuffer(data, np.uint8)) for call, data in batch]

    def _match_collectives(self) -> None:
        """Finds the results of a collective that every rank has called."""
        if all(batch and not batch[0].call.is_of_two for batch in self._batches):
            operations = [batch[0] for batch in self._batches]
            call = operations[0].call
            if any(operation.call._replace(op=call.op) != call for operation in operations):  # operators are mixed
                self._refuse(INVALID_USAGE, "the ranks call different collectives")
            results = _results(call, [operation.data for operation in operations])
            for operation, result in zip(operations, results, strict=True):
                operation.result = result

    def _match_pairs(self) -> None:
        """Matches what two ranks call, in the order of each of them."""
        for rank, batch in enumerate(self._batches):
            for mine in batch:
                theirs = self._partner(mine, rank)
                if theirs is None:
                    continue
                if mine.call.ways != theirs.call.ways:  # Source: NCCL, src/transport.cc, ncclTransportP2pSetup
                    self._refuse(INTERNAL_ERROR, "Message truncated: two ranks connect by groups that differ")
                if mine.call.nbytes != theirs.call.nbytes:
                    self._refuse(INVALID_USAGE, "a message has another size than is expected")
                mine.result, theirs.result = theirs.data, mine.data

    def _partner(self, mine: _Operation, rank: int) -> _Operation | None:
        """What the other rank calls to go with it; searched from the receiver's side."""
        wanted = {"recv": "send", "meet": "meet"}.get(mine.call.kind)
        if wanted is None or mine.result is not None:
            return None
        for theirs in self._batches[mine.call.peer]:
            if theirs is not mine and (theirs.call.kind, theirs.call.peer) == (wanted, rank) and theirs.result is None:
                return theirs
        return None

    def _answer(self, rank: int) -> None:
        """Answers a batch when all its operations have results."""
        batch = self._batches[rank]
        if batch and all(operation.result is not None for operation in batch):
            self._batches[rank] = []
            with contextlib.suppress(OSError):  # the next look tells
                self._connections[rank].send((0, [operation.result.tobytes() for operation in batch]))

    def _look_for_hope(self) -> None:
        """Refuses calls that can never be answered any more."""
        if waits_for_ever():
            return
        if all(self._batches):
            self._refuse(INVALID_USAGE, "the ranks wait for each other")
        gone = set(range(len(self._batches))) - set(self._open.values())
        for operation in itertools.chain(*self._batches):
            if gone and (not operation.call.is_of_two or operation.call.peer in gone):
                self._refuse(REMOTE_ERROR, f"ranks {sorted(gone)} have left")

    def _refuse(self, status: int, text: str) -> NoReturn:
        raise _Refused(status, text)

    def _describe(self) -> str:
        calls = [" and ".join(str(o.call) for o in batch if o.result is None) for batch in self._batches]
        return ", ".join(f"rank {rank}: {text or 'nothing'}" for rank, text in enumerate(calls))


def _results(call: Call, contributions: list[np.ndarray]) -> list[np.ndarray]:
    """The result of a collective for each rank, as bytes."""
    ranks, nothing = range(len(contributions)), np.empty(0, np.uint8)
    if call.kind == "broadcast":
        return [contributions[call.peer]] * len(ranks)
    if call.kind == "allGather":
        return [np.concatenate(contributions)] * len(ranks)
    if call.kind in ("connect", "commDestroy"):
        return [nothing] * len(ranks)
    total = reduced([each.view(DTYPES[call.datatype]) for each in contributions], call.op).view(np.uint8)
    if call.kind == "reduce":
        return [total if rank == call.peer else nothing for rank in ranks]
    if call.kind == "reduceScatter":
        return [total[rank * call.nbytes : (rank + 1) * call.nbytes] for rank in ranks]
    return [total] * len(ranks)


def reduced(contributions: list[np.ndarray], op: int) -> np.ndarray:
    """Reduces arrays as a ring does: each part of them begins on another rank, and is rounded at every hop.

    The average multiplies each contribution by 1 / n, both rounded to the dtype, as src/enqueue.cc has it. Min and max
    pass a NaN over where another rank has a number, as fminf and fmaxf do. Integers are divided towards zero.
    Source: NCCL, src/device/all_reduce.h (runRing) and src/device/reduce_kernel.h.
    """
    ranks, dtype = len(contributions), contributions[0].dtype
    is_floating = dtype.kind in "fV"  # bfloat16 is of kind V
    wide = np.dtype(np.float32) if is_floating and dtype.itemsize == 2 else dtype
    function = {SUM: np.add, AVG: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}[op]
    parts = []
    with np.errstate(all="ignore"):
        if op == AVG and is_floating:
            contributions = [contribution * dtype.type(1 / ranks) for contribution in contributions]
        for first, part in enumerate(zip(*(np.array_split(each, ranks) for each in contributions), strict=True), 1):
            result = part[first % ranks]
            for hop in range(1, ranks):
                added = part[(first + hop) % ranks]
                result = function(result.astype(wide), added.astype(wide)).astype(dtype)
            parts.append(result)
        total = np.concatenate(parts)
        if op == AVG and not is_floating:
            total = (total - np.fmod(total, dtype.type(ranks))) // dtype.type(ranks)
        return total

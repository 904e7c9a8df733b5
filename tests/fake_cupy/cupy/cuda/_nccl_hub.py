"""Where the ranks of one communicator meet: a thread of the process that made the unique id.

NCCL hangs, or corrupts data, if ranks call different operations. Here every rank sends its call with its data, and the
hub answers when all ranks have. If the ranks cannot meet any more, it answers with an error that names their calls.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import numpy as np

from ._nccl_calls import (
    Call,
    Gone,
    numpy_dtype,
    receive_call,
    receive_reply,
    reduce_contributions,
    send_reply,
    timeout_seconds,
    waits_for_ever,
)
from ._nccl_errors import INTERNAL_ERROR, INVALID_USAGE, REMOTE_ERROR, NcclError

UNIQUE_ID_BYTES = 128
_NOTHING = np.empty(0, np.uint8)


class Membership(NamedTuple):
    """A rank that joins."""

    rank: int
    world_size: int
    host: str  # NCCL_HOSTID, or the host's name
    pci_bus_id: str
    may_share_device: bool


_OWN_ADDRESS = "FAKE_CUPY_ADDRESS"
_TCP = b"tcp:"
_DIAL_SECONDS = 10.0


class _Refused(Exception):
    """The ranks cannot form a communicator, or cannot go on."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def open_hub() -> bytes:
    """Starts a hub and returns the unique id: its address, in Linux's abstract namespace, which leaves no file.

    Ranks of other machines do not reach that; for them _OWN_ADDRESS, where it is set, is the interface to listen on.
    """
    host = os.environ.get(_OWN_ADDRESS)
    if host is None:
        listener = socket.socket(socket.AF_UNIX)
        name = f"gradsync-stand-in-{secrets.token_hex(16)}".encode()
        listener.bind(b"\0" + name)
    else:
        listener = socket.create_server((host, 0))
        name = _TCP + f"{host}:{listener.getsockname()[1]}".encode()
    listener.listen(64)
    threading.Thread(target=_serve, args=(listener,), name="NCCL hub", daemon=True).start()
    return name.ljust(UNIQUE_ID_BYTES, b"\0")


def _dial(unique_id: bytes) -> socket.socket:
    name = unique_id.rstrip(b"\0")
    if name.startswith(_TCP):
        host, _, port = name.removeprefix(_TCP).decode().rpartition(":")
        return socket.create_connection((host, int(port)), _DIAL_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(b"\0" + name)
    except OSError:
        connection.close()
        raise
    return connection


def connect(unique_id: bytes, membership: Membership) -> socket.socket:
    """Joins a communicator; returns once all ranks have.

    Raises:
        NcclError: the ranks cannot form a communicator, or nobody serves this id.
    """
    try:
        connection = _dial(unique_id)
    except OSError:
        raise NcclError(REMOTE_ERROR, "nobody serves this unique id any more") from None
    connection.settimeout(None)
    try:
        send_reply(connection, 0, msgpack.packb(membership))
        status, text = receive_reply(connection)
        if status:
            raise NcclError(status, text.tobytes().decode())
    except (OSError, Gone):
        connection.close()
        raise NcclError(REMOTE_ERROR, "nobody serves this unique id any more") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _serve(listener: socket.socket) -> None:
    connections: list[socket.socket] = []
    try:
        ranks = _gather(listener, connections)
        listener.close()  # nobody else belongs to this communicator
        for connection in ranks:
            with contextlib.suppress(Gone):  # which its next read tells
                send_reply(connection, 0)
        _Hub(ranks).run()
    except Gone:
        pass  # its peers learn it from the end of their connections
    except _Refused as refused:
        for connection in connections:
            with contextlib.suppress(Gone):
                send_reply(connection, refused.status, str(refused).encode())
    finally:
        listener.close()
        for connection in connections:
            connection.close()


def _gather(listener: socket.socket, connections: list[socket.socket]) -> list[socket.socket]:
    """Waits until every rank has joined, the first one without a limit; returns their connections by rank."""
    members: list[Membership] = []
    deadline = math.inf
    while not members or len(members) < members[0].world_size:
        connection = _accept(listener, deadline)
        if connection is None:
            missing = sorted(set(range(members[0].world_size)) - {member.rank for member in members})
            raise _Refused(REMOTE_ERROR, f"ranks {missing} of {members[0].world_size} did not join in time")
        connections.append(connection)
        member = Membership(*msgpack.unpackb(receive_reply(connection)[1].tobytes()))
        if members and member.world_size != members[0].world_size:
            raise _Refused(INVALID_USAGE, f"one joins {members[0].world_size} ranks, another {member.world_size}")
        if any(member.rank == other.rank for other in members):
            raise _Refused(INVALID_USAGE, f"rank {member.rank} joined twice")
        if not members and not waits_for_ever():
            deadline = time.monotonic() + timeout_seconds()
        members.append(member)
    _check_devices(members)
    return [connection for _, connection in sorted(zip(members, connections, strict=True), key=_rank_of)]


def _rank_of(joined: tuple[Membership, socket.socket]) -> int:
    return joined[0].rank


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
    """Returns the next connection, or None at the deadline."""
    if deadline < math.inf:
        listener.settimeout(max(deadline - time.monotonic(), 1e-3))
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return None
    connection.settimeout(None)
    return connection


def _check_devices(members: list[Membership]) -> None:
    """Refuses two ranks on one device, where NCCL does."""
    taken: dict[tuple[str, str], Membership] = {}
    for member in sorted(members):
        other = taken.setdefault((member.host, member.pci_bus_id), member)
        if other is not member and not (other.may_share_device and member.may_share_device):
            raise _Refused(
                INVALID_USAGE,
                f"Duplicate GPU detected : rank {member.rank} and rank {other.rank} both on CUDA device "
                f"{member.pci_bus_id}",
            )


@dataclass(eq=False)
class _Operation:
    """A call of one rank, its data as bytes, and its result, once that is known."""

    call: Call
    payload: np.ndarray
    result: np.ndarray | None = None


class _Hub:
    """Answers the calls of the ranks, until they have left or failed.

    Args:
        connections: by rank.
    """

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = connections
        self._ranks = range(len(connections))
        self._batches: list[list[_Operation]] = [[] for _ in self._ranks]  # answered as a whole, in order
        self._stuck: set[int] = set()  # have sent a whole batch, and wait for the answer
        self._gone: set[int] = set()
        self._connected: set[tuple[int, int]] = set()  # for messages, by sender and receiver
        self._selector = selectors.DefaultSelector()
        for rank, connection in enumerate(connections):
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def run(self) -> None:
        """Serves; raises _Refused when the ranks cannot go on."""
        with self._selector:
            while len(self._gone) < len(self._ranks):
                is_waiting = any(self._batches) and not waits_for_ever()
                ready = self._selector.select(timeout_seconds() if is_waiting else None)
                if not ready:
                    raise _Refused(REMOTE_ERROR, f"a peer did not come in time; {self._describe()}")
                for key, _ in ready:
                    self._take(key.data)
                self._match_collectives()
                self._match_messages()
                for rank in sorted(self._stuck, reverse=True):  # rank 0, whose process this is, may end at once
                    self._answer(rank)
                self._check_hope()

    def _take(self, rank: int) -> None:
        try:
            call, ends_batch, payload = receive_call(self._connections[rank])
        except Gone:
            self._selector.unregister(self._connections[rank])
            self._gone.add(rank)
            return
        self._batches[rank].append(_Operation(call, payload))
        if ends_batch:
            self._stuck.add(rank)

    def _match_collectives(self) -> None:
        """Finds the results of a collective that every rank has called."""
        if not all(batch and not batch[0].call.is_message for batch in self._batches):
            return
        operations = [batch[0] for batch in self._batches]
        if any(operation.call != operations[0].call for operation in operations):
            raise _Refused(INVALID_USAGE, f"the ranks call different collectives; {self._describe()}")
        results = _results(operations[0].call, [operation.payload for operation in operations])
        for operation, result in zip(operations, results, strict=True):
            operation.result = result

    def _match_messages(self) -> None:
        """Matches messages that were sent with messages that are wanted, in the order of each pair of ranks."""
        for target in self._ranks:
            for wanted in self._batches[target]:
                sent = self._find_sent(wanted, target)
                if sent is None or not self._connect(wanted.call.root, target):
                    continue
                if sent.call.nbytes != wanted.call.nbytes:
                    raise _Refused(INVALID_USAGE, f"a message has another size than was wanted; {self._describe()}")
                wanted.result, sent.result = sent.payload, _NOTHING

    def _connect(self, sender: int, receiver: int) -> bool:
        """Connects two ranks for a message; returns whether they are.

        NCCL does it for all messages that a group has between the two, both ways at once, and takes from the peer's
        group as much as it has itself. Source: NCCL, src/transport.cc, ncclTransportP2pSetup.
        """
        if (sender, receiver) in self._connected:
            return True
        if not {sender, receiver} <= self._stuck:
            return False  # a part of the group is still to come
        both = [self._new_ways(sender, receiver), self._new_ways(receiver, sender)]
        if both[0] != both[1]:
            raise _Refused(
                INTERNAL_ERROR, f"Message truncated: two ranks connect by groups that differ; {self._describe()}"
            )
        self._connected |= both[0]
        return True

    def _new_ways(self, rank: int, peer: int) -> set[tuple[int, int]]:
        """Returns the ways between two ranks that the group of one of them needs and that are not connected yet."""
        calls = [operation.call for operation in self._batches[rank] if operation.call.is_message]
        ways = {(rank, peer) if call.kind == "send" else (peer, rank) for call in calls if call.root == peer}
        return ways - self._connected

    def _find_sent(self, wanted: _Operation, target: int) -> _Operation | None:
        if wanted.call.kind == "recv" and wanted.result is None:
            for sent in self._batches[wanted.call.root]:
                if sent.call.kind == "send" and sent.call.root == target and sent.result is None:
                    return sent
        return None

    def _answer(self, rank: int) -> None:
        """Answers a batch when all its operations have results."""
        results = [operation.result for operation in self._batches[rank]]
        if any(result is None for result in results):
            return
        self._batches[rank].clear()
        self._stuck.discard(rank)
        with contextlib.suppress(Gone):  # which the next read tells
            for result in results:
                send_reply(self._connections[rank], 0, result)

    def _check_hope(self) -> None:
        """Raises when a call can never be answered any more."""
        if len(self._stuck) == len(self._ranks):
            raise _Refused(INVALID_USAGE, f"the ranks wait for each other; {self._describe()}")
        if self._gone and not waits_for_ever():
            for operation in itertools.chain(*self._batches):
                if operation.result is None and (not operation.call.is_message or operation.call.root in self._gone):
                    raise _Refused(REMOTE_ERROR, f"a peer has left; {self._describe()}")

    def _describe(self) -> str:
        return ", ".join(f"rank {rank}: {self._state(rank)}" for rank in self._ranks)

    def _state(self, rank: int) -> str:
        calls = " and ".join(str(operation.call) for operation in self._batches[rank] if operation.result is None)
        return calls or ("left" if rank in self._gone else "nothing")


def _results(call: Call, payloads: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the result of a collective for each rank, from the data of each rank, as bytes."""
    ranks = range(len(payloads))
    if call.kind == "broadcast":
        return [_NOTHING if rank == call.root else payloads[call.root] for rank in ranks]
    if call.kind in ("commDestroy", "connect"):
        return [_NOTHING for _ in ranks]
    if call.kind == "allGather":
        return [np.concatenate(payloads)] * len(payloads)
    dtype = numpy_dtype(call.datatype)
    total = reduce_contributions([payload.view(dtype) for payload in payloads], call.op).view(np.uint8)
    if call.kind == "reduce":
        return [total if rank == call.root else _NOTHING for rank in ranks]
    if call.kind == "reduceScatter":
        return [total[rank * call.nbytes : (rank + 1) * call.nbytes] for rank in ranks]
    return [total] * len(payloads)

"""A backend over pipes between processes of one host: a whole one, as short as it can be.

docs/architecture.md walks through it. The contract suite passes on it; it is not made to be fast. Every rank has a pipe
to every other one. A frame is a kind, one byte, and data; frames of one kind from one rank keep their order.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import SimpleQueue
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, LayoutsDiffer, mismatch
from gradsync.communicators.backend import Backend, Bounds, Message, part_of
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause, exchange_mismatch, raise_if_left
from gradsync.errors import RankFailed
from gradsync.launchers import RankEnvironment, WorldSettings
from gradsync.machine import run_with_timeout
from gradsync.reduction import Array, ReduceOp, reduce_into
from gradsync.rendezvous.client import RendezvousClient

# The kinds of frames: of collectives, and of messages, where the sender and the receiver have kinds of their own.
DIGEST, DATA, OFFER, ANSWER, MESSAGE, TEXTS = b"D", b"d", b"o", b"a", b"m", {b"o": b"O", b"a": b"A"}
_LOOK_EVERY_SECONDS = 0.05

Arrays, Messages = Sequence[Array], Sequence[Message]


def check(_place: RankEnvironment) -> None:
    """See BackendModule."""


def offer(_settings: WorldSettings) -> str:
    """See BackendModule."""
    return ""


def connect(client: RendezvousClient, settings: WorldSettings, group: str) -> PipeBackend:
    """See BackendModule."""
    return connect_pipes(client, group=group, timeout_seconds=settings.collective_timeout_seconds)


def connect_pipes(client: RendezvousClient, *, group: str, timeout_seconds: float) -> PipeBackend:
    """Returns the backend of all ranks of a client. Every rank must call it with the same group."""
    deadline = time.monotonic() + timeout_seconds
    key = secrets.token_bytes(16)
    pipes: dict[int, Connection] = {}
    with Listener(family="AF_UNIX", authkey=key, backlog=client.world_size) as listener:
        mine = key + str(listener.address).encode()
        others = client.exchange(f"pipes/{group}", mine, timeout_seconds=timeout_seconds)
        for rank, theirs in enumerate(others[: client.rank]):
            pipes[rank] = Client(theirs[16:].decode(), authkey=theirs[:16])
            pipes[rank].send(client.rank)
        while len(pipes) < client.world_size - 1:
            pipe = run_with_timeout(listener.accept, "pipes-accept", deadline - time.monotonic(), client.check)
            pipes[pipe.recv()] = pipe
    return PipeBackend(pipes, client, group, timeout_seconds)


class PipeBackend(Backend):
    """See Backend."""

    name = "pipes"
    client: RendezvousClient

    def __init__(
        self, pipes: dict[int, Connection], client: RendezvousClient, group: str, timeout_seconds: float
    ) -> None:
        super().__init__(client, group, timeout_seconds)
        self._peers = {pipe: peer for peer, pipe in pipes.items()}
        self._outgoing: dict[int, SimpleQueue[bytes | None]] = {peer: SimpleQueue() for peer in pipes}
        for peer, pipe in pipes.items():
            threading.Thread(target=_write, args=(pipe, self._outgoing[peer]), daemon=True).start()
        self._came: dict[tuple[int, bytes], deque[bytes]] = defaultdict(deque)
        # The messages to (OFFER) and from (ANSWER) each peer, in order; only the first one moves.
        self._moving: dict[tuple[int, bytes], deque[Iterator[None]]] = defaultdict(deque)
        self._failures = FailureMonitor(client, self.recorder)
        self._departures = f"pipes/{group}/closed"
        self._begun = 0

    # -- Collectives -------------------------------------------------------------------------------------------

    def all_reduce(
        self, sources: Arrays, targets: Arrays, op: ReduceOp, agreement: Agreement, factor: float = 1.0
    ) -> None:
        self.barrier(agreement)
        if factor != 1.0:
            self.arrays.multiply_in_place(sources, factor)
        for source, target in zip(sources, targets, strict=True):
            self._reduce_into(source, [slice(None)] * self.world_size, target, op)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self.barrier(agreement)
        self._reduce_into(source, [part_of(bounds, rank) for rank in range(self.world_size)], target, op)

    def _reduce_into(self, source: Array, parts: Sequence[slice], target: Array, op: ReduceOp) -> None:
        """Sends each rank its part; reduces what comes for this one, in the order of the ranks."""
        came = [np.frombuffer(data, source.dtype) for data in self._deal([source[part].tobytes() for part in parts])]
        with np.errstate(all="ignore"):
            reduce_into(op, came, target)

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self.barrier(agreement)
        for flat in flats:
            if self.rank == root:
                for peer in self._outgoing:
                    self._send(peer, DATA, flat.tobytes())
            else:
                _fill(flat, self._receive(root, DATA))

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self.barrier(agreement)
        for rank, data in enumerate(self._deal([source.tobytes()] * self.world_size)):
            _fill(target[part_of(bounds, rank)], data)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self.barrier(agreement)
        parts = [source[part_of(send_bounds, rank)].tobytes() for rank in range(self.world_size)]
        for rank, data in enumerate(self._deal(parts)):
            _fill(target[part_of(receive_bounds, rank)], data)

    def barrier(self, agreement: Agreement) -> None:
        """Compares the digests of all ranks; every collective begins with it."""
        self._begun += 1
        digests = self._deal([_identity(agreement)] * self.world_size, DIGEST)
        if len({digest[:8] for digest in digests}) > 1:
            group = self._failures.group
            raise exchange_mismatch(self.client, group, self._begun, self.label, agreement, self.ranks)
        if len(set(digests)) > 1:
            raise LayoutsDiffer

    # -- Messages ----------------------------------------------------------------------------------------------

    def exchange(
        self, sends: Messages, receives: Messages, awaited: Collection[Message] = (), seconds: float | None = None
    ) -> None:
        to_self, from_self = ([one for one in messages if one.peer == self.rank] for messages in (sends, receives))
        for send, receive in zip(to_self, from_self, strict=True):
            _fill(receive.flat, send.flat.tobytes())
            send.end()
            receive.end()
        self._start(sends, OFFER, ANSWER)
        self._start(receives, ANSWER, OFFER)
        self._pump(0.0)
        self._wait(lambda: [message.peer for message in awaited if not message.is_over], math.inf, seconds)

    def _start(self, messages: Messages, own: bytes, other: bytes) -> None:
        for message in messages:
            if message.peer != self.rank:
                self._send(message.peer, own, _identity(message.agreement))
                self._moving[message.peer, own].append(self._run(message, own, other))

    def _run(self, message: Message, own: bytes, other: bytes) -> Iterator[None]:
        """Moves one message; yields where it has to wait."""
        peer, texts = message.peer, self._came[message.peer, TEXTS[other]]
        while not self._came[peer, other]:
            yield
        if self._came[peer, other].popleft() != _identity(message.agreement):
            mine = message.agreement.described()
            self._send(peer, TEXTS[own], mine.to_text().encode())
            while not texts:
                yield
            theirs = Description.from_text(texts.popleft().decode())
            both = {self.ranks[self.rank]: mine, self.ranks[peer]: theirs}
            return self._start(message.end(mismatch(self.label, message.agreement, both)), own, other)
        if own == OFFER:
            self._send(peer, MESSAGE, message.flat.tobytes())
        else:
            while not self._came[peer, MESSAGE]:
                yield
            _fill(message.flat, self._came[peer, MESSAGE].popleft())
        self._start(message.end(), own, other)

    # -- The pipes ---------------------------------------------------------------------------------------------

    def _deal(self, parts: Sequence[bytes], kind: bytes = DATA) -> list[bytes]:
        """Sends each rank its part; returns what every rank has for this one."""
        for peer in self._outgoing:
            self._send(peer, kind, parts[peer])
        return [parts[r] if r == self.rank else self._receive(r, kind) for r in range(self.world_size)]

    def _send(self, peer: int, kind: bytes, data: bytes) -> None:
        """Never waits: a thread writes, so that two ranks may send to each other at once."""
        self._outgoing[peer].put(kind + data)

    def _receive(self, peer: int, kind: bytes) -> bytes:
        came = self._came[peer, kind]
        self._wait(lambda: [] if came else [peer], self._begun - 1)
        return came.popleft()

    def _wait(self, missing: Callable[[], list[int]], position: float, seconds: float | None = None) -> None:
        """Reads the pipes and moves messages while ranks are missing; `position` is for raise_if_left."""
        began = time.monotonic()
        until = math.inf if seconds is None else began + seconds
        while (peers := missing()) and time.monotonic() < until:
            if self._pump(_LOOK_EVERY_SECONDS):
                continue
            waited_seconds, whom = time.monotonic() - began, [self.ranks[rank] for rank in peers]
            self._look(position, whom)
            if ended := [self.ranks[rank] for rank in peers if rank not in self._peers.values()]:
                await_cause(CAUSE_SECONDS, lambda: self._look(position, ended))
                raise RankFailed(f"{self.label}: the pipe to rank {ended[0]} has ended", rank=ended[0])
            self._failures.warn(waited_seconds, whom)
            if waited_seconds > self.timeout_seconds:
                self._failures.time_out(waited_seconds, whom)

    def _pump(self, seconds: float) -> bool:
        """Reads what comes within some seconds, and moves messages as far as they go; whether anything came."""
        pipes = wait(self._peers, seconds)
        for pipe in pipes:
            try:
                frame = pipe.recv_bytes()
                self._came[self._peers[pipe], frame[:1]].append(frame[1:])
            except (EOFError, OSError):  # the peer has ended the communicator, or has died
                del self._peers[pipe]
        for moving in list(self._moving.values()):
            while moving and next(moving[0], moving) is moving:  # it has ended
                moving.popleft()
        return bool(pipes)

    def _look(self, position: float, ranks: Sequence[int]) -> None:
        """Raises why a wait for these ranks is in vain, where it is."""
        self._failures.check()
        raise_if_left(self.client, self._departures, self.label, position, ranks)

    # -- Groups and the end ------------------------------------------------------------------------------------

    def connect_group(self, members: tuple[int, ...], name: str) -> PipeBackend:
        return connect_pipes(self.client.group(members, name), group=name, timeout_seconds=self.timeout_seconds)

    def raise_if_ended(self, missing: list[int]) -> None:
        self._look(math.inf, [self.ranks[rank] for rank in missing])

    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        if aborted_because is None:
            self.client.announce_left(self._departures, self._begun)
        elif not self._failures.was_raised:
            self.client.report_failure(aborted_because, culprit=culprit)

    def release(self) -> None:
        for frames in self._outgoing.values():
            frames.put(None)


def _write(pipe: Any, frames: SimpleQueue[bytes | None]) -> None:
    """Writes frames to a pipe, in a thread of its own; closes the pipe after the last one."""
    for frame in iter(frames.get, None):
        with suppress(OSError):  # the peer is gone: whoever reads finds out
            pipe.send_bytes(frame)
    pipe.close()


def _fill(target: Array, data: bytes) -> None:
    target[...] = np.frombuffer(data, target.dtype)


def _identity(agreement: Agreement) -> bytes:
    return agreement.digest.to_bytes(8, "big") + agreement.layout.to_bytes(8, "big")

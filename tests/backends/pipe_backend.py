"""A backend over pipes between processes of one host: a whole one, as short as it can be.

docs/architecture.md walks through it. The contract suite passes on it; it is not made to be fast. Every rank has a pipe
to every other one. A frame is a kind, one byte, and data; frames of one kind from one rank keep their order.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, mismatch
from gradsync.communicators.backend import Backend, Bounds, Message, part_of
from gradsync.communicators.failures import (
    CAUSE_SECONDS,
    FailureMonitor,
    await_cause,
    exchange_descriptions,
    raise_if_left,
)
from gradsync.environment import RankEnvironment, WorldSettings
from gradsync.errors import RankFailed
from gradsync.machine import run_with_timeout
from gradsync.reduction import Array, ReduceOp, reduce_into
from gradsync.rendezvous.client import RendezvousClient

DIGEST, DATA, OFFER, ANSWER, MESSAGE = b"D", b"d", b"o", b"a", b"m"
_LOOK_EVERY_SECONDS = 0.05


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
            left_seconds = deadline - time.monotonic()
            pipe = run_with_timeout(listener.accept, "pipes-accept", left_seconds, client.check)
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
        self._pipes = pipes
        self._writers = {peer: _Writer(pipe) for peer, pipe in pipes.items()}
        self._came: dict[tuple[int, bytes], deque[bytes]] = defaultdict(deque)
        self._failures = FailureMonitor(client, self.recorder)
        self._departures = f"pipes/{group}/closed"
        self._begun = 0

    # -- Reductions --------------------------------------------------------------------------------------------

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        self.agree(agreement)
        for source, target in zip(sources, targets, strict=True):
            self._reduce_into(source, [slice(None)] * self.world_size, target, op)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self.agree(agreement)
        self._reduce_into(source, [part_of(bounds, rank) for rank in range(self.world_size)], target, op)

    def _reduce_into(self, source: Array, parts: Sequence[slice], target: Array, op: ReduceOp) -> None:
        """Sends each rank its part; reduces what comes for this one, in the order of the ranks."""
        came = self._deal([source[part].tobytes() for part in parts])
        with np.errstate(all="ignore"):
            reduce_into(op, [np.frombuffer(data, source.dtype) for data in came], target)

    # -- Movements ---------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        for flat in flats:
            if self.rank == root:
                for peer in self._pipes:
                    self._send(peer, DATA, flat.tobytes())
            else:
                _fill(flat, self._receive(root, DATA))

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self.agree(agreement)
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
        self.agree(agreement)
        parts = [source[part_of(send_bounds, rank)].tobytes() for rank in range(self.world_size)]
        for rank, data in enumerate(self._deal(parts)):
            _fill(target[part_of(receive_bounds, rank)], data)

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        if send is not None and receive is not None and send.peer == self.rank:
            _fill(receive.flat, send.flat.tobytes())
            return
        ways = [(send, OFFER, ANSWER), (receive, ANSWER, OFFER)]
        for message, own, _ in ways:
            if message is not None:
                self._send(message.peer, own, message.agreement.digest.to_bytes(8, "big"))
        refused = None
        for message, own, other in ways:
            if message is None:
                continue
            if self._receive(message.peer, other) == message.agreement.digest.to_bytes(8, "big"):
                if message is send:
                    self._send(message.peer, MESSAGE, message.flat.tobytes())
                else:
                    _fill(message.flat, self._receive(message.peer, MESSAGE))
                continue
            text = message.agreement.described().to_text()
            self._send(message.peer, own, text.encode())
            texts = {self.rank: text, message.peer: self._receive(message.peer, other).decode()}
            descriptions = {self.ranks[rank]: Description.from_text(each) for rank, each in texts.items()}
            refused = refused or mismatch(self.label, message.agreement, descriptions)
        if refused is not None:
            raise refused

    # -- Meeting -----------------------------------------------------------------------------------------------

    def agree(self, agreement: Agreement) -> None:
        self._begun += 1
        if len(set(self._deal([agreement.digest.to_bytes(8, "big")] * self.world_size, DIGEST))) > 1:
            text = agreement.described().to_text()
            descriptions = exchange_descriptions(self.client, self._failures.group, self._begun, text, self.ranks)
            raise mismatch(self.label, agreement, descriptions)

    def connect_group(self, members: tuple[int, ...], name: str) -> PipeBackend:
        client = self.client.group(members, name)
        return connect_pipes(client, group=name, timeout_seconds=self.timeout_seconds)

    def raise_if_ended(self, missing: list[int]) -> None:
        self._look(math.inf, [self.ranks[rank] for rank in missing])

    # -- The pipes ---------------------------------------------------------------------------------------------

    def _deal(self, parts: Sequence[bytes], kind: bytes = DATA) -> list[bytes]:
        """Sends each rank its part; returns what every rank has for this one."""
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            self._send(peer, kind, parts[peer])
        return [parts[r] if r == self.rank else self._receive(r, kind) for r in range(self.world_size)]

    def _send(self, peer: int, kind: bytes, data: bytes) -> None:
        """Never waits: a thread writes, so that two ranks may send to each other at once."""
        self._writers[peer].frames.put(kind + data)

    def _receive(self, peer: int, kind: bytes) -> bytes:
        came, began = self._came[peer, kind], time.monotonic()
        position = math.inf if kind in (OFFER, ANSWER, MESSAGE) else self._begun - 1
        whom = [self.ranks[peer]]
        while not came:
            try:
                if self._pipes[peer].poll(_LOOK_EVERY_SECONDS):
                    frame = self._pipes[peer].recv_bytes()
                    self._came[peer, frame[:1]].append(frame[1:])
                    continue
            except (EOFError, OSError) as error:
                await_cause(CAUSE_SECONDS, lambda: self._look(position, whom))
                raise RankFailed(f"{self.label}: the pipe to rank {whom[0]} has ended", rank=whom[0]) from error
            waited_seconds = time.monotonic() - began
            self._look(position, whom)
            self._failures.warn(waited_seconds, whom)
            if waited_seconds > self.timeout_seconds:
                self._failures.time_out(waited_seconds, whom)
        return came.popleft()

    def _look(self, position: float, ranks: Sequence[int]) -> None:
        """Raises why a wait for these ranks is in vain, where it is."""
        self._failures.check()
        raise_if_left(self.client, self._departures, self.label, position, ranks)

    # -- Ending ------------------------------------------------------------------------------------------------

    def announce_close(self) -> None:
        self.client.announce_left(self._departures, self._begun)

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        if not self._failures.was_raised:
            self.client.report_failure(reason, culprit=culprit)

    def release(self) -> None:
        for writer in self._writers.values():
            writer.frames.put(None)


class _Writer:
    """Writes frames to a pipe from a thread of its own; closes the pipe after the last one."""

    def __init__(self, pipe: Connection) -> None:
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(pipe,), name="pipes-writer", daemon=True).start()

    def _run(self, pipe: Any) -> None:
        try:
            for frame in iter(self.frames.get, None):
                pipe.send_bytes(frame)
        except OSError:
            pass  # the peer is gone: whoever reads finds out
        finally:
            pipe.close()


def _fill(target: Array, data: bytes) -> None:
    target[...] = np.frombuffer(data, target.dtype)

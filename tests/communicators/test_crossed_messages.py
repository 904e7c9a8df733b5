"""Messages over shared memory: what is sent arrives, whole and in order, and what cannot is told to both ranks."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.shared_memory import barrier as shared_barrier
from gradsync.communicators.shared_memory.barrier import SharedBarrier, header_bytes
from gradsync.communicators.shared_memory.point_to_point import PointToPoint
from gradsync.diagnostics.recorder import FlightRecorder

BARRIER = agreement_on("barrier", (), None, "")


class SilentClient:
    """A connection to a server that has nothing to say."""

    def check(self) -> None:
        """No rank has failed."""

    def has_failed(self) -> bool:
        return False

    def report_waiting(self, *report: Any) -> None:
        """Nobody reads it."""


class Rank:
    """One rank of a communicator that has nothing but messages and a barrier.

    Attributes:
        client: what it hears from the server.
    """

    def __init__(
        self, memory: memoryview, rank: int, world_size: int, timeout_seconds: float, ranks: tuple[int, ...] | None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.client = SilentClient()
        recorder = FlightRecorder("world")
        recorder.begin(agreement_on("recv", (), None, ""))
        told = FailureMonitor(self.client, recorder)  # type: ignore[arg-type]
        header = header_bytes(world_size)
        self.barrier = SharedBarrier(memory[:header], rank, world_size, timeout_seconds, told, ranks=ranks)
        self.channels = PointToPoint(memory[header:], rank, world_size, self.barrier)

    def send(self, data: Any, peer: int) -> None:
        self.channels.move(message(data, peer), None)

    def receive(self, data: Any, peer: int) -> Any:
        self.channels.move(None, message(data, peer))
        return data

    def exchange(self, data: Any, to: int, into: Any, source: int) -> Any:
        self.channels.move(message(data, to), message(into, source))
        return into

    def meet(self) -> None:
        self.barrier.meet(BARRIER)


def message(data: Any, peer: int) -> Message:
    return Message(peer, data.view(np.uint8), agreement_on("message", data.shape, data.dtype, ""))


def ranks_of(world_size: int, timeout_seconds: float = 30.0, ranks: tuple[int, ...] | None = None) -> list[Rank]:
    memory = memoryview(mmap.mmap(-1, header_bytes(world_size) + PointToPoint.bytes_for(world_size)))
    return [Rank(memory, rank, world_size, timeout_seconds, ranks) for rank in range(world_size)]


def run(ranks: list[Rank], *functions: Callable[[Rank], Any]) -> list[Any]:
    """Calls a function on every rank, each in a thread; one function alone is for all. Returns results or errors."""
    outcomes: list[Any] = [None] * len(ranks)

    def call(rank: Rank) -> None:
        try:
            outcomes[rank.rank] = functions[rank.rank % len(functions)](rank)
        except Exception as error:
            outcomes[rank.rank] = error

    threads = [threading.Thread(target=call, args=[rank], daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


def until(holds: Callable[[], Any]) -> None:
    """Returns once something holds that another thread is about to do."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0)


def values(size: int, seed: int = 0) -> Any:
    return np.random.default_rng([size, seed]).integers(0, 256, size, np.uint8)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found while waiting must be certain, however early somebody looks."""
    monkeypatch.setattr(shared_barrier, "_LOOK_FOR_FAILURES_EVERY_SECONDS", 0.0)


# What is sent arrives.


# What disagrees.


def told(errors: list[Any], *members: int) -> list[gs.PlanMismatch]:
    """Checks that these ranks got the same PlanMismatch; returns theirs."""
    mismatches = [errors[member] for member in members]
    for error in mismatches:
        assert isinstance(error, gs.PlanMismatch), errors
        assert error.descriptions == mismatches[0].descriptions
        assert str(error).partition(": ")[2] == str(mismatches[0]).partition(": ")[2]
        assert not error.broken
    return mismatches


def is_usable(ranks: list[Rank]) -> None:
    """Checks that messages still go both ways, and collectives too."""

    def use(rank: Rank) -> bool:
        to, source = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
        rank.meet()
        right = rank.exchange(values(500_000, rank.rank), to, np.zeros(500_000, np.uint8), source)
        left = rank.exchange(values(10, rank.rank), source, np.zeros(10, np.uint8), to)
        rank.meet()
        return bool((right == values(500_000, source)).all() and (left == values(10, to)).all())

    assert run(ranks, use) == [True] * len(ranks)


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (np.zeros(3, np.float32), np.zeros(4, np.float32)),
        (np.zeros(3, np.float32), np.zeros(3, np.int32)),
        (np.zeros(0, np.float32), np.zeros(0, np.int32)),
        (np.zeros(10**6, np.float32), np.zeros(0, np.float32)),
        (np.zeros(0, np.float32), np.zeros(10**6, np.float32)),
    ],
)
def test_both_ranks_hear_that_they_disagree(sent: Any, wanted: Any) -> None:
    ranks = ranks_of(2, ranks=(5, 7))
    for _ in range(3):
        errors = run(ranks, lambda rank: rank.send(sent, 1), lambda rank: rank.receive(wanted, 0))
        error = told(errors, 0, 1)[0]
        assert error.descriptions == {
            5: f"sends message of {sent.dtype}{list(sent.shape)}",
            7: f"receives message of {wanted.dtype}{list(wanted.shape)}",
        }
        assert "ranks 5 and 7 disagree" in str(error)
        assert (wanted == 0).all()
    is_usable(ranks)


def test_the_other_half_of_an_exchange_ends_first() -> None:
    """Rank 0 sends to 1, which expects less, and receives from 2, which has nothing to do with that."""
    received = np.zeros(10**6, np.uint8)
    ranks = ranks_of(3)
    errors = run(
        ranks,
        lambda rank: rank.exchange(values(100), 1, received, 2),
        lambda rank: rank.receive(np.zeros(99, np.uint8), 0),
        lambda rank: rank.send(values(10**6), 0),
    )
    told(errors, 0, 1)
    assert errors[2] is None
    assert (received == values(10**6)).all()
    is_usable(ranks)


@pytest.mark.parametrize("size", [0, 10])
def test_a_peer_may_take_a_message_while_this_rank_looks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 1 does next would be a deadlock, had it not taken the message meanwhile."""
    mine, other = ranks_of(2)
    later = threading.Thread(target=other.meet, daemon=True)
    look = SharedBarrier.is_ahead

    def look_late(who: Any, *args: Any) -> bool:
        if who is mine.barrier and later.ident is None:
            other.receive(np.zeros(size, np.uint8), 0)
            later.start()
            until(lambda: look(who, *args))
        return bool(look(who, *args))

    monkeypatch.setattr(SharedBarrier, "is_ahead", look_late)
    mine.send(values(size), 1)
    mine.meet()
    later.join(30)
    assert not later.is_alive()


def test_a_description_stands_until_it_was_read() -> None:
    mine, other = ranks_of(2)
    sending, receiving = mine.channels._open_outgoing(1), other.channels._open_incoming(0)
    sending.begin(message(values(3), 1))
    receiving.begin(message(values(4), 0))
    for transfer in (sending, receiving):  # both write theirs, and the receiver finds what it can read
        assert transfer.advance()
    assert not receiving.advance()
    assert not receiving.is_over
    for transfer in (sending, receiving, sending):
        assert transfer.advance()
    assert sending.is_over
    assert receiving.is_over


@pytest.mark.parametrize("verb", ["send", "receive"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_message_and_a_collective_wait_for_each_other(world_size: int, verb: str) -> None:
    ranks = ranks_of(world_size, ranks=(4, 5, 6)[:world_size])
    for _ in range(2):
        errors = run(
            ranks,
            lambda rank: getattr(rank, verb)(values(10), 1),
            *[lambda rank: rank.meet()] * (world_size - 1),
        )
        error = told(errors, *range(world_size))[0]
        assert error.descriptions == {4: "message of uint8[10]"} | dict.fromkeys((5, 6)[: world_size - 1], "barrier")
    is_usable(ranks)


def test_a_chain_of_messages_behind_a_collective_is_told_too() -> None:
    """Rank 0 waits for 1, which waits for 2, which waits for all."""
    ranks = ranks_of(3)
    errors = run(
        ranks,
        lambda rank: rank.receive(values(1), 1),
        lambda rank: rank.exchange(values(2), 2, values(1), 2),
        lambda rank: rank.meet(),
    )
    assert told(errors, 0, 1, 2)[0].descriptions[2] == "barrier"
    is_usable(ranks)


# What fails.


@pytest.fixture(params=["send", "receive"])
def verb(request: pytest.FixtureRequest) -> Any:
    return request.param

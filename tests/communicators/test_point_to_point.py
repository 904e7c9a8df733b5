"""Messages over shared memory that disagree, cross a collective, or fail: both ranks get the error."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.shared_memory import barrier as shared_barrier
from gradsync.communicators.shared_memory.arena import SLOT_BYTES, areas_of, segment_bytes
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.point_to_point import PIECE_BYTES, SLOTS, PointToPoint
from gradsync.diagnostics.recorder import FlightRecorder
from gradsync.rendezvous.frames import is_under

BARRIER = agreement_on("barrier", (), None, "")


class Client:
    """What a FailureMonitor uses of a RendezvousClient.

    Attributes:
        failure: what `check` raises, from the given number of calls on.
        reports: of waits that reached their deadline.

    Args:
        rank: the number of the rank.
        ranks: the world ranks.
        stored: the keys of the server, with their values.
    """

    def __init__(self, rank: int, ranks: Sequence[int], stored: dict[str, bytes]) -> None:
        self.failure: Exception | None = None
        self.checks_before = 0
        self.reports: list[tuple[Any, ...]] = []
        self.rank, self.world_ranks, self._stored = rank, ranks, stored

    def set(self, key: str, value: bytes) -> None:
        self._stored[key] = value

    def delete(self, key: str) -> None:
        for each in [each for each in list(self._stored) if is_under(each, key)]:
            del self._stored[each]

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        until(lambda: key in self._stored)
        return self._stored[key]

    def check(self) -> None:
        self.checks_before -= 1
        if self.failure is not None and self.checks_before < 0:
            raise self.failure

    def has_failed(self) -> bool:
        return self.failure is not None and self.checks_before <= 0

    def report_waiting(self, *report: Any) -> None:
        """Nobody reads it."""

    def report_stuck(self, *report: Any) -> NoReturn:
        self.reports.append(report)
        raise gs.CollectiveTimeout("the verdict", missing_ranks=(1,))


class Rank:
    """One rank of a communicator that has nothing but messages and a barrier.

    Attributes:
        client: what it hears from the server.
    """

    def __init__(
        self, memory: memoryview, rank: int, ranks: Sequence[int], timeout_seconds: float, stored: dict[str, bytes]
    ) -> None:
        world_size = len(ranks)
        self.rank = rank
        self.world_size = world_size
        self.client = Client(rank, ranks, stored)
        recorder = FlightRecorder("world")
        recorder.begin(agreement_on("recv", (), None, ""))
        told = FailureMonitor(self.client, recorder)  # type: ignore[arg-type]
        areas = areas_of(memory, world_size)
        label = f"rank {rank}/{world_size}"
        self.barrier = SharedBarrier(areas, rank, ranks, label, timeout_seconds, told)
        buffers = np.frombuffer(areas["slots"], np.uint8).reshape(-1, world_size, SLOT_BYTES)[0]
        self.channels = PointToPoint(areas, list(buffers), rank, self.barrier)

    def send(self, data: Any, peer: int) -> None:
        self.channels.move(message(data, peer), None)

    def receive(self, data: Any, peer: int) -> Any:
        self.channels.move(None, message(data, peer))
        return data

    def exchange(self, data: Any, to: int, into: Any, source: int) -> Any:
        self.channels.move(message(data, to), message(into, source))
        return into

    def meet(self) -> None:
        self.barrier.agree(BARRIER)


def message(data: Any, peer: int) -> Message:
    return Message(peer, data.view(np.uint8), agreement_on("message", data.shape, data.dtype, ""))


def ranks_of(world_size: int, timeout_seconds: float = 30.0, ranks: tuple[int, ...] | None = None) -> list[Rank]:
    memory = memoryview(mmap.mmap(-1, segment_bytes(world_size)))
    stored: dict[str, bytes] = {}
    return [Rank(memory, rank, ranks or range(world_size), timeout_seconds, stored) for rank in range(world_size)]


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
    monkeypatch.setattr(shared_barrier, "_CHECK_EVERY_SECONDS", 0.0)


# What is sent arrives.


# What disagrees.


def told(errors: list[Any], *members: int) -> list[gs.PlanMismatch]:
    """Checks that these ranks got the same PlanMismatch; returns theirs."""
    mismatches = [errors[member] for member in members]
    for error in mismatches:
        assert isinstance(error, gs.PlanMismatch), errors
        assert error.descriptions == mismatches[0].descriptions
        assert str(error).partition(": ")[2] == str(mismatches[0]).partition(": ")[2]
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
            5: f"message of {sent.dtype}{list(sent.shape)}",
            7: f"message of {wanted.dtype}{list(wanted.shape)}",
        }
        assert "the ranks disagree on the next collective" in str(error)
        assert (wanted == 0).all()
    is_usable(ranks)


def test_a_sender_works_ahead_until_its_slots_are_full() -> None:
    data = values(5 * PIECE_BYTES)

    def receive(rank: Rank) -> Any:
        until(lambda: (np.concatenate(rank.channels._slots[0]) == data[: SLOTS * PIECE_BYTES]).all())
        return rank.receive(np.zeros_like(data), 0)

    _, received = run(ranks_of(2), lambda rank: rank.send(data, 1), receive)
    assert np.array_equal(received, data)


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


def test_everything_at_random() -> None:
    """Ranks draw the same steps and pause as they like: each ends as it must, and leaves no trace for the next."""

    def play(rank: Rank) -> int:
        shared, own = np.random.default_rng(11), np.random.default_rng([12, rank.rank])
        mismatches = 0
        for step in range(600):
            first, second = (int(member) for member in shared.permutation(rank.world_size)[:2])
            size = int(shared.choice([0, 1, 1000, 5 * PIECE_BYTES]))
            kind = shared.choice(["message", "ring", "barrier", "size", "in barrier"])
            if own.random() < 0.2:
                time.sleep(own.random() * 1e-3)
            try:
                take_part(rank, kind, first, second, size, step)
            except gs.PlanMismatch:
                assert kind not in ("message", "ring", "barrier")
                mismatches += 1
        return mismatches

    counts = run(ranks_of(3), play)
    assert all(isinstance(count, int) and count > 100 for count in counts), counts


def take_part(rank: Rank, kind: str, first: int, second: int, size: int, step: int) -> None:
    into = np.zeros(size, np.uint8)
    if kind == "barrier" or (kind == "in barrier" and rank.rank != first):
        rank.meet()
    elif kind == "ring":
        to, source = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
        rank.exchange(values(size, step + rank.rank), to, into, source)
        assert (into == values(size, step + source)).all()
    elif rank.rank == first:
        if kind == "in barrier" and step % 2:
            rank.receive(into, second)
        else:
            rank.send(values(size, step), second)
    elif rank.rank == second:
        rank.receive(np.zeros(size + 1, np.uint8) if kind == "size" else into, first)
        assert kind == "message"
        assert (into == values(size, step)).all()


# -- What fails ---------------------------------------------------------------------------------------------------


def test_the_deadline_names_the_peer(verb: str) -> None:
    ranks = ranks_of(3, timeout_seconds=0.1, ranks=(3, 4, 9))
    expect(gs.CollectiveTimeout, lambda: getattr(ranks[0], verb)(values(10), 2))
    (report,) = ranks[0].client.reports
    assert report[3] >= 0.1
    assert report[4] == [9]
    # Who comes too late must not take what was left for a message.
    ranks[2].client.failure = verdict = gs.CollectiveTimeout("the verdict", missing_ranks=(9,))
    late = {"send": "receive", "receive": "send"}[verb]
    assert expect(gs.CollectiveTimeout, lambda: getattr(ranks[2], late)(values(10), 0)) is verdict


def test_a_peer_that_dies_is_told_by_the_server(verb: str) -> None:
    mine, _ = ranks_of(2)
    mine.client.failure = verdict = gs.RankFailed("dead", rank=1)
    mine.client.checks_before = 3
    assert expect(gs.RankFailed, lambda: getattr(mine, verb)(values(10), 1)) is verdict


def test_a_peer_that_closes_is_told(verb: str) -> None:
    mine, other = ranks_of(2, ranks=(6, 8))
    other.barrier.announce_closed()
    error = expect(gs.RankFailed, lambda: getattr(mine, verb)(values(10), 1), "rank 8 closed the communicator")
    assert error.rank == 8


def test_a_peer_may_close_after_its_part() -> None:
    def send_and_close(rank: Rank) -> None:
        rank.send(values(10**6), 1)
        rank.barrier.announce_closed()

    for _ in range(20):
        outcome = run(ranks_of(2), send_and_close, lambda rank: rank.receive(np.zeros(10**6, np.uint8), 0))
        np.testing.assert_array_equal(outcome[1], values(10**6))


def test_any_abort_ends_a_wait(verb: str) -> None:
    mine, _, third = ranks_of(3, ranks=(6, 8, 9))
    third.barrier.announce_abort("the disk is full")
    error = expect(gs.RankFailed, lambda: getattr(mine, verb)(values(10), 1), "rank 9 aborted: the disk is full")
    assert error.rank == 9


def test_another_thread_can_abort_a_wait(verb: str) -> None:
    mine, _ = ranks_of(2)
    timer = threading.Timer(0.05, mine.barrier.announce_abort, ["asked to"])
    timer.start()
    expect(gs.RankFailed, lambda: getattr(mine, verb)(values(10), 1), "closed or aborted during a collective")
    timer.join()


def test_the_barrier_names_ranks_as_the_world_does() -> None:
    mine, _ = ranks_of(2, timeout_seconds=0.05, ranks=(6, 8))
    expect(gs.CollectiveTimeout, mine.meet)
    assert mine.client.reports[0][4] == [8]
    mine, other = ranks_of(2, ranks=(6, 8))
    other.barrier.announce_abort("the disk is full")
    assert expect(gs.RankFailed, mine.meet, "rank 0/2: rank 8 aborted: the disk is full").rank == 8
    mine, other = ranks_of(2, ranks=(6, 8))
    other.barrier.announce_closed()
    assert expect(gs.RankFailed, mine.meet, "rank 0/2: rank 8 closed").rank == 8
    errors = run(ranks_of(2, ranks=(6, 8)), Rank.meet, lambda rank: rank.barrier.agree(agreement_on("x", (), None, "")))
    assert told(errors, 0, 1)[0].descriptions == {6: "barrier", 8: "x"}

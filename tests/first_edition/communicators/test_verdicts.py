"""The verdict of the server goes before what ranks tell each other, and long waits are told of once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators import verdicts
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.shared_memory import barrier as shared_barrier
from gradsync.communicators.shared_memory.barrier import SharedBarrier, header_bytes
from gradsync.communicators.verdicts import Verdicts
from gradsync.diagnostics.recorder import FlightRecorder

BARRIER = agreement_on("barrier", (), None, "")


class Client:
    """What Verdicts uses of RendezvousClient.

    Attributes:
        failure: what `check` raises, from the given number of calls on.
        reports: what was told.
    """

    def __init__(self, failure: Exception | None = None, checks_before: int = 0) -> None:
        self.failure = failure
        self.checks_before = checks_before
        self.reports: list[tuple[Any, ...]] = []

    def check(self) -> None:
        self.checks_before -= 1
        if self.failure is not None and self.checks_before < 0:
            raise self.failure

    def has_failed(self) -> bool:
        return self.failure is not None and self.checks_before <= 0

    def report_waiting(self, *report: Any) -> None:
        self.reports.append(report)

    def report_stuck(self, *report: Any) -> NoReturn:
        self.reports.append(report)
        raise gs.CollectiveTimeout("the verdict", missing_ranks=(1,))


def made(client: Client) -> Verdicts:
    return Verdicts(client, FlightRecorder("world"))  # type: ignore[arg-type]


def barriers(*clients: Client, timeout_seconds: float = 30.0) -> list[SharedBarrier]:
    """Returns the barriers of ranks that have all begun their first collective."""
    memory = memoryview(bytearray(header_bytes(len(clients))))
    made = []
    for rank, client in enumerate(clients):
        recorder = FlightRecorder("world")
        recorder.begin(BARRIER)
        told = Verdicts(client, recorder)  # type: ignore[arg-type]
        made.append(SharedBarrier(memory, rank, len(clients), timeout_seconds, told))
    return made


# What is told and heard.


def test_a_collective_is_warned_of_once() -> None:
    client = Client()
    recorder = FlightRecorder("world")
    told = Verdicts(client, recorder)  # type: ignore[arg-type]
    told.warn(9.0, [1])  # nothing has begun
    for _ in range(2):
        recorder.begin(BARRIER)
        for waited in (4.9, 5.1, 6.0):
            told.warn(waited, [1])
        recorder.end()
    assert client.reports == [("world", 1, "barrier #1", 5.1, [1]), ("world", 2, "barrier #2", 5.1, [1])]


@pytest.mark.parametrize("verdict", [gs.RankFailed("dead"), gs.CollectiveTimeout("late")])
def test_a_verdict_is_remembered(verdict: Exception) -> None:
    told = made(Client(verdict))
    assert not told.was_heard
    assert told.known() is verdict
    assert told.was_heard


@pytest.mark.parametrize("failure", [None, gs.RendezvousError("gone"), gs.CommunicatorClosed("closed")])
def test_a_lost_server_is_no_verdict(failure: Exception | None) -> None:
    told = made(Client(failure))
    assert told.known() is None
    assert told.was_heard == isinstance(failure, gs.RendezvousError)  # the other ranks hear that too
    if failure is not None:
        expect(type(failure), told.check)


def test_news_that_come_late_are_waited_for() -> None:
    verdict = gs.CollectiveTimeout("late")
    told = made(Client(verdict, checks_before=3))
    assert expect(gs.CollectiveTimeout, lambda: told.await_news(30)) is verdict


def test_news_that_never_come_are_not() -> None:
    made(Client()).await_news(0.05)


def test_news_may_come_from_elsewhere() -> None:
    news = gs.RankFailed("another rank goes another way")
    elsewhere = Client(news, checks_before=3)
    assert expect(gs.RankFailed, lambda: made(Client()).await_news(30, elsewhere.check)) is news


# At the barrier.


class Clock:
    """Stands in for `time`: it goes on by a millisecond whenever somebody looks, and things happen by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.to_come: list[tuple[float, Callable[[], Any]]] = []

    def monotonic(self) -> float:
        self.now += 1e-3
        while self.to_come and self.to_come[0][0] <= self.now:
            self.to_come.pop(0)[1]()
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shared_barrier, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_the_deadline_asks_for_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "WARN_AFTER_SECONDS", 0.05)
    client = Client()
    mine, _ = barriers(client, Client(), timeout_seconds=0.1)
    error = expect(gs.CollectiveTimeout, lambda: mine.meet(BARRIER), "the verdict")
    assert error.missing_ranks == (1,)
    warned, given_up = client.reports
    assert warned[:3] == given_up[:3] == ("world", 1, "barrier #1")
    assert 0.05 <= warned[3] < given_up[3]
    assert warned[4] == given_up[4] == [1]


def test_ranks_that_come_one_after_the_other_have_one_deadline_together(clock: Clock) -> None:
    clients = [Client() for _ in range(4)]
    mine, first, second, _ = barriers(*clients, timeout_seconds=0.5)
    clock.to_come = [(clock.now + 0.3, first.arrive), (clock.now + 0.6, second.arrive)]
    expect(gs.CollectiveTimeout, lambda: mine.meet(BARRIER))
    [(*_, waited_seconds, missing)] = clients[0].reports
    assert 0.5 <= waited_seconds < 0.6
    assert missing == [2, 3]


def test_a_rank_that_comes_too_late_gets_the_verdict_even_before_it_is_there() -> None:
    verdict = gs.CollectiveTimeout("the verdict", missing_ranks=(1,))
    mine, late = barriers(Client(), Client(verdict, checks_before=5), timeout_seconds=0.01)
    expect(gs.CollectiveTimeout, lambda: mine.meet(BARRIER))
    assert expect(gs.CollectiveTimeout, lambda: late.meet(BARRIER)) is verdict


@pytest.mark.parametrize("verdict", [gs.RankFailed("dead"), gs.CollectiveTimeout("late")])
def test_who_hears_of_an_abort_first_waits_for_the_verdict_behind_it(verdict: Exception) -> None:
    first, second = barriers(Client(verdict), Client(verdict, checks_before=5))
    expect(type(verdict), lambda: first.meet(BARRIER))
    first.announce_abort("in barrier: the verdict", 1)
    assert expect(type(verdict), lambda: second.meet(BARRIER)) is verdict


def test_without_the_verdict_the_abort_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_barrier, "NEWS_SECONDS", 0.05)
    first, second = barriers(Client(gs.CollectiveTimeout("late")), Client())
    expect(gs.CollectiveTimeout, lambda: first.meet(BARRIER))
    first.announce_abort("late", 1)
    assert expect(gs.RankFailed, lambda: second.meet(BARRIER), "rank 0 aborted: late").rank == 1


def test_a_rank_that_aborts_for_its_own_reason_is_believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verdicts, "await_news", lambda told, seconds: pytest.fail("it waited"))
    first, second = barriers(Client(), Client())
    first.announce_abort("the disk is full")
    assert expect(gs.RankFailed, lambda: second.meet(BARRIER), "rank 0 aborted: the disk is full").rank == 0


def test_a_verdict_does_not_stop_a_round_that_is_complete() -> None:
    """Rank 1 has come: what rank 0 hears of another collective, or of a rank that died after this one, can wait."""
    client = Client(gs.RankFailed("dead"))
    mine, other = barriers(client, Client())
    thread = threading.Thread(target=lambda: other.meet(BARRIER))
    thread.start()
    while not other.round:
        pass
    mine.meet(BARRIER)
    thread.join(30)
    assert not thread.is_alive()
    assert client.checks_before == 0


def test_what_another_thread_has_heard_is_seen_before_any_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.communicators.shared_memory.barrier._LOOK_FOR_FAILURES_EVERY_SECONDS", 1e9)
    clients = [Client(gs.RendezvousError("the server is gone")), Client()]
    expect(gs.RendezvousError, lambda: barriers(*clients)[0].meet(BARRIER))

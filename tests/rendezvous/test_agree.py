"""Agreement through the client over loopback, with threads as ranks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from rendezvous_ranks import SECRET, connect_all, run_ranks, run_threads

from gradsync.communicators.agreement import Description
from gradsync.communicators.failures import exchange_descriptions
from gradsync.errors import CommunicatorClosed, InvalidArgument, RankFailed, RendezvousError, RendezvousTimeout
from gradsync.rendezvous import store
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import MAX_EVENT_BYTES, Decision, LaunchedEvent, event_key
from gradsync.rendezvous.server import RendezvousServer


def check_until(client: RendezvousClient, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_over():
        assert time.monotonic() < deadline
        client.check()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_get_the_decision(world_size: int) -> None:
    def work(client):
        digests = [2**64 - 1, client.rank // 2, 5]
        return [client.agree("g", position, digest) for position, digest in enumerate(digests)]

    with RendezvousServer(world_size, secret=SECRET) as server:
        differ = Decision.MISMATCH if world_size > 2 else Decision.AGREED
        assert run_ranks(server, world_size, work) == [[Decision.AGREED, differ, Decision.AGREED]] * world_size


def test_groups_are_independent() -> None:
    def work(client):
        members = [1] if client.rank == 1 else [0, 2]
        return client.group(members, f"group of {members}").agree("g", 0, 7)

    with RendezvousServer(3, secret=SECRET) as server:
        assert run_ranks(server, 3, work) == [Decision.AGREED] * 3


def test_rank_that_launched_answers_though_it_calls_nothing(pair) -> None:
    asked = []

    def on_asked(position: int) -> LaunchedEvent:
        asked.append(position)
        return LaunchedEvent(np.uint64(2**63), "all_reduce of 3 gradients é")

    pair[0].follow("g", on_asked)
    assert pair[1].agree("g", 4, 1) is Decision.LAUNCHED
    assert pair[1].launched_position("g") == 4
    assert pair[1].get(event_key("g", 4, 0)).decode() == "all_reduce of 3 gradients é"
    assert asked == [4]
    # The one that launched learns of it with its next question, and where it was.
    assert pair[0].launched_position("g") is None
    assert pair[0].agree("g", 9, 3) is Decision.LAUNCHED
    assert pair[0].launched_position("g") == 4
    pair[0].check()


def test_rank_that_went_ahead_answers_while_it_waits_in_a_request(pair) -> None:
    pair[0].follow("g", lambda position: LaunchedEvent(2, "x" * 10**5))

    def ask():
        decision = pair[1].agree("g", 0, 1)
        text = pair[1].get(event_key("g", 0, 0))
        pair[1].set("go on", b"")
        return decision, len(text) <= MAX_EVENT_BYTES

    waited, asked = run_threads([lambda: pair[0].get("go on"), ask])
    assert waited == b""
    assert asked == (Decision.LAUNCHED, True)


def test_rank_that_waits_further_on_is_released(pair) -> None:
    pair[0].follow("g", lambda position: LaunchedEvent(2, "") if position < 5 else None)
    decisions = run_threads([lambda: pair[0].agree("g", 5, 1), lambda: pair[1].agree("g", 3, 1)])
    assert decisions == [Decision.LAUNCHED] * 2
    assert [client.launched_position("g") for client in pair] == [3, 3]


def test_rank_that_went_ahead_with_the_same_counts(pair) -> None:
    pair[0].follow("g", lambda position: LaunchedEvent(1, ""))

    def ask():
        decision = pair[1].agree("g", 0, 1)
        pair[1].set("end", b"")
        return decision

    decision, _ = run_threads([ask, lambda: pair[0].get("end")])
    assert decision is Decision.AGREED


def test_rank_that_is_not_there_yet_asks_later(pair) -> None:
    asked = threading.Event()
    pair[0].follow("g", lambda position: asked.set())

    def arrive():
        check_until(pair[0], asked.is_set)
        return pair[0].agree("g", 0, 1)

    assert run_threads([arrive, lambda: pair[1].agree("g", 0, 1)]) == [Decision.AGREED] * 2


@pytest.mark.parametrize(
    "on_asked",
    [
        lambda position: 1 / 0,
        lambda position: LaunchedEvent(-1, "no digest"),
        lambda position: LaunchedEvent(1, None),  # type: ignore[arg-type]
        lambda position: "no event",
    ],
)
def test_mistake_in_on_asked_is_logged_and_harms_nobody(pair, caplog, on_asked) -> None:
    pair[0].follow("g", on_asked)

    def ask():
        with pytest.raises(RendezvousTimeout, match=r"agree 'g' at position 0 .*missing: rank 0") as caught:
            pair[1].agree("g", 0, 1, timeout_seconds=0.05)
        pair[1].set("done", b"")
        return caught.value.missing_ranks

    with caplog.at_level(logging.ERROR, logger="gradsync.rendezvous"):
        _, missing = run_threads([lambda: pair[0].get("done"), ask])
    assert missing == (0,)
    assert "rank 0/2: position 0 of group 'g' counts as not launched" in caplog.text
    assert run_threads([lambda c=c: c.agree("g", 0, 1) for c in pair]) == [Decision.AGREED] * 2


def test_unfollowed_groups_are_not_asked(pair) -> None:
    asked: list[int] = []
    pair[0].follow("g", asked.append)
    with pytest.raises(InvalidArgument, match="rank 0/2: group 'g' is followed already"):
        pair[0].follow("g", lambda position: None)
    pair[0].unfollow("g")
    pair[0].unfollow("g")
    assert run_threads([lambda c=c: c.agree("g", 0, 1) for c in pair]) == [Decision.AGREED] * 2
    assert asked == []
    pair[0].follow("g", asked.append)
    assert run_threads([lambda c=c: c.agree("g", 1, 1) for c in pair]) == [Decision.AGREED] * 2


def test_on_asked_may_wait_for_a_lock_that_another_threads_agree_holds(pair) -> None:
    lock = threading.Lock()
    held, answering = threading.Event(), threading.Event()

    def on_asked(position: int) -> LaunchedEvent:
        answering.set()
        with lock:
            return LaunchedEvent(2, "")

    def wait_in_a_request():
        held.wait(30)
        return pair[0].get("end")

    def agree_with_the_lock_held():
        with lock:
            held.set()
            assert answering.wait(30)
            return pair[0].agree("other", 0, 1)

    def peer():
        decisions = run_threads([lambda: pair[1].agree("g", 0, 1), lambda: pair[1].agree("other", 0, 1)])
        pair[1].set("end", b"")
        return decisions

    pair[0].follow("g", on_asked)
    results = run_threads([wait_in_a_request, agree_with_the_lock_held, peer])
    assert results == [b"", Decision.AGREED, [Decision.LAUNCHED, Decision.AGREED]]


def test_callers_mistakes(pair) -> None:
    calls = [
        lambda: pair[0].agree("g", -1, 0),
        lambda: pair[0].agree("g", 0, -1),
        lambda: pair[0].agree("g", 0, 2**64),
        lambda: pair[0].agree("g" * 1000, 0, 0),
        lambda: pair[0].agree("g", 0, 0, timeout_seconds=-1),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=r"rank 0/2|timeout_seconds"):
            call()
    assert run_threads([lambda c=c: c.agree("g", 0, 0) for c in pair]) == [Decision.AGREED] * 2
    with pytest.raises(InvalidArgument, match=r"group 'g' has ranks \(0, 1\), rank 0/2 asked with ranks \(0,\)"):
        pair[0].group([0], "g").agree("g", 1, 0)


def test_deadline_withdraws_the_question(pair) -> None:
    with pytest.raises(RendezvousTimeout, match=r"missing: rank 1 \(running\)") as caught:
        pair[0].agree("g", 0, 1, timeout_seconds=0.05)
    assert caught.value.missing_ranks == (1,)
    assert run_threads([lambda c=c: c.agree("g", 0, 2) for c in pair]) == [Decision.AGREED] * 2


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("close", "rank 1/2 left"),
        ("abandon", "rank 1/2 (pid {pid}) died"),
        ("report_failure", "rank 1/2 (pid {pid}) failed"),
    ],
)
def test_rank_that_ends_instead(pair, end: str, text: str) -> None:
    def leave():
        asked = threading.Event()
        pair[1].follow("g", lambda position: asked.set())
        pair[1].set("following", b"")
        check_until(pair[1], asked.is_set)
        getattr(pair[1], end)(*(["why"] if end == "report_failure" else []))

    def ask():
        pair[0].get("following")
        return pair[0].agree("g", 0, 1)

    failure, _ = run_threads([ask, leave])
    assert isinstance(failure, RankFailed)
    assert failure.rank == 1
    assert text.format(pid=os.getpid()) in str(failure)


def test_close_wakes_every_thread_that_waits(pair) -> None:
    entered = threading.Barrier(4)

    def wait(ask):
        entered.wait(30)
        return ask()

    def close():
        entered.wait(30)
        pair[0].close()

    waits = [lambda: pair[0].agree("g", 0, 1), lambda: pair[0].get("never"), pair[0].barrier]
    *waited, closed = run_threads([*(lambda ask=ask: wait(ask) for ask in waits), close])
    assert all(isinstance(error, CommunicatorClosed) for error in waited), waited
    assert closed is None


def test_threads_of_one_client_are_answered_in_any_order(pair) -> None:
    def set_in_order():
        for key in ("b", "a", "c"):
            pair[1].set(key, key.encode())
            pair[1].get(f"{key} was read")

    def read(key: str):
        value = pair[0].get(key)
        pair[0].set(f"{key} was read", b"")
        return value

    results = run_threads([set_in_order, *(lambda key=key: read(key) for key in "abc")])
    assert results == [None, b"a", b"b", b"c"]


def test_lost_server_is_told_to_every_thread_that_waits() -> None:
    server = RendezvousServer(2, secret=SECRET)
    server.start()
    clients = connect_all(server, 2)

    def stop():
        for key in ("first", "second"):
            clients[1].get(key)
        server.stop()

    def wait(key: str):
        clients[0].set(key, b"")
        clients[0].get("never")

    *errors, stopped = run_threads([lambda: wait("first"), lambda: wait("second"), stop])
    assert stopped is None
    assert all(isinstance(error, RendezvousError) and "is gone" in str(error) for error in errors), errors
    for client in clients:
        client.close()


def test_many_mismatches_do_not_fill_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_STORED_BYTES", 1024**2)
    lines = tuple([f"'{number:0900}': float32[3]" for number in range(200)])

    def work(client: RendezvousClient) -> None:
        for position in range(5):
            described = {rank: Description(f"call {position} of rank {rank}", lines) for rank in (0, 1)}
            own = described[client.rank].to_text()
            assert exchange_descriptions(client, "world", position, own, [0, 1]) == described
            client.barrier()  # the next collective, on which the ranks disagree too

    with RendezvousServer(2, secret=SECRET) as server:
        assert run_ranks(server, 2, work) == [None, None]

"""Bytes through the rendezvous server's store: they arrive, little is stored at a time, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.nccl import store_path
from gradsync.communicators.nccl.store_path import StorePath
from gradsync.diagnostics.recorder import FlightRecorder
from gradsync.rendezvous import store
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.store import Keys

SECRET = bytes(range(32))
MOVING: Agreement = agreement_on("objects.test", (), None, "")

Work = Callable[[StorePath, RendezvousClient], Any]


def nothing_seen() -> None:
    pass


def agreed(_agreement: Agreement) -> None:
    pass


def run_paths(
    works: Sequence[Work], *, timeout_seconds: float = 30.0, look_around: Callable[[], None] = nothing_seen
) -> list[Any]:
    """Runs one rank for each work, in threads; returns results or errors by rank."""

    def run(rank: int) -> Any:
        try:
            with RendezvousClient.connect(server.address, secret=SECRET, rank=rank, world_size=len(works)) as client:
                recorder = FlightRecorder("world")
                recorder.begin(MOVING)
                failures = FailureMonitor(client, recorder)
                return works[rank](StorePath(client, "world", failures, timeout_seconds, agreed, look_around), client)
        except gs.GradsyncError as error:  # also from connect(): another rank may have failed meanwhile
            return error

    with RendezvousServer(len(works), secret=SECRET) as server, ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(run, range(len(works))))


def part(rank: int, size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, size]).integers(0, 256, size, np.uint8)


def gathered(path: StorePath, source: np.ndarray[Any, Any], bounds: Sequence[int]) -> np.ndarray[Any, Any]:
    target = np.empty(bounds[-1], np.uint8)
    path.all_gather(source, target, bounds, MOVING)
    return target


def check_moves(sizes: Sequence[int]) -> None:
    n = len(sizes)
    bounds = [0, *accumulate(sizes)]
    parts = [part(rank, size) for rank, size in enumerate(sizes)]
    whole = np.concatenate(parts)

    def work(path: StorePath, client: RendezvousClient) -> None:
        rank = client.rank
        np.testing.assert_array_equal(gathered(path, parts[rank], bounds), whole)
        assert path.share_numbers([rank, -rank], MOVING) == [[r, -r] for r in range(n)]
        for root in range(n):
            target = np.zeros(bounds[-1], np.uint8)
            path.gather(parts[rank], target if rank == root else None, bounds, root, MOVING)
            np.testing.assert_array_equal(target, whole if rank == root else 0)
            scattered = np.empty(sizes[rank], np.uint8)
            path.scatter(whole if rank == root else None, scattered, bounds, root, MOVING)
            np.testing.assert_array_equal(scattered, parts[rank])

    assert run_paths([work] * n) == [None] * n


@pytest.mark.parametrize("sizes", [[5], [3, 0], [0, 0], [70_000, 1, 61_440], [1, 130_000, 0, 7]])
def test_bytes_arrive(sizes: list[int]) -> None:
    check_moves(sizes)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=3), window=st.integers(1, 300), piece=st.integers(1, 99)
)
def test_bytes_arrive_in_any_windows_and_pieces(sizes: list[int], window: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_path, "WINDOW_BYTES", max(window, max(sizes) // 8))
        patch.setattr(store_path, "MAX_VALUE_BYTES", max(piece, max(sizes) // 8))
        check_moves(sizes)


def test_the_server_holds_a_window_at_most_and_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    stores = Keys.set

    def watched(keys: Keys, *arguments: Any) -> list[Any]:
        sends = stores(keys, *arguments)
        stored.append(keys._stored_bytes)
        left[:] = keys._values
        return sends

    left: list[str] = []
    forgets = Keys.forget

    def forget(keys: Keys, prefix: str) -> None:
        forgets(keys, prefix)
        left[:] = keys._values

    monkeypatch.setattr(Keys, "set", watched)
    monkeypatch.setattr(Keys, "forget", forget)
    monkeypatch.setattr(store_path, "WINDOW_BYTES", 300_000)
    check_moves([2_000_000, 500_000])
    keys_bytes = 20_000
    # A fast sender may begin the next window while a slow one removes its pieces of the last.
    assert max(stored) <= 2 * 300_000 + keys_bytes
    assert left == []


def test_a_full_store_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when many groups move large objects at once: here somebody else fills the store, and makes room later."""
    monkeypatch.setattr(store, "MAX_STORED_BYTES", 300_000)
    refused = threading.Event()
    stores = Keys.set

    def watch(keys: Keys, request: Any, key: str, *arguments: Any) -> list[Any]:
        sends = stores(keys, request, key, *arguments)
        if key not in keys._values:
            refused.set()
        return sends

    monkeypatch.setattr(Keys, "set", watch)
    whole = np.concatenate([part(rank, 150_000) for rank in range(2)])

    def work(path: StorePath, client: RendezvousClient) -> Any:
        if client.rank == 0:
            for number in range(4):
                client.set(f"from elsewhere/{number}", bytes(60_000))
        client.barrier("filled")
        if client.rank == 0:
            assert refused.wait(30)
            for number in range(4):
                client.delete(f"from elsewhere/{number}")
        return gathered(path, part(client.rank, 150_000), [0, 150_000, 300_000])

    monkeypatch.setattr(store_path, "WINDOW_BYTES", 200_000)
    for got in run_paths([work] * 2):
        np.testing.assert_array_equal(got, whole)


def test_a_store_that_stays_full_is_told_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_STORED_BYTES", 100_000)

    def work(path: StorePath, client: RendezvousClient) -> Any:
        return gathered(path, part(client.rank, 150_000), [0, 150_000, 300_000])

    errors = run_paths([work] * 2, timeout_seconds=0.5)
    assert any("the rendezvous stores at most 100000 bytes" in str(error) for error in errors), errors


def test_a_rank_that_does_not_come_is_named() -> None:
    def come(path: StorePath, client: RendezvousClient) -> Any:
        return gathered(path, part(client.rank, 10), [0, 10, 20])

    def stay_away(path: StorePath, client: RendezvousClient) -> Any:
        client.get("never set")  # a rank that is alive, and elsewhere

    waiting, absent = run_paths([come, stay_away], timeout_seconds=0.6)
    for error in (waiting, absent):
        assert isinstance(error, gs.CollectiveTimeout)
        assert "objects.test" in str(error)


def test_a_rank_that_fails_ends_the_wait_at_once() -> None:
    def come(path: StorePath, client: RendezvousClient) -> Any:
        target = np.empty(20, np.uint8) if client.rank == 0 else None
        return path.gather(part(client.rank, 10), target, [0, 10, 20], 0, MOVING)

    def fail(path: StorePath, client: RendezvousClient) -> None:
        client.report_failure("the disk is full")

    error, _ = run_paths([come, fail])
    assert isinstance(error, gs.RankFailed)
    assert "the disk is full" in str(error)


def test_who_waits_looks_around() -> None:
    def look_around() -> None:
        raise gs.CommunicatorClosed("it was aborted by another thread")

    def come(path: StorePath, client: RendezvousClient) -> Any:
        try:
            return gathered(path, part(client.rank, 10), [0, 10, 20])
        finally:
            client.set("the end", b"")

    def stay_away(path: StorePath, client: RendezvousClient) -> Any:
        client.get("the end")

    error, _ = run_paths([come, stay_away], look_around=look_around)
    assert isinstance(error, gs.CommunicatorClosed)

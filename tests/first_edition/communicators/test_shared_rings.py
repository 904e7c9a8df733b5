"""Where ranks put what they give: regions that do not meet before all have read them, however the rings are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicators.shared_memory import rings as shared_rings
from gradsync.communicators.shared_memory.rings import HOT_BYTES, SharedRings, share_begin, shares_bytes
from rank_processes import run_ranks

ROUND_BYTES = 64 * 1024
SLOW, FAST = 1e9, 0.0  # how long a write took, in seconds


REFUSED: list[tuple[int, int]] = [(-1, -1)]


class Barrier:
    """What the rings use of one."""

    def __init__(self) -> None:
        self.round = 0
        self.place: int | None = None

    @property
    def next_parity(self) -> int:
        return (self.round + 1) & 1

    def post_place(self, place: int) -> None:
        self.place = place

    def posted_places(self) -> list[int]:
        assert self.place is not None
        return [self.place]


def make_rings(
    world_size: int, monkeypatch: pytest.MonkeyPatch, allocated: list[tuple[int, int]] | None = None
) -> tuple[SharedRings, Barrier]:
    def allocate(begin: int, end: int) -> bool:
        if allocated is REFUSED:
            return False
        if allocated is not None:
            allocated.append((begin, end))
        return True

    monkeypatch.setattr(shared_rings, "_LONG_BYTES", 12 * ROUND_BYTES)
    barrier = Barrier()
    memory = memoryview(bytearray(SharedRings.bytes_for(world_size, ROUND_BYTES)))
    return SharedRings(memory, world_size, ROUND_BYTES, barrier, 0, allocate), barrier  # type: ignore[arg-type]


rounds = st.lists(st.tuples(st.integers(0, ROUND_BYTES), st.sampled_from([SLOW, FAST]), st.booleans()), max_size=80)


@given(rounds, st.integers(1, 5))
def test_the_regions_of_two_rounds_never_meet(steps: list[tuple[int, float, bool]], world_size: int) -> None:
    """However sizes come, and whenever writing is found slow or fast, or the short ring is tried again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        rings, barrier = make_rings(world_size, monkeypatch)
        clock = [0.0]
        monkeypatch.setattr(shared_rings.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(shared_rings.time, "perf_counter", lambda: 0.0)
        (ring,) = {each.size for each in rings.of(np.dtype(np.uint8))}
        lasting: list[tuple[int, int, int]] = []  # (round, begin, end)
        for size, seconds, goes_on in steps:
            begin = rings.take(size)
            is_hot = size <= HOT_BYTES
            assert 0 <= begin <= begin + size <= ring
            assert begin % 64 == 0
            assert is_hot == (begin < 2 * HOT_BYTES)
            for earlier, low, high in lasting:
                if barrier.round - earlier < 2:
                    assert end_before(low, high, begin, begin + size), (earlier, barrier.round)
            lasting = [*lasting, (barrier.round, begin, begin + size)][-3:]
            for _ in range(8):
                rings.wrote(shared_rings._JUDGED_FROM_BYTES, -seconds)
            clock[0] += 10.0 * goes_on
            barrier.round += 1
            if not is_hot:
                assert list(rings.places(size)) == [begin]


def end_before(low: int, high: int, begin: int, end: int) -> bool:
    return high <= begin or end <= low or low == high or begin == end


def test_slow_writing_makes_the_ring_long_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, _ = make_rings(2, monkeypatch)
    clock = [0.0]
    monkeypatch.setattr(shared_rings.time, "monotonic", lambda: clock[0])

    def lap() -> int:
        """Returns how far the ring reaches."""
        return max(rings.take(ROUND_BYTES) for _ in range(30))

    def write(seconds: float, times: int) -> None:
        for _ in range(times):
            monkeypatch.setattr(shared_rings.time, "perf_counter", lambda: seconds)
            rings.wrote(ROUND_BYTES, 0.0)

    short = lap()
    write(1.0, shared_rings._SLOW_IN_A_ROW - 1)
    write(1e-6, 1)
    write(1.0, shared_rings._SLOW_IN_A_ROW - 1)
    assert lap() == short
    write(1.0, 1)
    assert lap() > short
    clock[0] += 1.0
    lap()
    assert lap() == short


def test_the_long_ring_is_allocated_once_and_only_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[tuple[int, int]] = []
    rings, _ = make_rings(2, monkeypatch, allocated)
    ((begin, end), _) = SharedRings.parts_in_use(2, ROUND_BYTES)
    assert begin == 0
    for _ in range(3):
        assert len(allocated) < 2
        find_slow(rings, monkeypatch)
    assert allocated == [(end, rings.bytes // 2)]


def test_without_memory_for_it_the_ring_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    rings, _ = make_rings(2, monkeypatch, REFUSED)
    find_slow(rings, monkeypatch)
    (_, end), _ = SharedRings.parts_in_use(2, ROUND_BYTES)
    assert max(rings.take(ROUND_BYTES) for _ in range(30)) + ROUND_BYTES <= end


def find_slow(rings: SharedRings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rings.time, "perf_counter", lambda: 1.0)
    for _ in range(shared_rings._SLOW_IN_A_ROW):
        rings.wrote(ROUND_BYTES, 0.0)


def test_shares_lie_one_after_the_other_without_the_owners() -> None:
    begins = [share_begin(1, reader, 100) for reader in (0, 2, 3)]
    assert begins == [0, 128, 256]
    assert shares_bytes(4, 100) == 384


def run_with_rings(comm: Any, slow: dict[int, float]) -> None:
    """Collectives of all sizes while each rank uses its ring in its own way."""
    shared_rings._SLOW_BYTES_PER_SECOND = slow[comm.rank]
    n = comm.world_size
    rng = np.random.default_rng(1)
    for step in range(40):
        size = int(rng.choice([1, 1_000, 5_000, 20_000, 100_000]))
        mine = np.arange(size * n, dtype=np.int64) * (comm.rank + 1) + step
        total = n * (n + 1) // 2 * np.arange(size * n, dtype=np.int64) + n * step
        everyone = [np.arange(size * n, dtype=np.int64) * (rank + 1) + step for rank in range(n)]
        own = slice(comm.rank * size, (comm.rank + 1) * size)
        np.testing.assert_array_equal(comm.all_reduce(mine.copy()), total)
        np.testing.assert_array_equal(comm.reduce_scatter(mine), total[own])
        np.testing.assert_array_equal(comm.all_gather(mine), np.concatenate(everyone))
        np.testing.assert_array_equal(comm.all_to_all(mine), np.concatenate([each[own] for each in everyone]))
        np.testing.assert_array_equal(comm.broadcast(mine, step % n), everyone[step % n])


@pytest.mark.parametrize(
    "slow", [{0: 0.0, 1: 0.0, 2: 0.0}, {0: np.inf, 1: np.inf, 2: np.inf}, {0: 0.0, 1: np.inf, 2: 3e9}]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_do_not_depend_on_how_each_rank_uses_its_ring(world_size: int, slow: dict[int, float]) -> None:
    run_ranks(world_size, run_with_rings, slow, backend="shm")

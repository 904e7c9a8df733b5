"""The model of costs against values worked out by hand, and what has to hold for every size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.cost_model import (
    Link,
    best_threshold_bytes,
    exposed_seconds,
    fit_link,
    flat_ring_seconds,
    halving_doubling_seconds,
    hierarchical_seconds,
    hierarchy_pays_below_bytes,
    recursive_doubling_seconds,
    ring_seconds,
    tree_seconds,
)
from gradsync.errors import InvalidArgument

LINK = Link(1e-5, 1e-9)  # 10 us, 1 GB/s
FLAT = [ring_seconds, recursive_doubling_seconds, halving_doubling_seconds, tree_seconds]
RANKS = st.integers(1, 5000)
BYTES = st.floats(0, 1e12)
LINKS = st.builds(Link, st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-7))


@pytest.mark.parametrize(
    ("seconds_of", "ranks", "expected"),
    [
        (ring_seconds, 4, 6 * 1e-5 + 6 / 4 * 1e-3),
        (recursive_doubling_seconds, 4, 2 * (1e-5 + 1e-3)),
        (recursive_doubling_seconds, 5, 4 * (1e-5 + 1e-3)),
        (halving_doubling_seconds, 4, 4 * 1e-5 + 6 / 4 * 1e-3),
        (halving_doubling_seconds, 5, 4 * 1e-5 + 6 / 4 * 1e-3 + 2 * (1e-5 + 1e-3)),
        (tree_seconds, 4, 4 * 1e-5 + 2e-3),
        (tree_seconds, 5, 6 * 1e-5 + 2e-3),
    ],
)
def test_a_megabyte_by_hand(seconds_of, ranks: int, expected: float) -> None:
    assert seconds_of(ranks, 1e6, LINK) == pytest.approx(expected)


@pytest.mark.parametrize("seconds_of", FLAT)
def test_one_rank_costs_nothing(seconds_of) -> None:
    assert seconds_of(1, 1e6, LINK) == 0.0


@pytest.mark.parametrize("seconds_of", FLAT)
def test_no_ranks_and_negative_sizes_are_refused(seconds_of) -> None:
    for ranks, size in ((0, 1.0), (2, -1.0)):
        with pytest.raises(InvalidArgument, match="at least one rank"):
            seconds_of(ranks, size, LINK)


@given(RANKS, BYTES, BYTES, LINKS)
def test_more_bytes_never_take_less(ranks: int, one: float, other: float, link: Link) -> None:
    small, large = sorted((one, other))
    for seconds_of in FLAT:
        assert seconds_of(ranks, small, link) <= seconds_of(ranks, large, link)


@given(st.integers(2, 5000), BYTES, LINKS)
def test_nothing_beats_the_least_bytes(ranks: int, size: float, link: Link) -> None:
    least = 2 * (ranks - 1) / ranks * size * link.seconds_per_byte
    slack = 1 - 1e-9
    assert all(f(ranks, size, link) >= least * slack for f in (ring_seconds, halving_doubling_seconds, tree_seconds))


@given(st.integers(4, 5000), LINKS)
def test_trees_win_below_one_size_and_rings_above(ranks: int, link: Link) -> None:
    saved = (2 * (ranks - 1) - 2 * math.ceil(math.log2(ranks))) * link.latency_seconds
    crossover = saved / (2 / ranks * link.seconds_per_byte)
    assert tree_seconds(ranks, 0.9 * crossover, link) < ring_seconds(ranks, 0.9 * crossover, link)
    assert tree_seconds(ranks, 1.1 * crossover, link) > ring_seconds(ranks, 1.1 * crossover, link)


def test_hierarchy_by_hand() -> None:
    inside, between = Link(1e-6, 1e-11), Link(1e-5, 4e-11)
    inner = 2 * 7 * 1e-6 + 2 * 7 / 8 * 1e6 * 1e-11
    across = 2 * 3 * 1e-5 + 2 * 3 / 4 * (1e6 / 8) * (8 * 4e-11)
    assert hierarchical_seconds(4, 8, 1e6, inside, between) == pytest.approx(inner + across)
    flat = (6 * 1e-5 + (62 - 6) * 1e-6) + 2 * 31 / 32 * 1e6 * 4e-11
    assert flat_ring_seconds(4, 8, 1e6, inside, between) == pytest.approx(flat)


@given(st.integers(1, 200), st.integers(1, 16), BYTES, LINKS, LINKS)
def test_a_hierarchy_is_never_better_than_its_parts(m: int, g: int, size: float, inside: Link, between: Link) -> None:
    found = hierarchical_seconds(m, g, size, inside, between)
    assert found >= ring_seconds(g, size, inside)
    assert found * (1 + 1e-9) >= ring_seconds(m, size, between) - 1e-15


@given(st.integers(2, 200), st.integers(2, 16), LINKS, LINKS)
def test_a_hierarchy_pays_up_to_that_size(m: int, g: int, inside: Link, between: Link) -> None:
    limit = hierarchy_pays_below_bytes(m, g, inside, between)

    def gain(size: float) -> float:
        return flat_ring_seconds(m, g, size, inside, between) - hierarchical_seconds(m, g, size, inside, between)

    assert gain(0) > 0  # fewer hops, always
    if math.isinf(limit):
        assert gain(1e9) > 0
    else:
        assert gain(0.99 * limit) > 0 > gain(1.01 * limit)


def test_one_node_is_a_ring() -> None:
    assert flat_ring_seconds(1, 8, 1e6, LINK, Link(1.0, 1.0)) == ring_seconds(8, 1e6, LINK)
    assert hierarchical_seconds(1, 8, 1e6, LINK, Link(1.0, 1.0)) == ring_seconds(8, 1e6, LINK)


def simulated(total: float, threshold: float, backward: float, seconds_of) -> float:
    """Plays the buckets one after the other."""
    done, filled = 0.0, 0.0
    while filled < total * (1 - 1e-9):
        size = min(threshold, total - filled)
        filled += size
        done = max(done, backward * filled / total) + seconds_of(size)
    return done - backward


@given(st.floats(1e3, 1e9), st.floats(0.003, 1.0), st.floats(1e-4, 1.0), LINKS)
def test_exposed_time_is_that_of_a_simulation(total: float, part: float, backward: float, link: Link) -> None:
    found = exposed_seconds(total, part * total, backward, link.seconds)
    assert found == pytest.approx(simulated(total, part * total, backward, link.seconds), rel=1e-6, abs=1e-9)


def test_a_threshold_outside_its_range_is_refused() -> None:
    for threshold in (0.0, 2.0):
        with pytest.raises(InvalidArgument, match="a threshold needs to be above 0"):
            exposed_seconds(1.0, threshold, 1.0, LINK.seconds)


def test_the_best_threshold_where_communication_hides() -> None:
    """By hand: the size whose all-reduce takes as long as the next bucket takes to fill, a / (T/G - b)."""
    total, backward, link = 1e8, 0.2, Link(1e-4, 1e-9)
    expected = 1e-4 / (0.2 / 1e8 - 1e-9)
    assert best_threshold_bytes(total, backward, link.seconds) == pytest.approx(expected, rel=0.05)


def test_the_best_threshold_where_communication_is_the_limit() -> None:
    """By hand: the first bucket's wait against the latencies of all, G sqrt(a / T)."""
    total, backward, link = 1e8, 0.05, Link(1e-4, 1e-9)
    expected = 1e8 * math.sqrt(1e-4 / 0.05)
    found = best_threshold_bytes(total, backward, link.seconds)
    assert exposed_seconds(total, found, backward, link.seconds) <= 1.01 * exposed_seconds(
        total, expected, backward, link.seconds
    )


def test_what_costs_nothing_leaves_nothing_to_wait_for() -> None:
    assert min(exposed_seconds(1, 1 / parts, 0.01, lambda _: 0.0) for parts in range(1, 100)) == 0
    assert best_threshold_bytes(1, 0.01, lambda _: 0.0) == 1 / 4096


def test_the_best_of_given_thresholds() -> None:
    assert best_threshold_bytes(1e8, 0.2, LINK.seconds, [1e3, 1e5, 1e8]) == 1e5


@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_a_fit_finds_its_line(latency: float, per_byte: float) -> None:
    line = Link(latency, per_byte)
    found = fit_link([(size, line.seconds(size)) for size in (4e3, 1e5, 1e6, 1e8)])
    assert found.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert found.seconds_per_byte == pytest.approx(per_byte, rel=1e-3)


def test_a_fit_has_no_negative_part() -> None:
    assert fit_link([(1.0, 1.0), (2.0, 4.0)]).latency_seconds == 0.0
    assert fit_link([(1.0, 2.0), (2.0, 1.0)]).seconds_per_byte == 0.0


@pytest.mark.parametrize("samples", [[(1.0, 1.0)], [(1.0, 1.0), (1.0, 1.0)]])
def test_a_fit_needs_two_sizes(samples) -> None:
    with pytest.raises(InvalidArgument, match="a line needs"):
        fit_link(samples)

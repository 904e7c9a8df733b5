"""Planning a sweep and what is recommended after it: pure arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bench.measurement import Seconds
from gradsync.bench.text import MEGABYTE
from gradsync.bench.thresholds import (
    DEFAULT_MEGABYTES,
    Contender,
    Row,
    Timings,
    as_dictionary,
    best,
    parse_megabytes,
    plan_sweep,
    recommend,
    rows_of,
)
from gradsync.bucketing.plan import GradientSpec, plan_buckets


def specs(*sizes):
    return [GradientSpec(f"#{i}", (size,), "float32", 4) for i, size in enumerate(sizes)]


def row(threshold, median, all_reduces=1):
    return Row(Contender(threshold, all_reduces), Seconds(median, median, median, 3), None, 0.0)


def test_thresholds_are_read_in_megabytes_ascending_and_once():
    assert parse_megabytes("10, 0.25,10,1,") == [MEGABYTE // 4, MEGABYTE, 10 * MEGABYTE]


def test_the_default_goes_from_a_quarter_to_a_hundred():
    defaults = parse_megabytes(DEFAULT_MEGABYTES)
    assert (defaults[0], defaults[-1]) == (MEGABYTE // 4, 100 * MEGABYTE)
    assert 10 * MEGABYTE in defaults


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1,ten", "got 'ten'"),
        ("inf", "got 'inf'"),
        ("nan", "got 'nan'"),
        ("-1", "at least one byte each, got -1 MB"),
        ("0", "at least one byte each"),
        (" , ", "at least one number"),
    ],
)
def test_wrong_thresholds_are_told(text, told):
    with pytest.raises(gs.InvalidArgument, match=told):
        parse_megabytes(text)


def test_of_thresholds_with_the_same_buckets_the_smallest_is_measured():
    # Two gradients of 400 bytes: together from 800 bytes on.
    assert plan_sweep(specs(100, 100), [100, 400, 800, 4000]) == [
        Contender(100, 2, (400,)),
        Contender(800, 1, (4000,)),
    ]


@given(st.lists(st.integers(0, 50), min_size=1), st.lists(st.integers(1, 1000), min_size=1, unique=True).map(sorted))
def test_every_threshold_is_measured_or_stands_beside_one_with_as_many_buckets(sizes, thresholds):
    contenders = plan_sweep(specs(*sizes), thresholds)
    assert sorted(t for c in contenders for t in (c.threshold_bytes, *c.same_buckets)) == thresholds
    for contender in contenders:
        for threshold in (contender.threshold_bytes, *contender.same_buckets):
            assert len(plan_buckets(specs(*sizes), threshold)) == contender.all_reduces


def test_rows_have_medians_bandwidth_and_the_share_of_packing():
    contenders = [Contender(1, 7), Contender(2, 3)]
    timings = Timings([[1.0, 3.0, 2.0], [4.0, 4.0, 4.0]], [[0.5, 0.5, 0.5], [6.0, 6.0, 6.0]])
    first, second = rows_of(contenders, timings, total_bytes=1000, ranks=4)
    assert first.seconds.median == 2.0
    assert first.bus_bytes_per_second == 2 * 3 / 4 * 1000 / 2.0
    assert (first.pack_share, second.pack_share) == (0.25, 1.5)
    assert as_dictionary(first)["seconds"]["lower_quartile"] == 1.5
    assert as_dictionary(first)["pack_only_seconds"]["median"] == 0.5


def test_without_packing_there_is_no_share_and_one_rank_has_no_bus():
    [only] = rows_of([Contender(1, 7)], Timings([[2.0]], []), total_bytes=1000, ranks=1)
    assert (only.pack_seconds, only.pack_share, only.bus_bytes_per_second) == (None, None, 0)
    assert as_dictionary(only)["pack_only_seconds"] is None


def test_the_smallest_within_three_percent_is_recommended():
    rows = [row(1, 1.04), row(2, 1.02), row(3, 1.0), row(4, 1.01)]
    assert best(rows) is rows[2]
    assert recommend(rows) is rows[1]
    assert recommend(rows[:1]) is rows[0]

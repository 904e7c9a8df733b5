"""What a person reads of a sweep: aligned, marked, in units."""

from dataclasses import replace

import pytest

from gradsync.bench.measurement import Seconds
from gradsync.bench.text import MEGABYTE, megabytes, milliseconds
from gradsync.bench.threshold_report import (
    bar_chart,
    notes,
    recommendation,
    same_buckets,
    table,
)
from gradsync.bench.thresholds import Contender, Row

ROWS = [
    Row(Contender(MEGABYTE // 4, 54, (MEGABYTE // 2,)), Seconds(0.0402, 0.04, 0.041, 9), Seconds(0.02, 0, 0, 9), 2.5e9),
    Row(Contender(10 * MEGABYTE, 13), Seconds(0.02, 0.0199, 0.0201, 9), Seconds(0.025, 0, 0, 9), 5e9),
    Row(Contender(100 * MEGABYTE, 1), Seconds(0.0199, 0.0198, 0.02, 9), None, 0.0),
]


def test_the_table_is_aligned():
    assert table(ROWS).splitlines() == [
        "threshold     step     quartiles  all-reduces       bus  pack only  of step",
        "  0.25 MB  40.2 ms      40-41 ms           54  2.5 GB/s      20 ms     50 %",
        "    10 MB    20 ms  19.9-20.1 ms           13    5 GB/s      25 ms    125 %",
        "   100 MB  19.9 ms    19.8-20 ms            1         -          -        -",
    ]


def test_bars_begin_at_zero_and_the_recommended_one_is_marked():
    assert bar_chart(ROWS).splitlines() == [
        "time of a step by threshold",
        f"0.25 MB  {'#' * 40}  40.2 ms",
        f"  10 MB  {'#' * 20}{' ' * 20}    20 ms  <- recommended",
        f" 100 MB  {'#' * 20}{' ' * 20}  19.9 ms",
    ]


def test_a_bar_is_never_invisible():
    rows = [
        Row(Contender(1, 1), Seconds(1.0, 1.0, 1.0, 2), None, 0.0),
        Row(Contender(2, 1), Seconds(1e-6, 0.0, 0.0, 2), None, 0.0),
    ]
    assert bar_chart(rows).splitlines()[2].count("#") == 1


def test_the_recommendation_says_what_to_write():
    text = recommendation(ROWS)
    assert flowing(text).startswith(
        "Recommended threshold: 10 MB, the smallest within 3 % of the fastest (100 MB, 19.9 ms per step). "
    )
    assert text.endswith("\n  gs.AllreduceCallback(threshold_bytes=10 * 1024**2)  # the default")
    assert "the fastest (20 ms per step); no smaller one comes within 3 % of it." in flowing(recommendation(ROWS[:2]))


def flowing(text):
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("threshold", "code"), [(MEGABYTE // 4, "256 * 1024"), (1234, "1234"), (2 * MEGABYTE, "2 * 1024**2")]
)
def test_thresholds_are_written_as_code(threshold, code):
    only = Row(Contender(threshold, 1), Seconds(1.0, 1.0, 1.0, 2), None, 0.0)
    slower = Row(Contender(threshold // 2, 2), Seconds(2.0, 2.0, 2.0, 2), None, 0.0)
    assert f"threshold_bytes={code})" in recommendation([only, slower])


def test_one_threshold_alone_is_not_recommended():
    text = flowing(recommendation(ROWS[:1]))
    assert text.startswith("Nothing to choose: the thresholds all make the same 54 bucket(s)")
    assert "recommended" not in bar_chart(ROWS[:1])


def test_a_restless_machine_is_told():
    restless = Row(Contender(MEGABYTE, 1), Seconds(0.02, 0.018, 0.03, 9), None, 0.0)
    alike = replace(restless, contender=Contender(2 * MEGABYTE, 1))
    assert "lie 60 % apart; within them all thresholds do alike" in flowing(recommendation([restless, alike]))
    assert "lie 60 % apart; within them 1 MB and 10 MB do alike." in flowing(
        recommendation([restless, Row(Contender(10 * MEGABYTE, 1), Seconds(0.03, 0.03, 0.03, 9), None, 0.0), ROWS[0]])
    )
    far = Row(Contender(10 * MEGABYTE, 1), Seconds(0.05, 0.05, 0.05, 9), None, 0.0)
    assert "within them 1 MB is alone." in flowing(recommendation([restless, far]))


def test_what_was_not_measured_is_told():
    assert same_buckets(ROWS) == "Not measured: 0.5 MB; the buckets are those of 0.25 MB."
    assert same_buckets(ROWS[1:]) == ""


def test_a_share_of_packing_above_the_whole_is_explained():
    assert notes(ROWS[:1]) == same_buckets(ROWS)
    assert notes(ROWS[2:]) == ""
    assert notes(ROWS[1:]).startswith("Packing alone, into a buffer of its own, takes longer than some steps")


def test_no_paragraph_is_wider_than_a_terminal():
    restless = Row(Contender(MEGABYTE, 1), Seconds(0.02, 0.018, 0.03, 9), Seconds(1.0, 1.0, 1.0, 9), 0.0)
    for text in (recommendation([restless, *ROWS]), notes([restless, *ROWS]), table(ROWS)):
        assert max(map(len, text.splitlines())) < 80


def test_numbers_keep_three_digits():
    assert [megabytes(x * MEGABYTE) for x in (0.01, 0.25, 97.49, 999.4, 1234.5)] == [
        "10.2 KB",
        "0.25 MB",
        "97.5 MB",
        "999 MB",
        "1,234 MB",
    ]
    assert [milliseconds(x) for x in (1e-5, 0.0123456, 12.3456)] == ["0.01 ms", "12.3 ms", "12,346 ms"]

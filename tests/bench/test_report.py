"""Samples are summed up by their quartiles; a result says where and how it was made; numbers keep three digits."""

import pytest

from gradsync.bench.report import Seconds, milliseconds, provenance
from gradsync.errors import size_text


def test_timings_are_summed_up_by_their_quartiles():
    seconds = Seconds.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (seconds.lower_quartile, seconds.median, seconds.upper_quartile, seconds.samples) == (2.0, 3.0, 4.0, 5)
    assert seconds.spread == pytest.approx(2 / 3)


def test_one_timing_has_no_spread():
    assert Seconds.of([0.5]) == Seconds(0.5, 0.5, 0.5, 1)
    assert Seconds.of([0.5]).spread == Seconds.of([0.0]).spread == 0


def test_a_result_says_where_and_how_it_was_made():
    made = provenance(["gradsync", "bench", "a file.json"])
    assert made["command"] == "gradsync bench 'a file.json'"
    assert made["machine"]["usable_cores"] >= 1
    assert set(made["versions"]) == {"python", "numpy", "gradsync"}


def test_numbers_keep_three_digits():
    sizes = [size_text(x * 1024**2) for x in (0, 0.01, 0.25, 97.49, 999.4, 1000, 1234.5)]
    assert sizes == ["0 bytes", "10.2 KB", "256 KB", "97.5 MB", "999 MB", "1,000 MB", "1.21 GB"]
    assert [milliseconds(x) for x in (1e-5, 0.0123456, 12.3456)] == ["0.01 ms", "12.3 ms", "12,346 ms"]

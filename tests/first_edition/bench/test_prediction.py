"""Predictions follow the model of costs, and the link that was measured is the one that would take as long."""

import pytest

from gradsync.bench.measurement import Seconds
from gradsync.bench.prediction import describe, link_of, predict
from gradsync.bench.thresholds import Contender, Row
from gradsync.cost_model import Link, ring_seconds

TOTAL_BYTES = 100 * 1024**2


def test_the_link_that_was_measured_comes_back():
    link = Link(5e-6, 1 / 8e9)
    rows = []
    for count in (1, 4, 50):
        seconds = count * ring_seconds(4, TOTAL_BYTES / count, link)
        rows.append(Row(Contender(1, count), Seconds(seconds, seconds, seconds, 3), None, 0.0))
    found = link_of(rows, TOTAL_BYTES, 4)
    assert found.latency_seconds == pytest.approx(link.latency_seconds)
    assert found.seconds_per_byte == pytest.approx(link.seconds_per_byte)


def test_more_latency_wants_larger_buckets():
    quick, slow = (predict(TOTAL_BYTES, 64, 0.05, Link(latency, 1e-10), "given") for latency in (1e-7, 1e-5))
    assert quick.threshold_bytes < slow.threshold_bytes
    assert slow.exposed_seconds <= slow.exposed_seconds_by_default


def test_less_than_the_default_threshold_is_one_bucket_at_most():
    tiny = predict(100, 8, 0.01, Link(1e-5, 1e-9), "given")
    assert 1 <= tiny.threshold_bytes <= 100
    assert predict(1, 8, 0.01, Link(0.0, 0.0), "given").threshold_bytes == 1


def test_the_text_says_that_it_is_a_prediction_and_of_what():
    text = flowing(predict(TOTAL_BYTES, 1024, 0.05, Link(5e-6, 1 / 20e9), "given"))
    assert text.startswith("Prediction for 1,024 GPUs, not a measurement: a threshold of ")
    assert "after a backward pass of 50 ms" in text
    assert "links of 5 us and 20 GB/s (given)" in text
    assert "no limit to the bandwidth" in flowing(predict(TOTAL_BYTES, 2, 0.05, Link(5e-6, 0.0), "given"))


def flowing(prediction):
    return " ".join(describe(prediction).split())

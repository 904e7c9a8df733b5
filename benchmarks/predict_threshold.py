"""The best threshold for a number of GPUs, by the model of costs: a prediction, from two numbers about the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gradsync.bench.text import megabytes, milliseconds, wrapped
from gradsync.bench.thresholds import Row
from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES
from gradsync.cost_model import Link, best_threshold_bytes, exposed_seconds, fit_link, ring_seconds


@dataclass(frozen=True)
class Prediction:
    """What the model of costs says.

    Attributes:
        gpus: how many, in one ring.
        link: between two of them.
        origin: where the link's numbers come from.
        backward_seconds: how long the backward pass takes.
        threshold_bytes: the best threshold.
        exposed_seconds: how long after the backward pass its last bucket is done.
        exposed_seconds_by_default: likewise, with the default threshold.
    """

    gpus: int
    link: Link
    origin: str
    backward_seconds: float
    threshold_bytes: int
    exposed_seconds: float
    exposed_seconds_by_default: float


def predict(total_bytes: int, gpus: int, backward_seconds: float, link: Link, origin: str) -> Prediction:
    """Returns the threshold after which the least is left to wait for when the backward pass ends.

    Args:
        total_bytes: of all gradients.
        gpus: how many, at least two; one ring through all of them.
        backward_seconds: how long the backward pass takes; gradients are taken to come evenly over it.
        link: between neighbours in the ring.
        origin: where its numbers come from, for the text.
    """

    def seconds_of(size_bytes: float) -> float:
        return ring_seconds(gpus, size_bytes, link)

    exposed = partial(exposed_seconds, total_bytes, backward_seconds=backward_seconds, seconds_of=seconds_of)
    threshold = best_threshold_bytes(total_bytes, backward_seconds, seconds_of)
    by_default = min(DEFAULT_THRESHOLD_BYTES, total_bytes)
    return Prediction(
        gpus,
        link,
        origin,
        backward_seconds,
        max(round(threshold), 1),
        exposed(threshold_bytes=threshold),
        exposed(threshold_bytes=by_default),
    )


def link_of(rows: Sequence[Row], total_bytes: int, ranks: int) -> Link:
    """Returns the link of a ring that would take the measured times, packing and bookkeeping included.

    A step of k equal all-reduces says what one of a k-th of the bytes takes; the line through those is the ring's.

    Args:
        rows: with at least two different numbers of all-reduces.
        total_bytes: of all gradients.
        ranks: that were measured; at least two.
    """
    samples = [
        (total_bytes / row.contender.all_reduces, row.seconds.median / row.contender.all_reduces) for row in rows
    ]
    line = fit_link(samples)
    steps = 2 * (ranks - 1)
    return Link(line.latency_seconds / steps, line.seconds_per_byte * ranks / steps)


def describe(prediction: Prediction) -> str:
    """Returns the prediction as text; says what it rests on."""
    link = prediction.link
    speed = f"{1e-9 / link.seconds_per_byte:.3g} GB/s" if link.seconds_per_byte else "no limit to the bandwidth"
    return wrapped(
        f"Prediction for {prediction.gpus:,} GPUs, not a measurement: a threshold of "
        f"{megabytes(prediction.threshold_bytes)} would leave {milliseconds(prediction.exposed_seconds)} to wait for "
        f"after a backward pass of {milliseconds(prediction.backward_seconds)}; the default of "
        f"{megabytes(DEFAULT_THRESHOLD_BYTES)}, {milliseconds(prediction.exposed_seconds_by_default)}. "
        f"By one ring over links of {1e6 * link.latency_seconds:.3g} us and {speed} ({prediction.origin}); "
        "see docs/scaling.md for what the model leaves out."
    )

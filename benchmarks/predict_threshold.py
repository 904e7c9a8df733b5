"""Predicts the best bucket threshold for other machines, by the cost model. It measures nothing.

python benchmarks/predict_threshold.py --model bert --gpus 64 --latency-us 5 --bandwidth-gbs 20 --backward-ms 100
"""

from __future__ import annotations

import argparse
import sys
import textwrap

from cost_model import Link, best_threshold_bytes, exposed_seconds, ring_seconds
from gradsync.bench.models import gradients_of, total_bytes
from gradsync.bench.report import milliseconds
from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES
from gradsync.errors import InvalidArgument, size_text


def prediction(size_bytes: int, gpus: int, backward_seconds: float, link: Link) -> str:
    """Returns, in words, the threshold with the shortest wait after the backward pass.

    Args:
        size_bytes: of all gradients.
        gpus: how many, in one ring through all of them.
        backward_seconds: how long the backward pass takes; gradients are taken to arrive evenly over it.
        link: between neighbours in the ring.
    """

    def seconds_of(bucket_bytes: float) -> float:
        return ring_seconds(gpus, bucket_bytes, link)

    def exposed(threshold_bytes: float) -> str:
        return milliseconds(exposed_seconds(size_bytes, threshold_bytes, backward_seconds, seconds_of))

    best = best_threshold_bytes(size_bytes, backward_seconds, seconds_of)
    return textwrap.fill(
        f"Prediction for {gpus:,} GPUs, not a measurement: a threshold of {size_text(max(round(best), 1))} would leave "
        f"{exposed(best)} to wait for after a backward pass of {milliseconds(backward_seconds)}; the default of "
        f"{size_text(DEFAULT_THRESHOLD_BYTES)}, {exposed(min(DEFAULT_THRESHOLD_BYTES, size_bytes))}. "
        f"By one ring over links of {1e6 * link.latency_seconds:.3g} us and {1e-9 / link.seconds_per_byte:.3g} GB/s.",
        width=79,
        break_on_hyphens=False,
    )


def positive(text: str) -> float:
    """Returns a number above 0, for argparse."""
    number = float(text)
    if number <= 0:
        raise ValueError(text)
    return number


def main() -> int:
    """Prints the prediction."""
    parser = argparse.ArgumentParser(description="Predict the best bucket threshold; nothing is measured.")
    parser.add_argument("--model", required=True, help="resnet50, gpt2, bert, or a file of shapes (.json)")
    parser.add_argument("--gpus", required=True, type=int, help="how many, in one ring")
    parser.add_argument("--backward-ms", required=True, type=positive, help="how long the backward pass takes")
    parser.add_argument("--latency-us", required=True, type=positive, help="of a message")
    parser.add_argument("--bandwidth-gbs", required=True, type=positive, help="of a link, in 1e9 bytes/s")
    options = parser.parse_args()
    if options.gpus < 2:
        parser.error("--gpus needs to be at least 2")
    try:
        specs = gradients_of(options.model)
    except InvalidArgument as error:
        parser.error(str(error))
    print(f"{options.model}: {len(specs)} gradients, {size_text(total_bytes(specs))}")
    link = Link(1e-6 * options.latency_us, 1e-9 / options.bandwidth_gbs)
    print(prediction(total_bytes(specs), options.gpus, 1e-3 * options.backward_ms, link))
    return 0


if __name__ == "__main__":
    sys.exit(main())

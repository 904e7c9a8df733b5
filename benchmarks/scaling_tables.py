"""The predictions of docs/scaling.md, from the models of costs."""

from __future__ import annotations

from collections.abc import Callable

from cost_model import best_threshold_bytes, exposed_seconds
from models import MODELS, element_count
from nccl_cost_model import H100_NODES, Algorithm, fastest

MEGABYTE = 1024**2
BUCKET_BYTES = 10 * MEGABYTE
GPUS = (8, 64, 1024)

# Assumptions of the predictions. The page names them.
BACKWARD_SECONDS = {"ResNet-50": 0.05, "GPT-2 small": 0.1}
HOST_SECONDS_PER_BUCKET = 100e-6


def nccl() -> list[str]:
    """Returns the predicted times of NCCL's rings and trees for one bucket."""
    lines = [
        "| GPUs | algorithm | time | share of latency | bus bandwidth | NCCL uses it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for ranks in GPUS:
        chosen = fastest(ranks, BUCKET_BYTES, H100_NODES)
        for algorithm in Algorithm:
            way = fastest(ranks, BUCKET_BYTES, H100_NODES, algorithm)
            share = 100 * way.latency_seconds / way.seconds
            bus = way.bus_bytes_per_second(ranks, BUCKET_BYTES) / 1e9
            lines.append(
                f"| {ranks:,} | {algorithm.value}, {way.protocol.value} | {1e6 * way.seconds:,.0f} us | {share:.0f} % "
                f"| {bus:.0f} GB/s | {'yes' if way == chosen else 'no'} |"
            )
    return lines


def thresholds() -> list[str]:
    """Returns the predicted wait after the backward pass, by threshold."""
    sizes = (1, 10, 25)
    heads = " | ".join(f"with {size} MB" for size in sizes)
    lines = [f"| gradients | GPUs | best threshold | with it | {heads} |", "| --- |" + " --- |" * (3 + len(sizes))]
    for model, backward in BACKWARD_SECONDS.items():
        total = 4 * element_count(MODELS[model]())
        for ranks in GPUS:

            def seconds_of(size: float, ranks: int = ranks) -> float:
                return HOST_SECONDS_PER_BUCKET + fastest(ranks, max(1, round(size)), H100_NODES).seconds

            best = best_threshold_bytes(total, backward, seconds_of)
            shown_sizes = (best, *(size * MEGABYTE for size in sizes))
            exposed = [exposed_seconds(total, size, backward, seconds_of) for size in shown_sizes]
            shown = " | ".join(f"{1e6 * seconds:,.0f} us" for seconds in exposed)
            lines.append(f"| {model} | {ranks:,} | {best / MEGABYTE:.1f} MB | {shown} |")
    return lines


#: By their names in the page.
PREDICTIONS: dict[str, Callable[[], list[str]]] = {"nccl": nccl, "thresholds": thresholds}

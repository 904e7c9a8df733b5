"""Writes the tables of docs/scaling.md: predictions from the models of costs, measured figures from benchmarks/results.

python benchmarks/scaling_page.py          # rewrites docs/scaling.md
python benchmarks/scaling_page.py --check  # exit code 1 if the page is not up to date
"""

from __future__ import annotations

import re
import sys

import page_tables
import readme
from cost_model import best_threshold_bytes, exposed_seconds
from models import MODELS, element_count
from nccl_cost_model import H100_NODES, Algorithm, fastest

PAGE = readme.ROOT / "docs" / "scaling.md"
MEGABYTE = 1024**2
BUCKET_BYTES = 10 * MEGABYTE
GPUS = (8, 64, 1024)

# Assumptions of the predictions. The page names them.
BACKWARD_SECONDS = {"ResNet-50": 0.05, "GPT-2 small": 0.1}
HOST_SECONDS_PER_BUCKET = 100e-6


def nccl() -> list[str]:
    """Returns the predicted times of NCCL's rings and trees for one bucket."""
    lines = [
        "| GPUs | algorithm | time | of it latency | bus bandwidth | |",
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
                f"| {bus:.0f} GB/s | {'taken' if way == chosen else ''} |"
            )
    return lines


def thresholds() -> list[str]:
    """Returns the predicted wait after the backward pass, by threshold."""
    sizes = (1, 10, 25)
    heads = " | ".join(f"{size} MB" for size in sizes)
    lines = [f"| gradients | GPUs | best threshold | then | {heads} |", "| --- |" + " --- |" * (3 + len(sizes))]
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


TABLES = {"nccl": nccl, "thresholds": thresholds}


def render(text: str) -> str:
    """Returns the page with new content between its markers."""
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->\n)",
        lambda m: f"{m[1]}\n{_table(m[2])}{m[3]}",
        text,
        flags=re.DOTALL,
    )


def _table(name: str) -> str:
    return "\n".join(TABLES[name]()) + "\n" if name in TABLES else page_tables.table(name)


def main() -> int:
    """Rewrites or checks the page."""
    old = PAGE.read_text()
    new = render(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

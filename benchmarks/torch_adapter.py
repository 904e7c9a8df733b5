"""Times PyTorch's backward passes over gradsync beside DistributedDataParallel on gloo, in one run.

    cd benchmarks && python -m peers.install torch  # once
    python benchmarks/torch_adapter.py                   # writes benchmarks/results/torch_adapter.json
    python benchmarks/torch_adapter.py --quick           # few rounds of a small model, writes nothing

Two ranks, with one thread each for PyTorch, as torchrun sets it. A backward pass computes nothing: it hands out
gradients in a model's shapes, after a zero_grad() that is not timed. A round counts with the slower rank.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measurement import Seconds, add_output, output_beside_torch, provenance, write_result
from peers import systems
from peers.contenders import TORCH

FOLDER = Path(__file__).parent
ROUNDS, QUICK_ROUNDS = 30, 2
RUN_SECONDS = 300.0


def rows_of(samples: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Returns a row for each model and wrapper."""
    return [
        {"model": model, "what": what, "seconds": asdict(Seconds.of(of_wrapper))}
        for model, by_wrapper in samples.items()
        for what, of_wrapper in by_wrapper.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds of a small model; writes only with --output")
    parser.add_argument("--python", default=str(systems.ENVIRONMENTS / TORCH / "bin" / "python"), help="with PyTorch")
    add_output(parser, "torch_adapter")
    options = parser.parse_args()
    results = provenance("benchmarks/torch_adapter.py")
    if options.quick:
        arguments = [str(QUICK_ROUNDS), "small"]
    else:
        arguments = [str(ROUNDS), "ResNet-50"]
    found = output_beside_torch(options.python, "torch_adapter_rank.py", arguments, systems.THREADS, RUN_SECONDS)
    results["versions"]["torch"] = found["torch"]
    results["results"] = rows_of(found["samples"])
    for row in results["results"]:
        print(f"{row['model']:12} {row['what']:40} {1e3 * row['seconds']['median']:8.3g} ms")
    write_result("torch_adapter", options.output, results, is_whole=not options.quick)


if __name__ == "__main__":
    sys.exit(main())

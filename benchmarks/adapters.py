"""Times PyTorch's backward passes over gradsync beside DistributedDataParallel on gloo, in one run.

    cd benchmarks && python -m peers.install torch  # once
    python benchmarks/adapters.py                   # writes benchmarks/results/adapters.json
    python benchmarks/adapters.py --quick           # few rounds of a small model, writes nothing

Two ranks, with one thread each for PyTorch, as torchrun sets it. A backward pass computes nothing: it hands out
gradients in a model's shapes, after a zero_grad() that is not timed. A round counts with the slower rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradsync
from measurement import Seconds, output_of, provenance
from peers import systems
from peers.contenders import TORCH

FOLDER = Path(__file__).parent
ROUNDS, QUICK_ROUNDS = 30, 2
RUN_SECONDS = 300.0


def run(python: str, rounds: int, models: list[str]) -> dict[str, Any]:
    """Runs the ranks, and returns rank 0's output.

    Raises:
        RuntimeError: a rank failed; with its standard error.
    """
    command = [python, "-W", "ignore", "-m", "gradsync", "run", "--no-prefix", "-n", "2"]
    sources = str(Path(gradsync.__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        variables = {"PYTHONPATH": sources, "TMPDIR": folder, "GLOO_SOCKET_IFNAME": "lo"}
        command += [str(FOLDER / "adapters_rank.py"), str(rounds), *models]
        return output_of(command, systems.THREADS | variables, RUN_SECONDS)


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
    parser.add_argument("--output", type=Path, help="where the JSON goes [benchmarks/results/adapters.json]")
    options = parser.parse_args()
    results = provenance("benchmarks/adapters.py")
    if options.quick:
        found = run(options.python, QUICK_ROUNDS, ["small"])
    else:
        found = run(options.python, ROUNDS, ["ResNet-50"])
    results["versions"]["torch"] = found["torch"]
    results["results"] = rows_of(found["samples"])
    for row in results["results"]:
        print(f"{row['model']:12} {row['what']:40} {1e3 * row['seconds']['median']:8.3g} ms")
    output = options.output or (None if options.quick else FOLDER / "results" / "adapters.json")
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

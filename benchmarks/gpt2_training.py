"""Trains GPT-2 of the transformers library over gradsync beside DistributedDataParallel on gloo, in one run.

    cd benchmarks && python -m peers.install torch  # once
    python benchmarks/gpt2_training.py                 # writes benchmarks/results/gpt2_training.json
    python benchmarks/gpt2_training.py --quick         # two steps of a tiny GPT-2, writes nothing

Two ranks, with one thread each for PyTorch, as torchrun sets it. The weights are random: they are made from the
configuration, nothing is downloaded. Each contender trains a model of its own, from the same weights, on the same
batches, with dropout from the same seeds and with AdamW; the contenders take turns step by step, in an order that
changes. A step is zero_grad(), forward pass, loss, backward pass and optimiser; it counts with the slower rank. The
first step, in which buffers are made, is left out of the medians.

After the last step the weights of the contenders are compared bit by bit, and those of the ranks. With two ranks a sum
does not depend on the order, and halves are exact but for subnormal numbers, before the sum (DistributedDataParallel)
as after it (gradsync): so the bits can be the same. With more ranks they need not be.

The exit code is 1 where some bit differs, or where gradsync's step is slower than that of DistributedDataParallel.
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
STEPS, QUICK_STEPS = 6, 2
RUN_SECONDS = 280.0
OURS, THEIRS = "Synchronised", "DistributedDataParallel on gloo"


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each contender."""
    return [
        {
            "model": found["model"],
            "parameters": found["parameters"],
            "what": what,
            "first_step_seconds": samples["step"][0],
            "step_seconds": asdict(Seconds.of(samples["step"][1:])),
            "backward_seconds": asdict(Seconds.of(samples["backward"][1:])),
            "losses": samples["losses"],
            "weights_equal_bit_by_bit": found["are_equal"][what],
            "ranks_equal_bit_by_bit": found["ranks_are_equal"][what],
        }
        for what, samples in found["samples"].items()
    ]


def ratio_of(rows: list[dict[str, Any]]) -> float:
    """Returns the ratio of gradsync's step to the faster one of DistributedDataParallel."""
    ours = next(row["step_seconds"]["median"] for row in rows if row["what"] == OURS)
    return float(ours / min(row["step_seconds"]["median"] for row in rows if row["what"].startswith(THEIRS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny GPT-2; writes only with --output")
    parser.add_argument("--python", default=str(systems.ENVIRONMENTS / TORCH / "bin" / "python"), help="with PyTorch")
    add_output(parser, "gpt2_training")
    options = parser.parse_args()
    results = provenance("benchmarks/gpt2_training.py")
    arguments = ["tiny", str(QUICK_STEPS)] if options.quick else ["GPT-2 small", str(STEPS)]
    variables = systems.THREADS | {"HF_HUB_OFFLINE": "1"}
    found = output_beside_torch(options.python, "gpt2_training_rank.py", arguments, variables, RUN_SECONDS)
    results["versions"] |= found["versions"]
    results["settings"] = found["settings"]
    rows = results["results"] = rows_of(found)
    ratio = ratio_of(rows)
    are_equal = all(row["weights_equal_bit_by_bit"] and row["ranks_equal_bit_by_bit"] for row in rows)
    results["promises"] = [
        {"what": "weights equal bit by bit", "kept": are_equal},
        {"what": f"step of {OURS} against the quicker {THEIRS}", "limit": 1.0, "ratio": ratio, "kept": ratio <= 1},
    ]
    print(f"{OURS} against the quicker {THEIRS}: {ratio:.3f}")
    write_result("gpt2_training", options.output, results, is_whole=not options.quick)
    return int(not all(promise["kept"] for promise in results["promises"]))


if __name__ == "__main__":
    sys.exit(main())

"""Times the training of examples/train_digits.py, and of a larger network in the same loop, with 1, 2, 4 ... ranks.

    python benchmarks/training_speed.py          # two minutes; writes benchmarks/results/training_speed.json
    python benchmarks/training_speed.py --quick  # one short round of the small network, writes nothing

Each row has the same cores: ranks times BLAS threads is the number of usable cores, but for one process with one
thread, which stands for one core. All rows train on the same global batches, so that they take the same steps to the
same accuracy: the time of a step is the time to that accuracy. A sample is the mean over all steps of a run, with the
test after each epoch; runs take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from gradsync.machine import BLAS_VARIABLES, usable_cores
from measurement import Seconds, add_output, output_of, provenance, write_result

FOLDER = Path(__file__).parent
MODELS = {"digits": "the example", "larger": "a larger network"}
EPOCHS = {"digits": 8, "larger": 8}
ROUNDS = 5
RUN_SECONDS = 300.0
MOST_RANKS = 8  # that divide both global batches


class Contender(NamedTuple):
    """A number of ranks, and the threads of each."""

    ranks: int
    threads: int


def contenders(cores: int) -> Iterator[Contender]:
    """Yields one process on one core and on all, and ranks that share all cores."""
    yield Contender(1, 1)
    ranks = 1
    while ranks <= min(cores, MOST_RANKS):
        if cores > 1:
            yield Contender(ranks, cores // ranks)
        ranks *= 2


def run(model: str, contender: Contender, epochs: int) -> dict[str, Any]:
    """Trains, and returns rank 0's measurement.

    Raises:
        RuntimeError: a rank failed; with its standard error.
    """
    command = [sys.executable, "-m", "gradsync", "run", "--no-prefix", "-n", str(contender.ranks)]
    command += [str(FOLDER / "training_speed_rank.py"), model, str(epochs)]
    return output_of(command, dict.fromkeys(BLAS_VARIABLES, str(contender.threads)), RUN_SECONDS)


def measure(models: list[str], rounds: int, epochs: dict[str, int]) -> list[dict[str, Any]]:
    """Returns a row for each network and contender; all take turns."""
    keys = [(model, contender) for model in models for contender in contenders(usable_cores())]
    runs: dict[tuple[str, Contender], list[dict[str, Any]]] = {key: [] for key in keys}
    for number in range(rounds):
        for model, contender in keys if number % 2 else reversed(keys):
            runs[model, contender].append(run(model, contender, epochs[model]))
    return [
        {
            "model": MODELS[model],
            "parameters": found[0]["parameters"],
            "ranks": contender.ranks,
            "threads": contender.threads,
            "step_seconds": asdict(Seconds.of([each["seconds_of_step"] for each in found])),
            "communication_share": sorted(each["communication_share"] for each in found)[len(found) // 2],
            "accuracy": found[0]["accuracy"],
        }
        for (model, contender), found in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round; writes only with --output")
    add_output(parser, "training_speed")
    options = parser.parse_args()
    results = provenance("benchmarks/training_speed.py")
    if options.quick:
        results["results"] = measure(["digits"], 1, {"digits": 1})
    else:
        results["results"] = measure(list(MODELS), ROUNDS, EPOCHS)
    write_result("training_speed", options.output, results, is_whole=not options.quick)


if __name__ == "__main__":
    sys.exit(main())

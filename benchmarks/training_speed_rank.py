"""A rank of training_speed.py: trains examples/train_digits.py with a network, and prints what rank 0 measured as JSON.

gradsync run -n 2 benchmarks/training_speed_rank.py digits 5
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gradsync as gs
import train_digits
from digits_network import Network


class Model(NamedTuple):
    """A network of the example, and the images of a step over all ranks."""

    channels: tuple[int, int]
    global_batch: int


MODELS = {"digits": Model((16, 32), 48), "larger": Model((64, 128), 240)}


def main(name: str, epochs: int) -> None:
    model = MODELS[name]
    train_digits.Network = partial(Network, channels=model.channels)  # type: ignore[misc, assignment]
    settings = train_digits.Settings(epochs=epochs, global_batch=model.global_batch, quiet=True)
    with gs.init_process_group("auto" if gs.is_launched() else "local") as comm:
        train_digits.train(comm, replace(settings, epochs=1))  # to warm up
        result = train_digits.train(comm, settings)
        if comm.rank == 0:
            found = {
                "seconds_of_step": result.seconds / result.steps,
                "communication_share": result.statistics.communication_seconds / result.seconds,
                "accuracy": result.accuracies[-1],
                "parameters": sum(parameter.size for parameter in result.parameters.values()),
            }
            print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

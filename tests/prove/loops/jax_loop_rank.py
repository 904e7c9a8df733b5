"""A rank that trains in the loop of examples/jax_loop.py, and leaves the weights: jax_loop_rank.py FOLDER.

Two ranks take half of each batch each. Alone, a rank takes whole batches.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import gradsync as gs

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "jax_loop.py"))
STEPS = 30


def batches_of(rank: int, ranks: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for points, inside in EXAMPLE["make_batches"](np.random.default_rng(1), STEPS):
        yield points[rank::ranks], inside[rank::ranks]


if __name__ == "__main__":
    with gs.init_process_group() as comm:
        # All begin with what rank 0 has.
        parameters = gs.broadcast_tree(EXAMPLE["make_parameters"](np.random.default_rng(comm.rank)))
        parameters = EXAMPLE["train"](parameters, batches_of(comm.rank, comm.world_size))
        weights = {**parameters["hidden"], "out": parameters["out"]}
        np.savez(Path(sys.argv[1], f"{comm.rank}.npz"), **weights)

"""Gradient accumulation: four small batches make a step, and only their sum travels.

Run it with `gradsync run -n 2 examples/gradient_accumulation.py`.
"""

from contextlib import nullcontext

import numpy as np

import gradsync as gs

STEPS = 100
BATCHES = 4  # in a step

with gs.init_process_group() as comm:
    rng = np.random.default_rng(comm.rank)
    weights = np.zeros(3)
    sync = gs.AllreduceCallback("mean")

    for _ in range(STEPS):
        total = np.zeros(3)
        for batch in range(BATCHES):
            x = rng.normal(size=(64, 3))
            total += 2 * (x @ weights - x @ [1.0, 2.0, 3.0]) @ x / len(x) / BATCHES
            is_last = batch == BATCHES - 1
            with nullcontext() if is_last else sync.no_sync(), sync.backward():
                gradient = sync("weights", total)  # stays here, but for the last: that is reduced
        weights -= 0.1 * gradient.result()

    if comm.rank == 0:
        print(f"weights {weights.round(3)}, {sync.statistics.all_reduces} all-reduces in {STEPS} steps")

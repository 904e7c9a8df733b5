"""Gradient accumulation: a step has four small batches, and only the sum of their gradients is sent.

Run it with `gradsync run -n 2 examples/gradient_accumulation.py`.
"""

import numpy as np

import gradsync as gs

STEPS = 100
BATCHES = 4  # small batches in a step
SAMPLES = 64  # in a small batch


def train(comm, steps):
    """Returns weights and bias, in one array, after each step."""
    rng = np.random.default_rng(comm.rank)
    weights, bias, history = np.zeros(3), np.zeros(1), []
    gs.bcast_list_([weights, bias])
    sync = gs.AllreduceCallback("mean")
    for _ in range(steps):
        sum_weights, sum_bias = np.zeros(3), np.zeros(1)
        for _ in range(BATCHES):
            x = rng.normal(size=(SAMPLES, 3))
            error = x @ weights + bias - (x @ [1.0, 2.0, 3.0] + 4.0)
            sum_weights += 2 * error @ x / (BATCHES * SAMPLES)  # the mean over all samples of this rank
            sum_bias += 2 * error.sum() / (BATCHES * SAMPLES)
        with sync.backward():  # hand over each sum once; nothing was sent before
            grad_weights = sync("weights", sum_weights)
            grad_bias = sync("bias", sum_bias)
        weights -= 0.1 * grad_weights.result()  # the mean over the ranks
        bias -= 0.1 * grad_bias.result()
        history.append(np.concatenate([weights, bias]))
    if comm.rank == 0:
        print(f"{sync.statistics.all_reduces} all-reduces for {steps * BATCHES} small batches")
    return history


if __name__ == "__main__":
    with gs.init_process_group() as comm:
        history = train(comm, STEPS)
        if comm.rank == 0:
            for step in (1, 10, STEPS):
                print(f"step {step}: weights {history[step - 1][:3].round(3)}, bias {history[step - 1][3:].round(3)}")

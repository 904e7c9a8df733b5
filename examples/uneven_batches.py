"""Ranks with different numbers of batches: a rank without a batch takes part with zeros.

    gradsync run -n 2 examples/uneven_batches.py

121 samples are not a multiple of two ranks, nor of the batch size. No sample is left out or repeated.
"""

import numpy as np

import gradsync as gs

SAMPLES = 121
BATCH = 4

with gs.init_process_group() as comm:
    rng = np.random.default_rng(0)  # all ranks make the same data; each rank takes its share below
    x = rng.normal(size=(SAMPLES, 3))
    y = x @ [1.0, 2.0, 3.0] + 4.0
    state = {"weights": np.zeros(3), "bias": np.zeros(1), "steps": 0}
    sync = gs.AllreduceCallback("mean")

    for epoch in range(10):
        mine = gs.shard_indices(SAMPLES, epoch, uneven="keep")
        batches = [mine[begin : begin + BATCH] for begin in range(0, len(mine), BATCH)]
        with sync.join() as joined:  # ends when no rank has a batch any more
            for batch in batches:
                error = x[batch] @ state["weights"] + state["bias"] - y[batch]
                with sync.backward():
                    grad_weights = sync("weights", 2 * error @ x[batch] / len(batch))
                    grad_bias = sync("bias", 2 * error.mean(keepdims=True))
                state["weights"] -= 0.1 * grad_weights.result()
                state["bias"] -= 0.1 * grad_bias.result()
                state["steps"] += 1
        # A rank without batches has missed the last steps: all ranks take the state of a rank that made these steps.
        state = gs.broadcast_tree(state, root=joined.last_rank)

    gs.check_consistency({"weights": state["weights"], "bias": state["bias"]})
    by_rank = comm.objects.all_gather(len(batches))
    if comm.rank == 0:
        weights, bias = state["weights"].round(3), state["bias"].round(3)
        print(f"batches by rank {by_rank}, {state['steps']} steps: weights {weights}, bias {bias}")

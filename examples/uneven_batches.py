"""Ranks with different numbers of samples: each rank's weight in the mean is the number of samples in its batch.

    gradsync run -n 2 examples/uneven_batches.py

121 samples are not a multiple of two ranks, nor of the batch size. No sample is left out or repeated, and each step is
the step of one process that takes the batches of all ranks as one.
"""

import numpy as np

import gradsync as gs

SAMPLES = 121
BATCH = 4


def train(epochs):
    """Returns weights and bias, in one array, after each step."""
    rng = np.random.default_rng(0)  # all ranks make the same data; each rank takes its share below
    x = rng.normal(size=(SAMPLES, 3))
    y = x @ [1.0, 2.0, 3.0] + 4.0
    weights, bias, history = np.zeros(3), np.zeros(1), []
    sync = gs.AllreduceCallback("mean", parameters={"weights": weights, "bias": bias})
    for epoch in range(epochs):
        mine = gs.shard_indices(SAMPLES, epoch, uneven="keep")
        batches = iter([mine[begin : begin + BATCH] for begin in range(0, len(mine), BATCH)])
        while True:
            batch = next(batches, mine[:0])  # no samples: this rank has no batch any more
            with sync.backward(weight=len(batch)):
                if len(batch):  # a rank whose weight is 0 need not hand over anything
                    error = x[batch] @ weights + bias - y[batch]
                    sync("weights", 2 * error @ x[batch] / len(batch))
                    sync("bias", 2 * error.mean(keepdims=True))
            if sync.total_weight == 0:  # no rank has a batch any more: all ranks end the epoch in this step
                break
            weights -= 0.1 * sync.results()["weights"]  # the mean over the samples of all ranks
            bias -= 0.1 * sync.results()["bias"]
            history.append(np.concatenate([weights, bias]))
    return history


if __name__ == "__main__":
    with gs.init_process_group() as comm:
        history = train(10)
        gs.check_consistency({"model": history[-1]})
        by_rank = comm.objects.all_gather(len(gs.shard_indices(SAMPLES, uneven="keep")))
        if comm.rank == 0:
            weights, bias = history[-1][:3].round(3), history[-1][3:].round(3)
            print(f"samples by rank {by_rank}, {len(history)} steps: weights {weights}, bias {bias}")

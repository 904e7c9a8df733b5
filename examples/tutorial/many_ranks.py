"""Tutorial: the loop of one_process.py on any number of ranks. Each rank computes on its own samples."""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:  # 1. join the other ranks
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 3))
    y = x @ [1.0, 2.0, 3.0] + 4.0
    weights, bias = rng.normal(size=3), np.zeros(1)

    mine = slice(comm.rank, None, comm.world_size)  # 2. take this rank's samples
    x, y = x[mine], y[mine]
    gs.bcast_list_([weights, bias])  # 3. begin with the parameters of rank 0
    sync = gs.AllreduceCallback("mean")

    for step in range(1, 101):
        error = x @ weights + bias - y
        with sync.backward():  # 4. hand over each gradient; the end of the block waits for the other ranks
            grad_weights = sync("weights", 2 * error @ x / len(y))
            grad_bias = sync("bias", 2 * error.mean(keepdims=True))
        weights -= 0.1 * grad_weights.result()  # the mean over all ranks
        bias -= 0.1 * grad_bias.result()
        if step in (1, 10, 100) and comm.rank == 0:
            print(f"step {step}: weights {weights.round(4)}, bias {bias.round(4)}")

    if comm.rank == 0:
        print(f"world size {comm.world_size}, backend {comm.backend}")

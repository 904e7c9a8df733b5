"""Tutorial: the loop of many_ranks.py on GPUs if each rank has a GPU, and on CPUs otherwise."""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    if comm.backend == "nccl":
        import cupy as xp  # after init_process_group(), which selects the GPU of this rank
    else:
        import numpy as xp

    rng = np.random.default_rng(0)
    mine = slice(comm.rank, None, comm.world_size)
    x = xp.asarray(rng.normal(size=(512, 3))[mine])
    y = x @ xp.asarray([1.0, 2.0, 3.0]) + 4.0
    weights, bias = xp.asarray(rng.normal(size=3)), xp.zeros(1)
    gs.bcast_list_([weights, bias])
    sync = gs.AllreduceCallback("mean")

    for _ in range(100):
        error = x @ weights + bias - y
        with sync.backward():
            grad_weights = sync("weights", 2 * error @ x / len(y))
            grad_bias = sync("bias", 2 * error.mean(keepdims=True))
        weights -= 0.1 * grad_weights.result()
        bias -= 0.1 * grad_bias.result()

    if comm.rank == 0:
        print(f"{comm.world_size} ranks over {comm.backend}: weights {weights.round(4)}, bias {bias.round(4)}")

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:  # joins the other ranks, which the launcher has started
    rng = np.random.default_rng(comm.rank)  # each rank has its own data
    x = rng.normal(size=(256, 3))
    y = x @ [1.0, 2.0, 3.0] + 4.0
    weights, bias = rng.normal(size=3), np.zeros(1)
    gs.bcast_list_([weights, bias])  # all begin with the parameters of rank 0
    sync = gs.AllreduceCallback("mean")
    for _ in range(100):
        error = x @ weights + bias - y
        with sync.backward():  # at its end all gradients are averaged over the ranks
            sync("weights", 2 * error @ x / len(y))
            sync("bias", 2 * error.mean(keepdims=True))
        weights -= 0.1 * sync.results()["weights"]
        bias -= 0.1 * sync.results()["bias"]
    if comm.rank == 0:
        print(f"{comm.world_size} ranks over {comm.backend}: weights {weights.round(3)}, bias {bias.round(3)}")

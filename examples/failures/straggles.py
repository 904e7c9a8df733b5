"""A rank computes more, and the other waits: gradsync run -n 2 --trace traced examples/failures/straggles.py"""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    layers = {f"layer{n}": np.ones((512, 2048), np.float32) for n in range(4, 0, -1)}  # 4 MB each
    layers["bias"] = np.ones(512, np.float32)
    sync = gs.AllreduceCallback("mean", threshold_bytes=6 * 1024**2)
    weights = np.ones((2048, 32), np.float32)
    gs.bcast_list_([weights])
    for _ in range(3):
        with sync.backward():
            for name, gradient in layers.items():
                for _ in range(2 + comm.rank):  # rank 1 computes more, so rank 0 waits for it
                    np.matmul(layers["layer1"], weights)
                sync(name, gradient)

"""Gradients that live inside the buckets: no copy is needed to reduce them.

Run it with `gradsync run -n 2 examples/gradients_in_buckets.py`.
"""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    rng = np.random.default_rng(comm.rank)
    x = rng.normal(size=(256, 3))
    y = x @ [1.0, 2.0, 3.0] + 4.0
    parameters = {"bias": np.zeros(1), "weights": np.zeros(3)}  # in the order of the backward pass
    sync = gs.AllreduceCallback("mean", parameters=parameters, gradient_as_bucket_view=True)
    gradients = sync.gradient_buffers()  # arrays of the same shapes, inside the buckets

    for _ in range(100):
        error = x @ parameters["weights"] + parameters["bias"] - y
        with sync.backward():
            gradients["bias"][...] = 2 * error.mean()  # write into the bucket
            sync("bias", gradients["bias"])
            np.matmul(2 * error / len(y), x, out=gradients["weights"])
            sync("weights", gradients["weights"])
        for name, gradient in gradients.items():  # the arrays now hold the mean over all ranks
            parameters[name] -= 0.1 * gradient

    if comm.rank == 0:
        print(f"weights {parameters['weights'].round(3)}, bias {parameters['bias'].round(3)}")

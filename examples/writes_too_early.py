"""A program that changes a gradient after the hand-over: the debug mode names the gradient and the line."""

import numpy as np

import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    flat = np.ones(1010)  # all gradients in one buffer
    shared, bias = flat[:1000], flat[1000:]
    with sync.backward():
        sync("embedding", shared)  # the output layer's part of a weight that two layers share
        sync("bias", bias)
        flat[:1000] += 1.0  # the input layer's part comes too late; `shared += 1.0` would raise ValueError here

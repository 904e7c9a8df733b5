"""Hooks: functions that reduce the buckets of gradients in their own way. These four send fewer bytes.

`callback.register_hook(hook)` replaces the all-reduce: at the end of a step gradsync calls the hook with each bucket,
in the same order on every rank. A bucket has `buffer` (its gradients in one flat array, of NumPy or CuPy), `names`,
`index`, `communicator` and `op` ("sum" or "mean"; "sum" if the ranks have unequal weights, which are in the values
already). The hook leaves the reduced values in `buffer`. The hooks here are for real floating-point gradients.

Run it with `gradsync run -n 2 examples/hooks.py`. Between processes of one machine, fewer bytes make no step faster:
measure before you use such a hook.
"""

import math
import sys

import ml_dtypes  # pip install ml_dtypes: the dtype bfloat16
import numpy as np

import gradsync as gs

# -- Half precision: half of the bytes of float32 ----------------------------------------------------------------------


def float16(bucket):
    """11 bits of precision; numbers and sums above 65504 become infinity."""
    small = bucket.buffer.astype("float16")
    bucket.communicator.all_reduce(small, bucket.op)
    bucket.buffer[...] = small


def bfloat16(bucket):
    """8 bits of precision, and the range of float32."""
    small = bucket.buffer.astype(ml_dtypes.bfloat16)
    bucket.communicator.all_reduce(small, bucket.op)
    bucket.buffer[...] = small


# -- Compression with error feedback -----------------------------------------------------------------------------------
#
# Both classes keep what the compression has lost of a bucket, and add it to the bucket's gradients in the next step. So
# the sum of the results over many steps is wrong by the error of one step only. Make one object for each callback.
# gs.rebuild() calls reset(): a new rank has kept nothing, and what the ranks keep has to fit together.
# Sources: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback
# fixes SignSGD and other gradient compression schemes", ICML 2019.


def module_of(array):
    """Returns the module whose functions work on the array: numpy or cupy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def finite(array):
    """Returns a copy without NaN and infinity, so that they spoil one step only."""
    xp = module_of(array)
    return xp.where(xp.isfinite(array), array, array.dtype.type(0))


class Int8:
    """Sends int8, and a float32 scale for each 256 values: a quarter of the bytes of float32.

    The scale is 1/127 of the block's largest value, so each value is wrong by at most 1/254 of that. Each rank gets the
    values of all others, which is more than an all-reduce sends if there are 8 ranks or more.
    """

    def __init__(self):
        self.lost = {}  # by the names of a bucket's gradients

    def reset(self):
        self.lost.clear()

    def __call__(self, bucket):
        xp, comm, size = module_of(bucket.buffer), bucket.communicator, bucket.buffer.size
        blocks = -(-size // 256)  # the last one is filled up with zeros
        values = self.lost.get(bucket.names)
        if values is None or len(values) != blocks:
            values = xp.zeros((blocks, 256), "float32")
        values.reshape(-1)[:size] += bucket.buffer
        scales = xp.maximum(abs(values).max(axis=1).reshape(-1, 1) / 127, np.float32(1e-30))  # not 0: it divides
        small = xp.rint(values / scales).astype("int8")
        self.lost[bucket.names] = finite(values - small * scales)
        of_all = comm.all_gather(small).reshape(comm.world_size, -1, 256)
        scales_of_all = comm.all_gather(scales).reshape(comm.world_size, -1, 1)
        total = xp.zeros(values.shape, "float32")
        for rank in range(comm.world_size):
            total += of_all[rank] * scales_of_all[rank]
        if bucket.op == "mean":
            total /= comm.world_size
        bucket.buffer[...] = total.reshape(-1)[:size]


class PowerSGD:
    """Sends two thin matrices whose product is near the bucket, which is taken as a square matrix.

    Each step turns the factors of the last step towards the largest singular vectors (one power iteration). For n
    gradients it sends 2 * rank * sqrt(n) numbers; a bucket that would save less than half is all-reduced as it is.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, algorithm 1.
    """

    def __init__(self, rank=4):
        self.rank = rank  # the number of columns of each factor; not the number of a process
        self.kept = {}  # by the names of a bucket's gradients: what was lost, and the right factor

    def reset(self):
        self.kept.clear()

    def __call__(self, bucket):
        xp, comm, size = module_of(bucket.buffer), bucket.communicator, bucket.buffer.size
        side = math.isqrt(max(size - 1, 0)) + 1
        if 4 * side * self.rank > size:
            comm.all_reduce(bucket.buffer, bucket.op)
            return
        matrix, right = self.kept.get(bucket.names, (None, None))
        if matrix is None or matrix.shape != (side, side):
            matrix = xp.zeros((side, side), "float32")
            right = xp.asarray(np.random.default_rng(0).normal(size=(side, self.rank)).astype("float32"))
        matrix.reshape(-1)[:size] += bucket.buffer
        left = matrix @ right
        comm.all_reduce(left, "mean")
        left = xp.linalg.qr(left)[0]  # orthonormal columns
        right = matrix.T @ left
        comm.all_reduce(right, "mean")
        result = left @ right.T
        lost = finite(matrix - result)
        lost.reshape(-1)[size:] = 0
        self.kept[bucket.names] = lost, finite(right)
        bucket.buffer[...] = result.reshape(-1)[:size] * (comm.world_size if bucket.op == "sum" else 1)


# -- How far they are from the plain mean ------------------------------------------------------------------------------


def train(comm, hook=None, steps=200):
    """Learns a linear map from data of this rank; returns its 64 x 64 weights."""
    rng = np.random.default_rng(comm.rank)
    x = rng.normal(size=(1000, 64)).astype("float32")
    map_to_learn = np.random.default_rng(99).normal(size=(64, 64)).astype("float32")
    y = x @ map_to_learn + rng.normal(size=(1000, 64)).astype("float32")
    weights = np.zeros((64, 64), "float32")
    gs.bcast_list_([weights], communicator=comm)
    sync = gs.AllreduceCallback("mean")
    if hook is not None:
        sync.register_hook(hook)
    for _ in range(steps):
        with sync.backward():
            gradient = sync("weights", x.T @ (x @ weights - y) / len(x))
        weights -= 0.1 * gradient.result()
    return weights


if __name__ == "__main__":
    with gs.init_process_group() as comm:
        plain = train(comm)
        for name, hook in {"float16": float16, "bfloat16": bfloat16, "Int8": Int8(), "PowerSGD": PowerSGD()}.items():
            distance = np.linalg.norm(train(comm, hook) - plain) / np.linalg.norm(plain)
            if comm.rank == 0:
                print(f"{name}: weights {distance:.4%} from those of the plain mean")

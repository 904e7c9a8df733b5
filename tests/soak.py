"""A soak: thousands of collectives of random kind, size and dtype, with random pauses, each checked bit for bit.

    python tests/soak.py                        # 10,000 calls on 2 and on 4 ranks over shared memory
    python tests/soak.py --calls 500 --ranks 3

The tests run it in a shortened form.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np

import gradsync as gs
from gradsync.reduction import ReduceOp, reduce_into

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int8", "int32", "int64", "uint16", "bool")
OPS = {"bool": ("min", "max"), "complex64": ("sum", "mean", "prod")}
FLOATING_OPS, INTEGER_OPS = ("sum", "mean", "prod", "min", "max"), ("sum", "prod", "min", "max")
LARGEST_ELEMENTS = 300_000
PAUSE_SECONDS = 2e-3


def soak(comm: Any, calls: int, seed: int) -> int:
    """Runs on every rank. Every choice comes from `seed`, but the pauses, which differ by rank.

    Returns the number of collectives that were checked; raises AssertionError for a wrong bit.
    """
    choices = np.random.default_rng(seed)
    pauses = np.random.default_rng([seed, comm.rank])
    callback = gs.AllreduceCallback("sum", comm, threshold_bytes=100_000)
    for call in range(calls):
        if pauses.random() < 0.02:
            time.sleep(pauses.random() * PAUSE_SECONDS)
        kind = choices.choice(
            ["all_reduce", "all_reduce", "broadcast", "barrier", "gradients"], p=[0.3, 0.3, 0.25, 0.1, 0.05]
        )
        name = str(choices.choice(DTYPES))
        # Sizes of every magnitude, and those around the limits at which the way of reducing changes.
        size = int(choices.choice([0, 1, 31, 1000, 32_768, 32_769, int(10 ** (choices.random() * 5.4))]))
        if kind == "barrier":
            comm.barrier()
        elif kind == "broadcast":
            _check_broadcast(comm, name, size, int(choices.integers(comm.world_size)), call)
        elif kind == "gradients":
            _check_gradients(comm, callback, choices, call)
        else:
            ops = OPS.get(name, FLOATING_OPS if name.startswith(("float", "bfloat")) else INTEGER_OPS)
            _check_all_reduce(comm, name, size, str(choices.choice(ops)), call)
    return calls


def values(rank: int, call: int, name: str, size: int) -> np.ndarray[Any, Any]:
    """What a rank contributes to a call: cheap to make, different for every rank, call and place."""
    numbers = (np.arange(size) * 37 + rank * 11 + call * 7) % 13
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    return (
        (numbers / 8 + 0.25).astype(dtype) if name.startswith(("float", "bfloat", "complex")) else numbers.astype(dtype)
    )


def _check_all_reduce(comm: Any, name: str, size: int, op: str, call: int) -> None:
    contributions = [values(rank, call, name, size) for rank in range(comm.world_size)]
    want = np.empty_like(contributions[0])
    with np.errstate(all="ignore"):
        reduce_into(ReduceOp(op), contributions, want)
    array = contributions[comm.rank].copy()
    comm.all_reduce(array, op)
    assert array.tobytes() == want.tobytes(), f"call {call}: {op} of {size} {name}"


def _check_broadcast(comm: Any, name: str, size: int, root: int, call: int) -> None:
    array = values(comm.rank, call, name, size)
    comm.broadcast(array, root)
    assert array.tobytes() == values(root, call, name, size).tobytes(), f"call {call}: broadcast of {size} {name}"


def _check_gradients(comm: Any, callback: gs.AllreduceCallback, choices: np.random.Generator, call: int) -> None:
    sizes = [int(size) for size in choices.integers(0, 20_000, 6)]
    with callback.backward():
        futures = [callback(i, values(comm.rank, call + i, "int64", size)) for i, size in enumerate(sizes)]
    for i, (size, future) in enumerate(zip(sizes, futures, strict=True)):
        want = sum(values(rank, call + i, "int64", size) for rank in range(comm.world_size))
        assert future.result().tobytes() == np.asarray(want, np.int64).tobytes(), f"call {call}: gradient {i}"


def run(ranks: int, calls: int, seed: int) -> None:
    began = time.monotonic()
    done = gs.launch(_on_rank, (calls, seed), ranks)
    print(f"{ranks} ranks: {done[0]} collectives, every bit right, {time.monotonic() - began:.1f} s", flush=True)


def _on_rank(calls: int, seed: int) -> int:
    with gs.init_process_group("shm", collective_timeout_seconds=60.0) as comm:
        return soak(comm, calls, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Thousands of random collectives over shared memory, each checked.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for ranks in options.ranks:
        run(ranks, options.calls, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())

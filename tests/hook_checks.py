"""What the hooks of examples/hooks.py must do on every backend; run inside rank processes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from contract import dtype_of

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import hooks

N = 1024 + 300  # neither a square, nor whole blocks


def to_device(comm: Any, values: np.ndarray[Any, Any]) -> Any:
    if comm.device == "cpu":
        return values.copy()
    import cupy

    return cupy.asarray(values)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else array.get()


def reduced(comm: Any, hook: Any, values: np.ndarray[Any, Any], op: str = "mean", name: str = "w") -> Any:
    """Hands a hook one bucket, as a callback would, and returns the result on the host."""
    bucket = SimpleNamespace(buffer=to_device(comm, values), names=(name,), index=0, communicator=comm, op=op)
    with np.errstate(invalid="ignore"):  # NaN
        assert hook(bucket) is None
    return to_host(bucket.buffer)


def gradients(world_size: int, dtype: Any = np.float32, size: int = N) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(rank).standard_normal(size).astype(dtype) for rank in range(world_size)]


def make(kind: str) -> Any:
    made = {"float16": lambda: hooks.float16, "bfloat16": lambda: hooks.bfloat16}
    return (made | {"8 bit": hooks.Int8, "low rank": hooks.PowerSGD})[kind]()


#: Half of the distance from 1 to the next number: what rounding loses, relative.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-24}  # hooks add in float32


def one_step(comm: Any, kind: str) -> list[bytes]:
    """Returns the bits of the results, which must be the same on all ranks."""
    results, n = [], comm.world_size
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        mine = gradients(n, dtype_of(dtype))
        wide = [values.astype(np.float64) for values in mine]
        for op in ("sum", "mean"):
            got = reduced(comm, make(kind), mine[comm.rank], op)
            assert got.dtype == mine[0].dtype
            share = 1 / n if op == "mean" else 1
            wanted = np.sum(wide, 0) * share
            error = np.abs(got.astype(np.float64) - wanted)
            largest = sum(np.abs(values).max() for values in wide) * share  # of a value, and of every sum
            rounding = (n + 2) * ROUNDING[dtype] * largest
            if kind in ROUNDING:  # each value is rounded once, and the sum once; NCCL rounds every partial sum
                assert error.max() <= (n + 2) * ROUNDING[kind] * largest + rounding
            elif kind == "8 bit":  # half a step of the largest value of a block, on each rank
                assert error.max() <= largest / 254 * 1.001 + rounding
            else:  # a projection
                assert np.linalg.norm(error) <= np.linalg.norm(wanted) + rounding * np.sqrt(N)
            results.append(got.tobytes())
    return results


def converge_to_the_mean(comm: Any, kind: str) -> None:
    """With error feedback the results of steps with the same gradients add up to the truth, but for one step's error:

    8 bit: a 254th of the largest value; low rank: of a matrix of side s, r columns a step leave at most s / r steps'
    gradients waiting (seen: less than half of that).
    """
    steps, hook = 50, make(kind)
    mine = gradients(comm.world_size)
    truth = np.mean([values.astype(np.float64) for values in mine], 0)
    results = [reduced(comm, hook, mine[comm.rank]).astype(np.float64) for _ in range(steps)]
    error = np.mean(results, 0) - truth
    if kind == "8 bit":
        largest = max(np.abs(values).max() for values in mine)
        assert np.abs(error).max() <= 1.01 * largest / 254 / steps + 1e-6
        assert np.abs(error).max() < np.abs(results[0] - truth).max() / 10
    else:
        side = np.ceil(np.sqrt(N))
        largest = max(np.linalg.norm(values) for values in mine)
        assert np.linalg.norm(error) <= largest * side / hook.rank / steps
        assert np.linalg.norm(error) < np.linalg.norm(results[0] - truth) / 5


def low_rank_matrices_are_exact(comm: Any) -> None:
    """A sum of three outer products on every rank: six or nine together, in a hook of nine columns."""
    side, hook = 64, hooks.PowerSGD(rank=9)
    matrices = []
    for rank in range(comm.world_size):
        generator = np.random.default_rng(rank)
        left, right = generator.standard_normal((side, 3)), generator.standard_normal((3, side))
        matrices.append((left @ right).astype(np.float32).reshape(-1))
    truth = np.mean(matrices, 0)
    for _ in range(3):
        got = reduced(comm, hook, matrices[comm.rank])
        assert np.linalg.norm(got - truth) <= 1e-5 * np.linalg.norm(truth)


def least_squares(comm: Any, kind: str | None) -> float:
    """Gradient descent on data that differs by rank; returns the distance from the solution, relative to its length."""
    d, rows, hook = 400, 3200, make(kind) if kind else None
    matrices, sides = [], []
    truth = np.random.default_rng(99).standard_normal(d)
    for rank in range(comm.world_size):
        generator = np.random.default_rng(rank)
        x = generator.standard_normal((rows, d))
        matrices.append(x.T @ x / rows)
        sides.append(x.T @ (x @ truth + 0.1 * generator.standard_normal(rows)) / rows)
    solution = np.linalg.solve(np.mean(matrices, 0), np.mean(sides, 0))
    w = np.zeros(d)
    for _ in range(300):
        gradient = (matrices[comm.rank] @ w - sides[comm.rank]).astype(np.float32)
        w -= 0.1 * (reduced(comm, hook, gradient) if hook else comm.all_reduce(gradient, "mean"))
    return float(np.linalg.norm(w - solution) / np.linalg.norm(solution))


def recover(comm: Any, kind: str) -> None:
    """NaN and infinity reach every rank, and no later step; gradients of another size, or other ones, begin anew."""
    mine = gradients(comm.world_size)[comm.rank]
    hook, fresh = make(kind), make(kind)
    first = reduced(comm, hook, mine)
    for bad in (np.nan, np.inf):
        spoilt = mine.copy()
        if comm.rank == comm.world_size - 1:
            spoilt[700] = bad
        assert not np.isfinite(reduced(comm, hook, spoilt)[700])
        assert np.isfinite(reduced(comm, hook, mine)).all()
    reduced(comm, hook, gradients(comm.world_size, size=2 * N)[comm.rank])
    assert (reduced(comm, hook, mine) == first).all()
    assert (reduced(comm, hook, mine, name="v") == first).all()
    zeros = reduced(comm, fresh, np.zeros(N, np.float32))
    assert not zeros.any()
    assert np.isfinite(reduced(comm, fresh, mine)).all()
    assert reduced(comm, fresh, mine).any()


def small_buckets_are_reduced_as_they_are(comm: Any) -> None:
    for size in (0, 200):
        small = reduced(comm, hooks.PowerSGD(rank=4), np.arange(size, dtype=np.float32), "sum")
        assert (small == comm.world_size * np.arange(size)).all()
    assert reduced(comm, hooks.Int8(), np.zeros(0, np.float32)).size == 0


def all_of_it(comm: Any, kind: str) -> list[bytes]:
    if kind not in ROUNDING:
        converge_to_the_mean(comm, kind)
        recover(comm, kind)
    if kind == "low rank":
        low_rank_matrices_are_exact(comm)
        small_buckets_are_reduced_as_they_are(comm)
    return one_step(comm, kind)


def train(comm: Any) -> list[float]:
    """Returns how far each hook's weights are from those of the plain mean."""
    plain = hooks.train(comm)
    kinds = ("float16", "bfloat16", "8 bit", "low rank")
    return [float(np.linalg.norm(hooks.train(comm, make(kind)) - plain) / np.linalg.norm(plain)) for kind in kinds]

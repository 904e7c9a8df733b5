"""What the shipped hooks must do on every backend; run inside rank processes."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from contract import dtype_of
from gradsync.bucketing.reducer import GradientBucket, result_of
from gradsync.reduction import ReduceOp

N = 1024 + 300  # neither a square, nor whole blocks


def to_device(comm: Any, values: np.ndarray[Any, Any]) -> Any:
    if comm.device == "cpu":
        return values.copy()
    import cupy

    return cupy.asarray(values)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else array.get()


def reduced(comm: Any, hook: Any, values: np.ndarray[Any, Any], op: str = "mean", index: int = 0) -> Any:
    """Hands a hook one bucket, as a callback would, and returns the result on the host."""
    flat = to_device(comm, values)
    bucket = GradientBucket(index, ("w",), (values.shape,), flat, comm, ReduceOp(op))
    return to_host(result_of(hook(bucket), bucket))


def gradients(world_size: int, dtype: Any = np.float32, size: int = N) -> list[np.ndarray[Any, Any]]:
    return [np.random.default_rng(rank).standard_normal(size).astype(dtype) for rank in range(world_size)]


def make(kind: str) -> Any:
    return {"8 bit": gs.hooks.Int8Hook, "low rank": gs.hooks.PowerSGDHook}[kind]()


def one_step(comm: Any, kind: str) -> list[bytes]:
    """Returns the bits of the results, which must be the same on all ranks."""
    results = []
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        mine = gradients(comm.world_size, dtype_of(dtype))
        wide = [values.astype(np.float64) for values in mine]
        for op in ("sum", "mean"):
            got = reduced(comm, make(kind), mine[comm.rank], op)
            assert got.dtype == mine[0].dtype
            wanted = np.sum(wide, 0) / (comm.world_size if op == "mean" else 1)
            rounding = {"float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 1e-6) * np.abs(wanted).max()
            if comm.world_size == 1:
                assert (got == mine[0]).all()
            elif kind == "8 bit":  # half a step of the largest value of a block, on each rank
                bound = sum(np.abs(values).max() for values in wide) / 254 / (comm.world_size if op == "mean" else 1)
                assert np.abs(got.astype(np.float64) - wanted).max() <= bound * 1.001 + rounding
            else:  # a projection
                error = np.linalg.norm(got.astype(np.float64) - wanted)
                assert error <= np.linalg.norm(wanted) + rounding * np.sqrt(N)
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
        assert np.abs(error).max() < np.abs(results[0] - truth).max() / 10 or comm.world_size == 1
    else:
        side = np.ceil(np.sqrt(N))
        largest = max(np.linalg.norm(values) for values in mine)
        assert np.linalg.norm(error) <= largest * side / hook.rank / steps
        assert np.linalg.norm(error) < np.linalg.norm(results[0] - truth) / 5 or comm.world_size == 1


def low_rank_matrices_are_exact(comm: Any) -> None:
    """A sum of three outer products on every rank: six or nine together, in a hook of nine columns."""
    side, hook = 64, gs.hooks.PowerSGDHook(rank=9)
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
    """NaN and infinity reach every rank, and no later step; reset() forgets; other gradients begin anew."""
    mine = gradients(comm.world_size)[comm.rank]
    hook, fresh = make(kind), make(kind)
    first = reduced(comm, hook, mine)
    for bad in (np.nan, np.inf):
        spoilt = mine.copy()
        if comm.rank == comm.world_size - 1:
            spoilt[700] = bad
        assert not np.isfinite(reduced(comm, hook, spoilt)[700])
        assert np.isfinite(reduced(comm, hook, mine)).all()
    hook.reset()
    assert (reduced(comm, hook, mine) == first).all()
    reduced(comm, hook, gradients(comm.world_size, size=2 * N)[comm.rank])
    assert (reduced(comm, hook, mine) == first).all()
    reduced(comm, hook, mine.astype(np.float64))
    assert (reduced(comm, hook, mine) == first).all()
    zeros = reduced(comm, fresh, np.zeros(N, np.float32))
    assert not zeros.any()
    assert np.isfinite(reduced(comm, fresh, mine)).all()
    assert reduced(comm, fresh, mine).any()
    for tiny in (1e-45, 3e-43, 1e-38):  # subnormal, or scales that would be: sent in time, or as zeros
        got = reduced(comm, make(kind), mine * np.float32(tiny))
        assert np.abs(got).max() <= 5 * tiny


def leave_as_they_are(comm: Any, kind: str) -> None:
    n = comm.world_size
    integers = reduced(comm, make(kind), np.arange(N), "sum")
    assert (integers == n * np.arange(N)).all()
    numbers = reduced(comm, make(kind), np.full(N, 1 + 2j, np.complex64), "mean")
    assert (numbers == 1 + 2j).all()
    assert reduced(comm, make(kind), np.zeros(0, np.float32)).size == 0
    small = reduced(comm, gs.hooks.PowerSGDHook(rank=4), np.arange(200, dtype=np.float32), "sum")
    assert (small == n * np.arange(200)).all()
    hook = gs.hooks.PowerSGDHook(rank=1, start_after=2)
    mine = gradients(n)
    plain = comm.all_reduce(to_device(comm, mine[comm.rank]), "mean")
    for _ in range(2):
        assert (reduced(comm, hook, mine[comm.rank]) == to_host(plain)).all()
    assert (reduced(comm, hook, mine[comm.rank]) == to_host(plain)).all() == (n == 1)


def all_of_it(comm: Any, kind: str) -> list[bytes]:
    converge_to_the_mean(comm, kind)
    if kind == "low rank":
        low_rank_matrices_are_exact(comm)
    recover(comm, kind)
    leave_as_they_are(comm, kind)
    return one_step(comm, kind)

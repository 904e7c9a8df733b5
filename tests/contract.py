"""What the checks of the contract share: arrays by kit, values, references, and notes of what was run.

The contract is what every communicator must do, at every world size. Its checks lie in contract_*.py, a file for each
part, and contract_suite.py runs them inside rank processes: every rank runs the same checks in the same order.
Contributions are made from (rank, seed), so that each rank can compute what all the others gave, and the reference
with it. A kit makes the arrays: NumPy's, or CuPy's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp, reduce_into

Host = np.ndarray[Any, Any]

#: Whether checks run on all that they can run on, as under `make prove PART=cross_checks`.
IS_EVERYWHERE = bool(os.environ.get("GRADSYNC_TEST_PLACES"))
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (13, 17), (64, 257), (70_001,)]
FLOAT_TOLERANCE = {
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float32": 1e-6,
    "complex64": 1e-6,
    "float64": 1e-14,
    "complex128": 1e-14,
}
REDUCTIONS = [(name, op) for name, ops in OPERATIONS_BY_DTYPE.items() for op in sorted(o.value for o in ops)]
#: Dtypes that no reduction takes and that move all the same, in host memory: time, records, foreign byte order, text.
HOST_ONLY_DTYPES = {
    "datetime64": np.dtype("datetime64[s]"),
    "structured": np.dtype([("weight", "<f4"), ("count", "<i8"), ("name", "S3")]),
    "foreign byte order": np.dtype(">f8"),
    "text": np.dtype("U4"),
}
LAYOUTS = ("C", "Fortran", "strided", "reversed")


class NumpyKit:
    """Arrays in host memory."""

    xp = np
    dtypes = (*OPERATIONS_BY_DTYPE, *HOST_ONLY_DTYPES)

    def put(self, values: Host) -> Any:
        return values

    def get(self, array: Any) -> Host:
        return array


class CupyKit:
    """Arrays on the communicator's GPU."""

    dtypes = tuple(OPERATIONS_BY_DTYPE)

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def put(self, values: Host) -> Any:
        """A copy on the device in the same kind of layout."""
        if values.ndim > 1 and values.flags.f_contiguous and not values.flags.c_contiguous:
            return self.xp.asfortranarray(self.xp.asarray(np.ascontiguousarray(values)))
        return self.xp.asarray(np.ascontiguousarray(values)).reshape(values.shape)

    def get(self, array: Any) -> Host:
        return array.get()


KITS: dict[str, Callable[[], Any]] = {"numpy": NumpyKit, "cupy": CupyKit}


def reductions_of(comm: Any, *, is_first: bool = False) -> list[tuple[str, str]]:
    """Pairs of a dtype and an operator: all, or in `make test` every second one where other checks run all of them.

    Those are shared memory of three ranks, and on NCCL the first collective: the others name dtypes and operators to it
    in the same way. Every dtype is among a half.
    """
    is_every = {"shm": comm.world_size > 2, "nccl": is_first, "mpi": True}
    return REDUCTIONS if IS_EVERYWHERE or is_every.get(comm.backend) else REDUCTIONS[comm.world_size % 2 :: 2]


# -- Values and references -------------------------------------------------------------------------------------------


def dtype_of(name: str) -> np.dtype[Any]:
    if name in HOST_ONLY_DTYPES:
        return HOST_ONLY_DTYPES[name]
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def contribution(rank: int, shape: tuple[int, ...], name: str, seed: int = 0) -> Host:
    """What a rank hands in: values around 1, so that products of four stay in range of every dtype."""
    return _contribution(rank, tuple(shape), name, seed).copy()


@lru_cache(maxsize=64)  # the operators of a dtype, one after the other, are given the same
def _contribution(rank: int, shape: tuple[int, ...], name: str, seed: int) -> Host:
    rng = np.random.default_rng([rank, seed, len(shape)])
    if name == "bool":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if name.startswith(("int", "uint")):
        return np.asarray(rng.integers(0, 4, shape).astype(name))
    if name == "structured":
        numbers = np.asarray(rng.integers(0, 900, shape))
        return np.asarray(_records(numbers), HOST_ONLY_DTYPES[name])
    if name in ("datetime64", "text"):
        return np.asarray(rng.integers(0, 1000, shape)).astype(dtype_of(name))
    values = rng.uniform(0.5, 1.5, shape)
    if name.startswith("complex"):
        values = values + 1j * rng.uniform(0.5, 1.5, shape)
    return np.asarray(values).astype(dtype_of(name))


def _records(numbers: Host) -> Host:
    records = np.zeros(numbers.shape, HOST_ONLY_DTYPES["structured"])
    records["weight"], records["count"], records["name"] = numbers / 8, numbers, numbers.astype("S3")
    return records


def reference(op: str, name: str, shape: tuple[int, ...], n: int) -> Host:
    """What the contributions of n ranks give, in float64."""
    reduce = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}[op]
    return np.asarray(reduce(_contributions(name, tuple(shape), n), axis=0))


@lru_cache(maxsize=16)  # likewise
def _contributions(name: str, shape: tuple[int, ...], n: int) -> Host:
    wide = np.complex128 if name.startswith("complex") else np.float64
    return np.stack([_contribution(rank, shape, name, 0).astype(wide) for rank in range(n)])


def exactly_reduced(op: str, contributions: Sequence[Host]) -> Host:
    """Returns the bits that a reduction in rank order gives, as every communicator but NCCL's does it."""
    result = np.empty(contributions[0].shape, contributions[0].dtype)
    with np.errstate(all="ignore"):
        reduce_into(ReduceOp(op), [np.asarray(c) for c in contributions], result)
    return result


def assert_close(got: Host, want: Host, name: str, n: int) -> None:
    """Compares with a float64 reference over n ranks, by the dtype's precision; exactly where it has none."""
    assert got.shape == want.shape
    assert got.dtype == dtype_of(name)
    if name in FLOAT_TOLERANCE:
        wide, tolerance = np.asarray(got).astype(want.dtype), FLOAT_TOLERANCE[name] * n
        if not (np.abs(wide - want) <= tolerance * np.abs(want)).all():  # many times faster than what tells the place
            np.testing.assert_allclose(wide, want, rtol=tolerance, atol=0)
            raise AssertionError(f"not within {tolerance}")
    elif not np.array_equal(got, want.astype(got.dtype)):
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        raise AssertionError("not equal")


def assert_equal_to_reference(got: Host, op: str, name: str, shape: tuple[int, ...], n: int) -> None:
    assert_close(got, reference(op, name, shape, n), name, n)


def assert_identical(got: Host, want: Host) -> None:
    """Bit for bit, in shape and in dtype."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if np.ascontiguousarray(got).tobytes() != np.ascontiguousarray(want).tobytes():
        np.testing.assert_array_equal(got, want)
        raise AssertionError("equal values of different bits")


def assert_same_bits_everywhere(comm: Any, array: Host) -> None:
    mine = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    from_root = mine.copy()
    comm.broadcast(from_root, 0)
    assert_identical(mine, from_root)


# -- Arrays in memory ------------------------------------------------------------------------------------------------


def in_layout(values: Host, kit: Any, layout: str) -> Any:
    """Returns the values as an array of the kit, of their shape, with another layout in memory."""
    if values.ndim == 0 or layout == "C":
        return kit.put(np.ascontiguousarray(values).reshape(values.shape).copy())
    if layout == "Fortran":
        return kit.put(np.asfortranarray(values).copy("F"))
    if layout == "reversed":
        every_axis_back = (slice(None, None, -1),) * values.ndim
        return kit.put(np.ascontiguousarray(values[every_axis_back]))[every_axis_back]
    wide = kit.xp.zeros((2 * values.shape[0], *values.shape[1:-1], 3 * values.shape[-1])[-values.ndim :], values.dtype)
    strided = wide[::2, ..., ::3] if values.ndim > 1 else wide[::3]
    strided[...] = kit.put(values)
    return strided


def layouts_of(values: Host, kit: Any) -> list[Any]:
    """The same values in different memory layouts."""
    return [in_layout(values, kit, layout) for layout in LAYOUTS]


def sealed(array: Any) -> Any:
    """Returns the array, read-only where there is such a thing: a source that must not be written to."""
    if isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array


def bounds_of(sizes: Sequence[int]) -> list[int]:
    """Returns where the part of each rank begins, and where the last one ends."""
    return [0, *(int(end) for end in np.cumsum(sizes))]


# -- What was run ----------------------------------------------------------------------------------------------------

#: (collective, dtype or "", operator or "") of every result that was compared with its reference, in this process.
NOTES: set[tuple[str, str, str]] = set()


def note(collective: str, dtype: str, op: str = "") -> None:
    """Notes that a result was right."""
    NOTES.add((collective, dtype, op))


def expect(kind: type[Any], action: Callable[[], Any], text: str = "") -> Any:
    """Returns the error of that kind that the action must raise."""
    try:
        action()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def meet_on_disk(comm: Any, folder: Path) -> None:
    """Returns when every rank has come here: unlike a barrier, it cannot fail by what a rank does right afterwards."""
    (folder / f"rank {comm.rank}").touch()
    wait_until(lambda: all((folder / f"rank {rank}").exists() for rank in range(comm.world_size)))


def wait_until(condition: Callable[[], bool]) -> None:
    """Looks until it is so, for longer than any stall."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def seconds_waited(text: str) -> float:
    """Returns the seconds that an error says its rank has waited: the limit, and what a busy machine adds to it."""
    found = re.search(r"waited (\S+) s\b", text)
    assert found is not None, text
    return float(found[1])

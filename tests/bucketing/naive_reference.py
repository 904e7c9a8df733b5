"""What gradient buckets must compute, written plainly: packed end to end, added up in rank order, split again.

Half precision is added up in float32, and rounded once. Imported by ranks: no pytest here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

Host = np.ndarray[Any, Any]
Values = dict[str, Host]
Specs = Mapping[str, tuple[tuple[int, ...], Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: Every kind of gradient, smaller than all thresholds and larger than some.
SPECS: Specs = {
    "matrix": ((17, 5), np.float32),
    "one": ((40,), np.float32),
    "double": ((33, 3), np.float64),
    "two": ((40,), np.float32),
    "scalar": ((), np.float64),
    "empty": ((0, 3), np.float32),
    "half": ((50,), np.float16),
    "brain": ((2, 9), BFLOAT16),
    "complex": ((6,), np.complex64),
    "huge": ((3000,), np.float32),
    "last": ((3, 1, 4), np.float32),
}
#: Alone each, some together, all of a dtype together.
THRESHOLDS = (1, 700, 10 * 1024**2)
_HALVES = (np.dtype(np.float16), BFLOAT16)
# Relative; NCCL adds up in another order, and half precision in half precision.
_TOLERANCES = {np.dtype(np.float16): 2e-3, BFLOAT16: 2e-2, np.dtype(np.float64): 1e-14}


def values_for(rank: int, step: int, specs: Specs = SPECS) -> Values:
    """Returns a rank's gradients: numbers around 1, so that sums lose little; other ones in each step."""
    return {
        name: _numbers(rank, step, at, tuple(shape), np.dtype(dtype)).copy()
        for at, (name, (shape, dtype)) in enumerate(specs.items())
    }


@cache  # most checks take the same, again and again
def _numbers(rank: int, step: int, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Host:
    rng = np.random.default_rng([rank, step, at])
    numbers = rng.uniform(0.5, 1.5, shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.uniform(0.5, 1.5, shape)
    return np.asarray(numbers).astype(dtype)


def by_rank(world_size: int, step: int, specs: Specs = SPECS) -> list[Values]:
    return [values_for(rank, step, specs) for rank in range(world_size)]


def reduced(given: Sequence[Values], method: str = "mean") -> Values:
    """Returns the reduced gradients, dtype by dtype: packed, added up and split."""
    results: Values = {}
    dtypes = dict.fromkeys(values.dtype for values in given[0].values())
    for dtype in dtypes:
        names = [name for name, values in given[0].items() if values.dtype == dtype]
        flats = [np.concatenate([values[name].reshape(-1) for name in names]) for values in given]
        total, begin = added_up(flats, method), 0
        for name in names:
            size, shape = given[0][name].size, given[0][name].shape
            results[name] = total[begin : begin + size].reshape(shape)
            begin += size
    return {name: results[name] for name in given[0]}


def added_up(flats: Sequence[Host], method: str) -> Host:
    dtype = flats[0].dtype
    wide = np.dtype(np.float32) if dtype in _HALVES else dtype
    with np.errstate(all="ignore"):
        total = flats[0].astype(wide)
        for flat in flats[1:]:
            total = total + flat.astype(wide)
        if method == "mean":
            parts = total.view(total.real.dtype) if dtype.kind == "c" else total  # complex numbers part by part
            parts /= parts.dtype.type(len(flats))
        return total.astype(dtype)


def times(values: Host, factor: float, dtype: Any) -> Host:
    """Returns products, made in the wider dtype, in float32 at least, and rounded once; part by part."""
    if values.dtype.kind == "c":
        product = np.empty(values.shape, dtype)
        product.real, product.imag = [times(part, factor, part.dtype) for part in (values.real, values.imag)]
        return product
    dtypes = [np.dtype(np.float32) if each in _HALVES else each for each in (values.dtype, np.dtype(dtype))]
    wide = np.promote_types(*dtypes)
    with np.errstate(over="ignore"):
        return (values.astype(wide) * wide.type(factor)).astype(dtype)


def expect_equal(comm: Any, got: Mapping[str, Host], wanted: Mapping[str, Host], what: object = "") -> None:
    """Compares gradients: bit for bit, but on NCCL, which adds up in an order of its own."""
    assert list(got) == list(wanted), what
    for name, values in got.items():
        want = wanted[name]
        assert (values.shape, values.dtype) == (want.shape, want.dtype), (what, name)
        if comm.backend != "nccl":
            assert np.ascontiguousarray(values).tobytes() == want.tobytes(), (what, name, values, want)
        else:
            wide = np.complex128 if want.dtype.kind == "c" else np.float64
            tolerance = _TOLERANCES.get(want.dtype, 1e-6)
            np.testing.assert_allclose(values.astype(wide), want.astype(wide), rtol=tolerance, err_msg=f"{what} {name}")


def fill(array: Any, values: Host) -> None:
    """Writes values into an array, wherever it lives."""
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        import cupy

        array[...] = cupy.asarray(np.ascontiguousarray(values)).reshape(values.shape)


def on_host(array: Any) -> Host:
    return np.array(array) if isinstance(array, np.ndarray) else np.asarray(array.get())


def step(callback: Any, gradients: Mapping[Any, Any]) -> dict[Any, Host]:
    """Runs one step; returns copies of what the futures give."""
    with callback.backward():
        futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
    return {name: on_host(future.result()) for name, future in futures.items()}


def put_all(kit: Any, values: Mapping[str, Host]) -> dict[str, Any]:
    """Returns new arrays of the kit's kind."""
    return {name: kit.put(each.copy()) for name, each in values.items()}

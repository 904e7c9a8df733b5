"""Scaling, checking and squaring the values of arrays: on the host, and on devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import value_checks as checks
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from stand_in_processes import Gate, Rank, run

from gradsync.communicators.host_arrays import HostArrays
from places import GPU, STAND_IN, Place, on

HOST = HostArrays()


def as_it_is(array: Any) -> Any:
    return array


def test_the_host_multiplies() -> None:
    checks.multiplies(HOST, as_it_is, as_it_is)


def test_the_host_tells_the_finite() -> None:
    assert type(HOST.all_finite(np.ones(3))) is bool
    checks.tells_the_finite(HOST, as_it_is, as_it_is)


def test_the_host_sums_squares() -> None:
    assert type(HOST.sum_of_squares(np.ones(3))) is float
    checks.sums_squares(HOST, as_it_is, as_it_is)


FLOATS = st.sampled_from(["float16", "float32", "float64", "complex64"])


@given(arrays_of.arrays(FLOATS, st.integers(0, 60)))
def test_any_values_on_the_host(values: np.ndarray[Any, Any]) -> None:
    assert HOST.all_finite(values) == bool(np.isfinite(values).all())
    with np.errstate(all="ignore"):
        parts = values.view(values.real.dtype).astype(np.float64)
        wanted = np.sum(parts * parts)
    if not np.isnan(wanted):  # squares of subnormal float64 numbers lose their last bits
        np.testing.assert_allclose(HOST.sum_of_squares(values), wanted, rtol=1e-6, atol=1e-300)


def on_a_device(comm: Any, name: str) -> None:
    from gradsync.communicators.nccl.device_arrays import DeviceArrays

    arrays = DeviceArrays(int(comm.device.removeprefix("cuda:")))
    check = getattr(checks, name)
    import cupy

    if name == "multiplies":
        check(arrays, lambda values: cupy.asarray(values, order="K"), lambda array: array.get())
        check(arrays, as_it_is, as_it_is)  # host arrays stay where they are
    elif name == "tells_the_finite":
        check(arrays, cupy.asarray, bool)
    else:
        check(arrays, cupy.asarray, float)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1), *on(GPU, 1)])
@pytest.mark.parametrize("name", ["multiplies", "tells_the_finite", "sums_squares"])
def test_devices(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, on_a_device, name)


def _wait_for_nothing(r: Rank) -> None:
    from gradsync.communicators.nccl.device_arrays import DeviceArrays

    arrays = DeviceArrays(0)
    ones = r.cupy.ones(5000, np.float32)
    stream = r.cupy.cuda.Stream(non_blocking=True)
    r.cupy.cuda.runtime.deviceSynchronize()
    gate = Gate(stream)
    with stream:
        finite, squares = arrays.all_finite(ones), arrays.sum_of_squares(ones)
        half = r.cupy.empty(5000, np.float16)
        arrays.multiply(ones, 0.5, half)
        assert not stream.done
        gate.open()
        assert (bool(finite), float(squares), float(half[7])) == (True, 5000.0, 0.5)
        assert (finite.shape, finite.dtype, squares.shape, squares.dtype) == ((), np.bool_, (), np.float64)


def test_the_host_waits_for_nothing() -> None:
    run(_wait_for_nothing)

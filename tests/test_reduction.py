"""The operators and the dtype table."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.reduction import ReduceOp, accumulation_dtype, check_operation, divide_into, reduce_into


@pytest.mark.parametrize("text", ["sum", "SUM", "Mean", "prod", "min", "max"])
def test_names_in_any_case(text: str) -> None:
    assert ReduceOp.parse(text).value == text.lower()
    assert ReduceOp.parse(ReduceOp.parse(text)).value == text.lower()


@pytest.mark.parametrize("text", ["average", "", None, 1])
def test_unknown_names(text: object) -> None:
    with pytest.raises(gs.InvalidArgument, match="op needs to be one of sum, mean, prod, min, max"):
        ReduceOp.parse(text)  # type: ignore[arg-type]


@given(
    st.sampled_from(["sum", "mean", "prod", "min", "max"]),
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_equals_numpy_in_float64(op: str, rows: list[list[float]]) -> None:
    arrays = [np.array(row) for row in rows]
    out = np.empty(3)
    reduce_into(ReduceOp(op), arrays, out)
    reference = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}[op]
    np.testing.assert_allclose(out, reference(np.stack(arrays), axis=0), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype: type) -> None:
    dtype = np.dtype(dtype)
    assert accumulation_dtype(dtype) == np.float32
    # One large value and many small ones: added in half precision the small ones would vanish one by one.
    arrays = [np.full(4, 256, dtype)] + [np.full(4, 0.125 if dtype == np.float16 else 0.5, dtype)] * 16
    out = np.empty(4, dtype)
    reduce_into(ReduceOp.SUM, arrays, out)
    assert (out.astype(np.float32) == (258 if dtype == np.float16 else 264)).all()


def test_out_may_be_an_operand_already_read() -> None:
    first, second = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    reduce_into(ReduceOp.SUM, [first, second], second)
    np.testing.assert_array_equal(second, [4.0, 6.0])


def test_mean_of_three_is_a_division() -> None:
    out = np.empty(1)
    reduce_into(ReduceOp.MEAN, [np.array([1.0])] * 3, out)
    assert out[0] == 1.0


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_a_mean_of_infinite_complex_numbers_is_no_nan(dtype: type, count: int) -> None:
    values = np.array([complex(np.inf, -0.0), complex(count, -np.inf)], dtype)
    out = np.empty(2, dtype)
    divide_into(values, count, out)
    assert out.tolist() == [complex(np.inf, 0.0), complex(1.0, -np.inf)]
    assert np.signbit(out.imag).all()
    alone = values[0].reshape(())
    divide_into(alone, count, alone)
    assert alone.real == np.inf


def test_foreign_byte_order_is_refused() -> None:
    with pytest.raises(gs.UnsupportedDtype, match="byte order"):
        check_operation(ReduceOp.SUM, np.dtype(">f4"))


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_reduced_block_by_block(dtype: type, op: str) -> None:
    """The bits are those of float32 arithmetic in rank order, rounded once; the result may replace a contribution."""
    rng = np.random.default_rng(3)
    given = [rng.standard_normal((3, 2**15 + 7)).astype(dtype) for _ in range(3)]
    wide = [each.astype(np.float32) for each in given]
    function = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    wanted = function(function(wide[0], wide[1]), wide[2])
    if op == "mean":
        wanted = wanted / np.float32(3)
    reduce_into(ReduceOp(op), given, given[1])
    assert given[1].tobytes() == wanted.astype(dtype).tobytes()

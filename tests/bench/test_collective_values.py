"""What `gradsync bench collectives` times: sizes and factors of nccl-tests, inputs, and what counts as wrong."""

from dataclasses import replace

import numpy as np
import pytest

import gradsync as gs
from gradsync.bench.collectives import (
    KINDS,
    Case,
    count_wrong,
    expected_of,
    kinds_of,
    parse_dtype,
    parse_size,
    plan_cases,
    sizes_between,
    source_of,
)
from gradsync.reduction import dtype_of

CASE = Case("all_reduce", 5000, "float32", "sum", 4, 20)

# nccl-tests, doc/PERFORMANCE.md, and the byte counts of its sources: factor with 4 ranks, size of 100 elements a part.
FACTORS = {
    "all_reduce": (1.5, 400),
    "all_gather": (0.75, 1600),
    "reduce_scatter": (0.75, 1600),
    "all_to_all": (0.75, 1600),
    "broadcast": (1.0, 400),
    "reduce": (1.0, 400),
    "gather": (0.75, 1600),
    "scatter": (0.75, 1600),
    "exchange": (1.0, 400),
}


def of(collective, **changes):
    case = replace(CASE, collective=collective, **changes)
    return case if case.kind.reduces else replace(case, op="")


def test_factors_and_sizes_are_those_of_nccl_tests():
    found = {name: (kind.bus_factor(4), of(name, count=100).size_bytes) for name, kind in KINDS.items()}
    assert found == FACTORS
    assert KINDS["all_reduce"].bus_factor(1) == 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_size_makes_elements_and_those_the_size(kind):
    count = kind.count(1 << 20, 4, 4)
    assert of(kind.name, count=count).size_bytes == 1 << 20
    assert kind.count(1, 4, 4) == 1


def test_collectives_by_name():
    assert [kind.name for kind in kinds_of("all")] == list(KINDS)
    assert [kind.name for kind in kinds_of("all-reduce, broadcast,all_reduce")] == ["all_reduce", "broadcast"]
    with pytest.raises(gs.InvalidArgument, match="called 'allreduce': use `all` alone, or one or more of all_reduce"):
        kinds_of("allreduce")
    with pytest.raises(gs.InvalidArgument, match="at least one"):
        kinds_of(",")


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("1.5M", 1572864), ("2GiB", 2 << 30), ("1 kb", 1024)]
)
def test_sizes_are_read_as_nccl_tests_reads_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "8T", "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(gs.InvalidArgument, match="a size must be written as"):
        parse_size(text)


def test_sizes_from_begin_to_end():
    assert sizes_between(8, 100, 2) == [8, 16, 32, 64]
    assert sizes_between(8, 8, 0) == [8]
    for arguments, text in (
        ((8, 4, 2), "must not be below -b"),
        ((8, 64, 1), "must be above 1"),
        ((1, 2**40, 1.1), "more than 100"),
    ):
        with pytest.raises(gs.InvalidArgument, match=text):
            sizes_between(*arguments)


def test_dtypes_have_both_names():
    assert (parse_dtype("half"), parse_dtype("float32"), parse_dtype("bfloat16")) == ("float16", "float32", "bfloat16")
    with pytest.raises(gs.InvalidArgument, match="no dtype is called 'fp8'"):
        parse_dtype("fp8")


def test_sizes_below_an_element_are_one_line():
    assert [case.count for case in plan_cases(KINDS["all_gather"], [1, 2, 64], CASE)] == [1, 4]


# -- What is right, by arithmetic that has nothing to do with the code ----------------------------------------------


def by_hand(case, rank):
    sources = [source_of(case, other).astype(np.float64) for other in range(case.ranks)]
    n, own = case.count, slice(rank * case.count, (rank + 1) * case.count)
    return {
        "all_reduce": lambda: sum(sources),
        "reduce": lambda: sum(sources) if rank == 0 else None,
        "reduce_scatter": lambda: sum(sources)[own],
        "broadcast": lambda: sources[0],
        "all_gather": lambda: np.concatenate(sources),
        "gather": lambda: np.concatenate(sources) if rank == 0 else None,
        "scatter": lambda: sources[0][own],
        "all_to_all": lambda: np.concatenate([source[own] for source in sources]),
        "exchange": lambda: sources[rank - 1][:n],
    }[case.collective]()


@pytest.mark.parametrize("collective", KINDS)
@pytest.mark.parametrize("rank", range(4))
def test_what_is_expected_is_what_the_collective_means(collective, rank):
    case = of(collective)
    expected, wanted = expected_of(case, rank), by_hand(case, rank)
    assert (expected is None) == (wanted is None)
    if wanted is not None:
        np.testing.assert_array_equal(expected, wanted)
        assert expected.dtype == np.float32
        assert count_wrong(case, expected.copy(), rank) == 0


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, d) for op in ("sum", "mean", "prod", "min", "max") for d in ("float16", "bfloat16", "float32", "float64")]
    + [(op, d) for op in ("sum", "prod", "min", "max") for d in ("int8", "uint8", "int64")],
)
def test_every_operator_and_dtype_is_right_as_gradsync_computes_it(op, dtype):
    """Also with the error of one rounding, where there may be one; not with that of two digits."""
    case = of("all_reduce", op=op, dtype=dtype, ranks=3)
    sources = [source_of(case, rank) for rank in range(3)]
    ufunc = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(op, np.add)
    wide = [s.astype(dtype if "int" in dtype else np.float64) for s in sources]
    result = ufunc(ufunc(wide[0], wide[1]), wide[2])
    result = (result / 3 if op == "mean" else result).astype(dtype_of(dtype))
    assert count_wrong(case, result, 0) == 0
    result[7] += result.dtype.type(1)
    assert count_wrong(case, result, 0) == 1


@pytest.mark.parametrize("collective", KINDS)
def test_what_a_broken_collective_would_give_is_wrong(collective):
    case = of(collective)
    right = expected_of(case, 0)
    assert count_wrong(case, np.zeros_like(right), 0) == right.size
    assert count_wrong(case, None, 0) == right.size
    assert count_wrong(case, right[:-1], 0) == right.size
    assert count_wrong(case, right.astype(np.float64), 0) == right.size
    assert count_wrong(case, np.roll(right, 8), 0) > right.size / 2  # data at another place
    assert count_wrong(case, source_of(case, 1)[: right.size] if case.count == right.size else right[::-1], 0) > 0
    spoilt = right.copy()
    spoilt[[3, 5]] = np.nan
    assert count_wrong(case, spoilt, 0) == 2

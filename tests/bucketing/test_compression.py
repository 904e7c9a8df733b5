"""What travels in place of gradients: rounded once, scaled, and back in their own dtype."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import gradsync as gs
from gradsync.bucketing.options import WireFormat
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.for_bucketing import ListReduction
from gradsync.communicators.host_arrays import ArrayKind
from places import GPU, SHM, STAND_IN, Place, on

HOST = ArrayKind()
# Half the distance between neighbours: relative to the value, and for subnormal ones as they are.
ROUNDING = {"float16": (2**-11, 2**-25), "bfloat16": (2**-8, 2**-134)}


@given(
    name=st.sampled_from([None, "float16", "bfloat16"]),
    dtype=st.sampled_from(["float32", "float64"]),
    scales=st.tuples(*[st.floats(2**-6, 2**6) | st.floats(-(2**6), -(2**-6))] * 2),
    data=st.data(),
)
def test_there_and_back(name: str | None, dtype: str, scales: tuple[float, float], data: st.DataObject) -> None:
    """Against float64. The tolerance: one rounding to the wire, one of each product in float32, one to float32."""
    elements = st.floats(-1000, 1000, width=32)
    sizes = st.lists(st.integers(0, 40), min_size=1, max_size=5)
    sources = [data.draw(arrays_of.arrays(dtype, size, elements=elements)) for size in data.draw(sizes)]
    wire = WireFormat(name, *scales)
    flat = wire.encode(sources, HOST)
    assert flat.dtype == (dtype if name is None else wire.wire_dtype(np.dtype(dtype)))
    targets = [np.empty_like(source) for source in sources]
    wire.decode(flat, targets, HOST)
    relative, absolute = ROUNDING[name] if name else (0.0, 0.0)
    for source, target in zip(sources, targets, strict=True):
        wanted = source.astype(np.float64) * scales[0] * scales[1]
        # Twice, should float64 be rounded to float32 first; and subnormal float32 products.
        np.testing.assert_allclose(
            target, wanted, rtol=relative + 5 * 2**-24, atol=(absolute * 1.01 + 2**-149) * max(abs(scales[1]), 1)
        )


def test_what_travels() -> None:
    wire = WireFormat("float16")
    for dtype in ("float32", "float64"):
        assert wire.wire_dtype(np.dtype(dtype)) == np.float16
        assert wire.changes(np.dtype(dtype))
    for dtype in ("float16", "complex64", "complex128", "int32", "bool", ml_dtypes.bfloat16):
        assert wire.wire_dtype(np.dtype(dtype)) == np.dtype(dtype)
        assert not wire.changes(np.dtype(dtype))
    assert not WireFormat().changes(np.dtype("float32"))
    for wire in (WireFormat(prescale=0.5), WireFormat(postscale=2)):
        assert wire.wire_dtype(np.dtype("float32")) == np.float32
        assert wire.changes(np.dtype("float32"))


def test_complex_gradients_are_scaled() -> None:
    wire = WireFormat("bfloat16", prescale=0.5, postscale=3)
    source = np.array([1 + 2j, np.inf - 1j], np.complex64)
    target = np.empty_like(source)
    wire.decode(wire.encode([source], HOST), [target], HOST)
    assert target.tolist() == [1.5 + 3j, complex(np.inf, -1.5)]


def test_the_memory_grows_and_stays() -> None:
    wire = WireFormat("float16")
    first = wire.encode([np.ones(10, np.float32), np.ones(5, np.float32)], HOST)
    again = wire.encode([np.full(3, 2.0)], HOST)
    assert np.shares_memory(first, again)
    assert first[:4].tolist() == [2, 2, 2, 1]
    larger = wire.encode([np.ones(16, np.float32)], HOST)
    assert not np.shares_memory(first, larger)
    assert not np.shares_memory(larger, wire.encode([np.ones(4, np.complex64)], HOST))
    assert wire.encode([np.ones(0, np.float32)], HOST).size == 0


def test_half_precision_is_scaled_and_stays() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        flat = WireFormat("float16", prescale=1 / 3).encode([np.ones(3, dtype)], HOST)
        assert flat.dtype == dtype
        assert flat[0] == np.float32(1 / 3).astype(dtype)


def test_integers_are_not_scaled() -> None:
    assert WireFormat("float16").encode([np.arange(3)], HOST).tolist() == [0, 1, 2]
    for dtype in ("int32", "uint8", "bool"):
        for wire in (WireFormat(prescale=2), WireFormat(postscale=0.5)):
            with pytest.raises(gs.UnsupportedDtype, match=f"prescale .*got {dtype}.*astype"):
                wire.check(np.dtype(dtype))


@pytest.mark.parametrize("name", ["fp16", "bf16", "Float16", "float32", "", 16, np.float16, True])
def test_unknown_compressions(name: Any) -> None:
    with pytest.raises(gs.InvalidArgument, match="one of None, 'float16', 'bfloat16', got"):
        WireFormat(name)


@pytest.mark.parametrize("scale", [0, -0.0, np.nan, np.inf, -np.inf, True, "1", None, 1j, 10**400, np.ones(1)])
def test_scales_that_cannot_be(scale: Any) -> None:
    for name in ("prescale", "postscale"):
        with pytest.raises(gs.InvalidArgument, match=f"{name} must be a finite number other than 0"):
            WireFormat(None, **{name: scale})


def test_scales_of_any_kind() -> None:
    assert WireFormat(None, 2, np.float32(0.5)).prescale == 2.0
    assert [WireFormat(name).dtype_name for name in (None, "float16", "bfloat16")] == [None, "float16", "bfloat16"]


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(gs.BackendUnavailable, match="pip install ml_dtypes"):
        WireFormat("bfloat16")
    WireFormat("float16")


def travel(comm: Any, name: str) -> bytes:
    """Encodes, reduces and decodes on every rank; returns the result's bytes."""
    wire = WireFormat(name, prescale=1 / comm.world_size, postscale=2.0)
    contributions = [np.random.default_rng(rank).standard_normal(1000).astype(np.float32) for rank in range(4)]
    native = contributions[comm.rank].copy()
    if comm.device != "cpu":
        import cupy

        native = cupy.asarray(native)
    halves = [native[:300], native[300:]]
    flat = wire.encode(halves, comm._arrays)
    comm.all_reduce(flat)
    wire.decode(flat, halves, comm._arrays)
    result = native if comm.device == "cpu" else native.get()
    mine = contributions[: comm.world_size]
    wanted = 2 * np.mean([values.astype(np.float64) for values in mine], 0)
    # Each contribution is rounded once, and the sum once; NCCL rounds every partial sum.
    largest = np.max(np.abs(mine)) * ROUNDING[name][0] * 2
    assert np.abs(result - wanted).max() <= (1 + comm.world_size) * largest
    return result.tobytes()


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2, 3), *on(STAND_IN, 2), *on(GPU, 2)])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_ranks_get_the_same(place: Place, world_size: int, name: str) -> None:
    assert len(set(place.run(world_size, travel, name))) == 1


#: Of lists that are reduced in one shot, and in chunks.
SIZES_TOGETHER = ([5, 0, 3000, 1], [90_000, 7, 400, 0, 250_001, 90, 90, 16, 300_000])


def convert_in_shared_memory(comm: Any) -> None:
    """Compares a reduction that converts with encode, all_reduce and decode. Some ranks repeat it, others do not."""
    forms = [("bfloat16", 0.3, 1.0), ("float16", 1.0, 5.0), ("bfloat16", 1.0, 1.0), (None, 0.3, -7.0), (None, 1.0, 3.0)]
    dtypes = [np.dtype(name) for name in ("float32", "float64", "float16", "complex64")]
    agreement = agreement_on("all_reduce", (1,), None, "converted")
    for sizes, dtype, (name, *scales), op in itertools.product(SIZES_TOGETHER, dtypes, forms, ("sum", "mean")):
        rng = np.random.default_rng(comm.rank)
        sources = [rng.standard_normal(size).astype(dtype) for size in sizes]
        sources[2][:4] = [np.nan, np.inf, -np.inf, 1e-7][: sources[2].size]
        given = [source.copy() for source in sources]
        wire = WireFormat(name, *scales)
        wanted = [np.empty_like(source) for source in sources]
        wire.decode(comm.all_reduce(wire.encode(sources, HOST), op), wanted, HOST)
        targets = [np.empty_like(source) for source in sources]
        reduction = ListReduction(
            comm, sources, targets, gs.ReduceOp(op), wire=wire.for_backend(dtype), recurs=comm.rank == 0
        )
        for _ in range(2):
            reduction.run(agreement)
            assert [target.tobytes() for target in targets] == [each.tobytes() for each in wanted], (sizes, dtype, name)
        assert all(map(np.array_equal, sources, given, [True] * len(given)))  # NaN equals NaN


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_converts_while_it_copies(world_size: int) -> None:
    SHM.run(world_size, convert_in_shared_memory)

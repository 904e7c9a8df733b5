"""The kernels that read all values of an array: compiled for GPUs, and run on the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvrtc import Nvrtc, NvrtcMissing
from sparse_memory import untouched

from gradsync.communicators.nccl.kernels import (
    MAX_BLOCKS,
    THREADS_PER_BLOCK,
    VALUE_SOURCE,
    VALUES_PER_THREAD,
    blocks_for,
)

KERNEL_HOST = Path(__file__).parent / "kernel_host"
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except NvrtcMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90, 100])
def test_the_kernels_compile_without_a_warning(nvrtc: Nvrtc, architecture: int) -> None:
    if architecture not in nvrtc.supported_architectures:
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    compiled = nvrtc.compile(VALUE_SOURCE, f"sm_{architecture}")
    assert compiled.diagnostics == ""
    for name in DTYPES:
        assert f"check_{name}".encode() in compiled.image
        assert f"square_{name}".encode() in compiled.image


@pytest.mark.parametrize("standard", ["c++14", "c++17"])
def test_the_kernels_compile_as_cupy_compiles_them(nvrtc: Nvrtc, standard: str) -> None:
    """CuPy 13 asks for C++14, CuPy 14 for C++17; both flush subnormal float32 numbers to zero."""
    assert nvrtc.compile(VALUE_SOURCE, "sm_80", (f"--std={standard}", "-ftz=true")).diagnostics == ""


def test_the_number_of_blocks() -> None:
    per_block = THREADS_PER_BLOCK * VALUES_PER_THREAD
    assert [blocks_for(count) for count in (1, per_block, per_block + 1)] == [1, 1, 2]
    assert blocks_for(10**10) == MAX_BLOCKS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    directory = tmp_path_factory.mktemp("kernels")
    (directory / "kernels.cu").write_text(VALUE_SOURCE)
    built = directory / "value_launches.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-I{directory}"]
    command = [compiler, *options, str(KERNEL_HOST / "value_launches.cpp"), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(built))


def launch(library: ctypes.CDLL, kernel: str, values: np.ndarray[Any, Any], result: np.ndarray[Any, Any]) -> None:
    blocks = max(blocks_for(values.size), 1)
    getattr(library, f"launch_{kernel}")(
        ctypes.c_uint(blocks),
        ctypes.c_uint(THREADS_PER_BLOCK),
        ctypes.c_bool(values.size % 2 == 0),
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_ulonglong(values.size),
        ctypes.c_void_p(result.ctypes.data),
    )


@pytest.mark.parametrize("name", DTYPES)
def test_every_half_precision_number(library: ctypes.CDLL, name: str) -> None:
    """And as many bit patterns of the wider ones: NaNs with payloads, infinities, subnormals."""
    dtype = DTYPES[name]
    words = np.arange(2**16, dtype=f"u{dtype.itemsize}") << 8 * dtype.itemsize - 16
    for value in words.view(dtype)[:: 1 if dtype.itemsize == 2 else 37]:
        one = np.array([value])
        with np.errstate(all="ignore"):
            wide = one.astype(np.float64)[0]
            square = wide * wide
        finite, sums = np.ones(1, bool), np.empty(THREADS_PER_BLOCK)
        launch(library, f"check_{name}", one, finite)
        assert finite[0] == np.isfinite(wide)
        launch(library, f"square_{name}", one, sums)
        np.testing.assert_equal(sums[0], square)
        assert not sums[1:].any()


@given(
    name=st.sampled_from(list(DTYPES)),
    size=st.one_of(st.integers(1, 20), st.sampled_from([255, 257, 4096, 4097, 9000])),
    bad=st.one_of(st.none(), st.integers(0, 8999)),
)
def test_arrays(library: ctypes.CDLL, name: str, size: int, bad: int | None) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(DTYPES[name])
    if bad is not None:
        values[bad % size] = np.nan if bad % 2 else -np.inf
    finite, sums = np.ones(1, bool), np.empty(blocks_for(size) * THREADS_PER_BLOCK)
    launch(library, f"check_{name}", values, finite)
    assert finite[0] == (bad is None)
    launch(library, f"square_{name}", values, sums)
    np.testing.assert_allclose(sums.sum(), np.square(values.astype(np.float64)).sum(), rtol=1e-13)


@pytest.mark.parametrize("name", DTYPES)
def test_more_values_than_32_bits_count(library: ctypes.CDLL, name: str) -> None:
    """Of the grid that the library launches, the block that has the last value, over memory that nobody has written."""
    values = untouched(2**32 + 12_345, DTYPES[name])
    blocks = blocks_for(values.size)
    assert blocks == MAX_BLOCKS
    thread = (values.size - 1) % (blocks * THREADS_PER_BLOCK)
    finite, sums = np.ones(1, bool), np.zeros(blocks * THREADS_PER_BLOCK)
    only_block = ctypes.c_uint.in_dll(library, "only_block")
    only_block.value, all_blocks = thread // THREADS_PER_BLOCK, only_block.value
    try:
        launch(library, f"check_{name}", values, finite)
        assert finite[0]
        values[-1] = 3
        launch(library, f"square_{name}", values, sums)
        assert (sums[thread], sums.sum()) == (9, 9)
        values[-1] = np.nan
        launch(library, f"check_{name}", values, finite)
        assert not finite[0]
    finally:
        only_block.value = all_blocks

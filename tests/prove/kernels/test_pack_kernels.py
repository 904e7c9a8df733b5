"""The pack kernels: the layout against its definition, the kernels compiled for GPUs and run on the host, the packer
over streams that lag behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from deferred_cuda import DeferredCupy, DeferredStream
from hypothesis import given
from hypothesis import strategies as st
from nvrtc import CompileError, Nvrtc, NvrtcMissing
from sparse_memory import untouched

from gradsync.communicators.nccl import kernels as pack_kernels
from gradsync.communicators.nccl.kernels import (
    ALIGNMENT_BYTES,
    CHUNK,
    CHUNK_BYTES,
    PACK_SOURCE,
    THREADS_PER_BLOCK,
    FusedPacker,
    pack_layout,
)

KERNEL_HOST = Path(__file__).parent / "kernel_host"
EDGES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5]
sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 300))


# The layout.


@given(st.lists(st.one_of(sizes, st.integers(0, 2**20)), max_size=20))
def test_arrays_lie_apart_and_aligned(sizes_bytes) -> None:
    layout = pack_layout(tuple(sizes_bytes))
    end = 0
    for size, offset in zip(sizes_bytes, layout.offsets_bytes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + size
    assert layout.total_bytes == end


@given(st.lists(st.tuples(sizes, st.integers(0, 2**47)), max_size=20))
def test_chunks_cover_every_byte_once(arrays) -> None:
    layout = pack_layout(tuple(size for size, _ in arrays))
    table = layout.table([address for _, address in arrays])
    expected = [
        (address + begin, offset + begin, min(size - begin, CHUNK_BYTES))
        for (size, address), offset in zip(arrays, layout.offsets_bytes, strict=True)
        for begin in range(0, size, CHUNK_BYTES)
    ]
    assert table.tolist() == expected


def test_an_array_over_four_gibibytes() -> None:
    layout = pack_layout((3, 2**33 + 1, 5))
    assert layout.offsets_bytes.tolist() == [0, 16, 2**33 + 32]
    table = layout.table([2**40, 2**41, 2**42])
    assert table[-2].tolist() == (2**41 + 2**33, 16 + 2**33, 1)
    assert int(table["size"].sum()) == 2**33 + 9


def test_a_table_is_not_shared() -> None:
    layout = pack_layout((10,))
    first = layout.table([100])
    layout.table([200])
    assert first["address"].tolist() == [100]


# The kernels as the GPU's compiler sees them.


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except NvrtcMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90, 100])
def test_the_kernels_compile_without_a_warning(nvrtc, architecture) -> None:
    if architecture not in nvrtc.supported_architectures:
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    compiled = nvrtc.compile(PACK_SOURCE, f"sm_{architecture}")
    assert compiled.diagnostics == ""
    assert compiled.image.startswith(b"\x7fELF")
    assert all(name in compiled.image for name in (b"pack_chunks", b"split_chunks"))


@pytest.mark.parametrize("standard", ["c++14", "c++17"])
def test_the_kernels_compile_as_cupy_compiles_them(nvrtc, standard) -> None:
    """CuPy 14 asks for C++17, older ones for C++14."""
    assert nvrtc.compile(PACK_SOURCE, "sm_80", (f"--std={standard}",)).diagnostics == ""


def test_the_kernels_access_global_memory_by_16_bytes(nvrtc) -> None:
    ptx = nvrtc.compile(PACK_SOURCE, "compute_80").image.decode()
    for kernel in ("pack_chunks", "split_chunks"):
        body = ptx[ptx.index(f".entry {kernel}(") :]
        body = body[: body.index("\n}")]
        assert body.count("ld.global.v4.u32") == body.count("st.global.v4.u32") == 4  # four in flight for each thread
        assert "ld.u" not in body and "st.u" not in body  # noqa: PT018 - generic accesses: which memory is asked each time
        assert ".local" not in body and ".shared" not in body  # noqa: PT018


def test_the_compiler_tells_warnings_and_errors(nvrtc) -> None:
    assert "declared but never referenced" in nvrtc.compile("__global__ void f() { int unused; }", "sm_90").diagnostics
    with pytest.raises(CompileError, match="expected"):
        nvrtc.compile("__global__ void f( {", "sm_90")


# The kernels on the host.


@pytest.fixture(scope="module")
def build_kernels(tmp_path_factory) -> Callable[..., Path]:
    """Compiles a file of kernel_host, with the kernels beside it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    directory = tmp_path_factory.mktemp("kernels")
    (directory / "kernels.cu").write_text(PACK_SOURCE)

    def build(file: str, *options: str) -> Path:
        built = directory / Path(file).stem
        # The kernels copy arrays of any type as integers, which GPUs' compilers allow.
        options = ("-O1", "-std=c++17", "-fno-strict-aliasing", *options, f"-I{directory}")
        command = [compiler, *options, str(KERNEL_HOST / file), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return built

    return build


@pytest.fixture(scope="module")
def sanitised_run(build_kernels) -> subprocess.CompletedProcess[str]:
    options = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    command = ["g++", *options, "-x", "c++", "-", "-o", os.devnull]
    linked = subprocess.run(command, input="int main() {}", capture_output=True, text=True, timeout=100)
    if linked.returncode:
        pytest.skip(f"g++ has no sanitisers: {linked.stderr}")
    command = [str(build_kernels("sanitised.cpp", *options)), str(THREADS_PER_BLOCK), str(CHUNK_BYTES)]
    # Looking for leaks needs ptrace, which containers may forbid; the kernels allocate nothing.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


class HostKernels:
    """Launches the kernels on host memory."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def pack(self, table: np.ndarray, flat: int, *, descending: bool) -> None:
        self._launch(self._library.launch_pack, table, flat, descending)

    def split(self, table: np.ndarray, flat: int, *, descending: bool) -> None:
        self._launch(self._library.launch_split, table, flat, descending)

    @staticmethod
    def _launch(function: Callable[..., None], table: np.ndarray, flat: int, descending: bool) -> None:
        function(
            ctypes.c_uint(table.size),
            ctypes.c_uint(THREADS_PER_BLOCK),
            ctypes.c_bool(descending),
            ctypes.c_void_p(table.ctypes.data),
            ctypes.c_void_p(flat),
        )


def test_the_kernels_under_sanitisers(sanitised_run) -> None:
    """Words out of bounds or not aligned to their size are errors there, where the host itself would take them."""
    assert sanitised_run.returncode == 0, sanitised_run.stderr


@pytest.fixture(scope="module")
def kernels(build_kernels) -> HostKernels:
    """The kernels in this process; test_the_kernels_under_sanitisers shows why, should one of them end it."""
    return HostKernels(build_kernels("launches.cpp", "-shared", "-fPIC"))


class Places:
    """Arrays in one block of noise, each so many bytes behind a multiple of 64, with noise around it."""

    def __init__(self, sizes_bytes: Sequence[int], misalignments: Sequence[int], seed: int) -> None:
        self.begins = []
        end = 64
        for size, misalignment in zip(sizes_bytes, misalignments, strict=True):
            self.begins.append(end + misalignment)
            end = (end + misalignment + size + 64) // 64 * 64 + 64
        memory = np.random.default_rng(seed).integers(0, 256, end + 128, np.uint8)
        self.memory = memory[-memory.ctypes.data % 64 :]
        self._sizes = sizes_bytes

    def addresses(self) -> list[int]:
        return [self.memory.ctypes.data + begin for begin in self.begins]

    def array(self, index: int) -> np.ndarray:
        return self.memory[self.begins[index] : self.begins[index] + self._sizes[index]]


@given(
    arrays=st.lists(st.tuples(sizes, st.integers(0, 31)), max_size=12),
    flat_misalignment=st.one_of(st.just(0), st.integers(0, 31)),
    descending=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_kernels_move_every_byte_and_no_other(kernels, arrays, flat_misalignment, descending, seed) -> None:
    lengths = [size for size, _ in arrays]
    layout = pack_layout(tuple(lengths))
    gradients = Places(lengths, [misalignment for _, misalignment in arrays], seed)
    buffer = Places([layout.total_bytes], [flat_misalignment], seed + 1)
    table = layout.table(gradients.addresses())
    gradients_before, expected = gradients.memory.copy(), buffer.memory.copy()
    for index, offset in enumerate(layout.offsets_bytes):
        begin = buffer.begins[0] + offset
        expected[begin : begin + lengths[index]] = gradients.array(index)
    kernels.pack(table, buffer.addresses()[0], descending=descending)
    np.testing.assert_array_equal(buffer.memory, expected)
    np.testing.assert_array_equal(gradients.memory, gradients_before)

    for index in range(len(arrays)):
        gradients.array(index)[:] ^= 0xFF
    kernels.split(table, buffer.addresses()[0], descending=descending)
    np.testing.assert_array_equal(gradients.memory, gradients_before)
    np.testing.assert_array_equal(buffer.memory, expected)


def test_the_kernels_move_what_lies_behind_four_gibibytes(kernels) -> None:
    """The last chunks of an array of 8 GiB, and what is packed behind it."""
    size = 2**33 + 70_001
    layout = pack_layout((3, size, 5))
    large, small = untouched(size, np.dtype(np.uint8)), np.arange(8, dtype=np.uint8)
    flat = untouched(layout.total_bytes, np.dtype(np.uint8))
    table = layout.table([small.ctypes.data, large.ctypes.data, small.ctypes.data + 3])[-4:]
    noise = np.random.default_rng(7).integers(0, 256, 70_001, np.uint8)
    large[-70_001:] = noise
    kernels.pack(table, flat.ctypes.data, descending=False)
    begin, end = layout.offsets_bytes[1] + 2**33, layout.offsets_bytes[1] + size
    np.testing.assert_array_equal(flat[begin:end], noise)
    assert flat[layout.offsets_bytes[2] :].tolist() == [3, 4, 5, 6, 7]
    assert not flat[end : layout.offsets_bytes[2]].any()
    assert not flat[: 2**20].any()  # where an offset of 32 bits would point
    large[-70_001:] = 0
    kernels.split(table, flat.ctypes.data, descending=True)
    np.testing.assert_array_equal(large[-70_001:], noise)


# The packer.


@pytest.fixture
def cupy() -> Iterator[DeferredCupy]:
    with pytest.MonkeyPatch.context() as patch:
        cupy = DeferredCupy()
        patch.setitem(sys.modules, "cupy", cupy)
        yield cupy
        cupy.stream.run()


def arrays_at(addresses: Sequence[int], size: int = 40) -> list[SimpleNamespace]:
    return [SimpleNamespace(nbytes=size, data=SimpleNamespace(ptr=address)) for address in addresses]


FLAT = SimpleNamespace(nbytes=2**40)


def test_one_launch_and_no_upload_when_addresses_repeat(cupy) -> None:
    packer = FusedPacker()
    arrays = arrays_at([1024, 4096])
    for _ in range(3):
        packer.pack(arrays, FLAT)
        packer.split(FLAT, arrays)
    assert (cupy.queued, cupy.uploads) == (6, 1)
    cupy.stream.run()
    for launch, name in zip(cupy.launches, ["pack_chunks", "split_chunks"] * 3, strict=True):
        assert (launch.kernel, launch.threads, launch.flat) == (name, THREADS_PER_BLOCK, FLAT)
        assert launch.rows.tolist() == [(1024, 0, 40), (4096, 48, 40)]


def test_an_upload_when_addresses_or_sizes_change(cupy) -> None:
    packer = FusedPacker()
    for arrays in (arrays_at([1024]), arrays_at([2048]), arrays_at([1024], size=80), arrays_at([1024])):
        packer.pack(arrays, FLAT)
    assert (cupy.queued, cupy.uploads) == (4, 3)
    cupy.stream.run()
    assert [launch.rows.tolist() for launch in cupy.launches] == [
        [(1024, 0, 40)],
        [(2048, 0, 40)],
        [(1024, 0, 80)],
        [(1024, 0, 40)],
    ]


def test_one_launch_for_ten_thousand_arrays(cupy) -> None:
    packer = FusedPacker()
    packer.pack(arrays_at(range(0, 640_000, 64)), FLAT)
    cupy.stream.run()
    (launch,) = cupy.launches
    assert launch.rows.size == 10_000


def test_nothing_is_launched_for_nothing(cupy) -> None:
    packer = FusedPacker()
    packer.pack([], FLAT)
    packer.split(FLAT, arrays_at([0, 0], size=0))
    assert (cupy.queued, cupy.uploads) == (0, 0)


def test_tables_are_bounded(cupy, monkeypatch) -> None:
    """Above either bound all are dropped: those that are still used are uploaded again."""
    monkeypatch.setattr(pack_kernels, "_MAX_TABLES", 3)
    monkeypatch.setattr(pack_kernels, "_MAX_TABLE_BYTES", 10 * CHUNK.itemsize)
    packer = FusedPacker()
    for address in (1024, 2048, 4096, 1024):
        packer.pack(arrays_at([address]), FLAT)
    assert (cupy.uploads, len(packer._tables)) == (3, 3)
    packer.pack(arrays_at([8192]), FLAT)
    packer.pack(arrays_at([1024]), FLAT)
    assert (cupy.uploads, len(packer._tables)) == (5, 2)
    packer.pack(arrays_at(range(1024, 9 * 1024, 1024)), FLAT)
    assert packer._tables_bytes == 10 * CHUNK.itemsize
    packer.pack(arrays_at(range(1024, 21 * 1024, 1024)), FLAT)  # more than the bound: alone
    assert [table.rows for table in packer._tables.values()] == [20]
    assert packer._tables_bytes == 20 * CHUNK.itemsize


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("pack"), st.integers(0, 1), st.integers(1, 5)),  # stream, which list
            st.tuples(st.just("run"), st.integers(0, 1), st.integers(1, 4)),  # stream, how much of its work
        ),
        max_size=40,
    )
)
def test_every_launch_reads_its_own_table(steps) -> None:
    """However far the streams lag behind, and though tables of other arrays take the memory of dropped ones."""
    with pytest.MonkeyPatch.context() as patch:
        cupy = DeferredCupy()
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(pack_kernels, "_MAX_TABLES", 2)
        packer = FusedPacker()
        streams = [DeferredStream(11), DeferredStream(22)]
        expected: dict[int, list[int]] = {11: [], 22: []}
        for what, which, number in steps:
            if what == "run":
                streams[which].run(number)
                continue
            cupy.stream = streams[which]
            packer.pack(arrays_at([number * 1024]), FLAT)
            expected[cupy.stream.ptr].append(number * 1024)
        for stream in streams:
            stream.run()
        for ptr, addresses in expected.items():
            seen = [launch.rows["address"].tolist() for launch in cupy.launches if launch.stream == ptr]
            assert seen == [[address] for address in addresses]

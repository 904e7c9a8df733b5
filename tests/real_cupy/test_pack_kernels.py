"""The source of the kernels: for NVRTC, for the sanitisers of g++, and run on the host.

It is a private name. How a kernel reads memory, and what it reads beside, cannot be seen from outside; no test has
8 GiB of gradients. That they pack and split rightly is tested by way of AllreduceCallback, in test_callbacks.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsync.communicators.nccl.pack import (
    CHUNK_BYTES,
    PACK_SOURCE,
    THREADS_PER_BLOCK,
    pack_layout,
)

pytestmark = pytest.mark.cupy
HERE = Path(__file__).parent
KERNELS = re.findall(r"__global__ void (\w+)\(", PACK_SOURCE)
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has it from 3.13 on
OPTIONS = ["-std=c++17", "-fno-strict-aliasing", "-w", f"-I{HERE}"]


def compiled(architecture: str) -> str:
    """Returns the PTX, or for sm_* the image as text, with CuPy's options. NVRTC needs no GPU."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(PACK_SOURCE, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", "--std=c++17", "-ftz=true"))
    finally:
        log = nvrtc.getProgramLog(program)
    lines = [line for line in log.strip("\0\n ").splitlines() if "are deprecated" not in line]  # of sm_70
    assert lines == []  # no warning either
    text = nvrtc.getPTX(program) if architecture.startswith("compute") else nvrtc.getCUBIN(program)
    return text.decode("latin-1") if isinstance(text, bytes) else text


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90, 100])
def test_they_compile_without_a_warning(architecture) -> None:
    image = compiled(f"sm_{architecture}")
    assert all(name in image for name in KERNELS)


def test_they_access_global_memory_by_16_bytes() -> None:
    ptx = compiled("compute_80")
    for kernel in ("pack_chunks", "split_chunks"):
        body = ptx[ptx.index(f".entry {kernel}(") :]
        body = body[: body.index("\n}")]
        assert body.count("ld.global.v4.u32") == body.count("st.global.v4.u32") == 4  # four in flight for each thread
        assert not any(generic in body for generic in ("ld.u", "st.u", ".local", ".shared"))


def test_they_stay_within_the_arrays(tmp_path) -> None:
    """The sanitisers see each byte out of bounds, and each word that is not aligned to its size."""
    (tmp_path / "kernels.cu").write_text(PACK_SOURCE)
    sanitised = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{tmp_path}"]
    program = str(tmp_path / "sanitised")
    built = subprocess.run(
        ["g++", *OPTIONS, *sanitised, str(HERE / "pack_kernels_sanitised.cpp"), "-o", program],
        capture_output=True,
        text=True,
    )
    if "libasan" in built.stderr or "libubsan" in built.stderr:
        pytest.skip(f"g++ has no sanitisers: {built.stderr}")
    assert built.returncode == 0, built.stderr
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # which needs ptrace, and the kernels allocate nothing
    command = [program, str(THREADS_PER_BLOCK), str(CHUNK_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Callable[..., None]:
    """Runs a kernel on the host: its name, the number of blocks, and its arguments, of which arrays are addresses."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cu").write_text(PACK_SOURCE)
    source = "\n".join(['#include "kernels_on_host.hpp"', '#include "kernels.cu"', *map("ON_HOST({})".format, KERNELS)])
    command = ["g++", "-O1", "-shared", "-fPIC", *OPTIONS, f"-I{folder}", "-x", "c++", "-", "-o", f"{folder}/k.so"]
    subprocess.run(command, input=source, text=True, check=True)
    library = ctypes.CDLL(f"{folder}/k.so")

    def run(kernel: str, blocks: int, *given: Any) -> None:
        arguments = [ctypes.c_void_p(each.ctypes.data) if isinstance(each, np.ndarray) else each for each in given]
        pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, arguments))
        getattr(library, f"on_host_{kernel}")(ctypes.c_uint(blocks), ctypes.c_uint(THREADS_PER_BLOCK), pointers)

    return run


def untouched(size: int) -> Any:
    """Zeros, more of them than there is memory: what nobody has written takes none."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"no {size} bytes of addresses: {error}")
    return np.frombuffer(memory, np.uint8, size)


def test_they_move_what_lies_behind_four_gibibytes(launch) -> None:
    """The last chunks of an array of 8 GiB, and what is packed behind it."""
    size = 2**33 + 70_001
    layout = pack_layout((3, size, 5))
    large, small, flat = untouched(size), np.arange(8, dtype=np.uint8), untouched(layout.total_bytes)
    table = layout.table([small.ctypes.data, large.ctypes.data, small.ctypes.data + 3])[-4:]
    noise = np.random.default_rng(7).integers(0, 256, 70_001, np.uint8)
    large[-70_001:] = noise
    launch("pack_chunks", table.size, table, flat)
    begin, end = layout.offsets_bytes[1] + 2**33, layout.offsets_bytes[1] + size
    np.testing.assert_array_equal(flat[begin:end], noise)
    assert flat[layout.offsets_bytes[2] :].tolist() == [3, 4, 5, 6, 7]
    assert not flat[end : layout.offsets_bytes[2]].any()
    assert not flat[: 2**20].any()  # where an offset of 32 bits would point
    large[-70_001:] = 0
    launch("split_chunks", table.size, table, flat)
    np.testing.assert_array_equal(large[-70_001:], noise)

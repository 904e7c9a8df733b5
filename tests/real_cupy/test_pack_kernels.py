"""The source of the pack kernels: for NVRTC, for the sanitisers of g++, and behind four gibibytes.

It is a private name. How a kernel reads memory, and what it reads beside, cannot be seen from outside; and no test has
8 GiB of gradients. That they pack and split rightly is tested by way of AllreduceCallback, in test_callbacks.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradsync.communicators.nccl.kernels import CHUNK_BYTES, PACK_SOURCE, THREADS_PER_BLOCK, pack_layout

HERE = Path(__file__).parent
MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has it from 3.13 on
OPTIONS = ["-std=c++17", "-fno-strict-aliasing", "-w", f"-I{HERE}"]


def compiled(architecture: str, *options: str) -> str:
    """Returns the PTX, or for sm_* the image as text. NVRTC needs no GPU."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(PACK_SOURCE, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *options))
    finally:
        log = nvrtc.getProgramLog(program)
    lines = [line for line in log.strip("\0\n ").splitlines() if "are deprecated" not in line]  # of sm_70
    assert lines == []  # no warning either
    text = nvrtc.getPTX(program) if architecture.startswith("compute") else nvrtc.getCUBIN(program)
    return text.decode("latin-1") if isinstance(text, bytes) else text


@pytest.mark.cupy
@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90, 100])
@pytest.mark.parametrize("standard", ["c++14", "c++17"])
def test_they_compile_without_a_warning(architecture, standard) -> None:
    """CuPy 14 asks for C++17, older ones for C++14."""
    image = compiled(f"sm_{architecture}", f"--std={standard}")
    assert all(name in image for name in ("pack_chunks", "split_chunks"))


@pytest.mark.cupy
def test_they_access_global_memory_by_16_bytes() -> None:
    ptx = compiled("compute_80")
    for kernel in ("pack_chunks", "split_chunks"):
        body = ptx[ptx.index(f".entry {kernel}(") :]
        body = body[: body.index("\n}")]
        assert body.count("ld.global.v4.u32") == body.count("st.global.v4.u32") == 4  # four in flight for each thread
        assert not any(generic in body for generic in ("ld.u", "st.u", ".local", ".shared"))


@pytest.mark.cupy
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


def untouched(size: int) -> Any:
    """Zeros, more of them than there is memory: what nobody has written takes none."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"no {size} bytes of addresses: {error}")
    return np.frombuffer(memory, np.uint8, size)


@pytest.mark.cupy
def test_they_move_what_lies_behind_four_gibibytes(tmp_path) -> None:
    """The last chunks of an array of 8 GiB, and what is packed behind it."""
    (tmp_path / "kernels.cu").write_text(PACK_SOURCE)
    source = '#include "kernels_on_host.hpp"\n#include "kernels.cu"\nON_HOST(pack_chunks) ON_HOST(split_chunks)\n'
    command = [
        "g++",
        "-O1",
        "-shared",
        "-fPIC",
        *OPTIONS,
        f"-I{tmp_path}",
        "-x",
        "c++",
        "-",
        "-o",
        str(tmp_path / "k.so"),
    ]
    subprocess.run(command, input=source, text=True, check=True)
    library = ctypes.CDLL(str(tmp_path / "k.so"))

    def launch(kernel: str, table: np.ndarray, flat: np.ndarray) -> None:
        arguments = [ctypes.c_void_p(table.ctypes.data), ctypes.c_void_p(flat.ctypes.data)]
        pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(argument) for argument in arguments])
        getattr(library, f"on_host_{kernel}")(ctypes.c_uint(table.size), ctypes.c_uint(THREADS_PER_BLOCK), pointers)

    size = 2**33 + 70_001
    layout = pack_layout((3, size, 5))
    large, small, flat = untouched(size), np.arange(8, dtype=np.uint8), untouched(layout.total_bytes)
    table = layout.table([small.ctypes.data, large.ctypes.data, small.ctypes.data + 3])[-4:]
    noise = np.random.default_rng(7).integers(0, 256, 70_001, np.uint8)
    large[-70_001:] = noise
    launch("pack_chunks", table, flat)
    begin, end = layout.offsets_bytes[1] + 2**33, layout.offsets_bytes[1] + size
    np.testing.assert_array_equal(flat[begin:end], noise)
    assert flat[layout.offsets_bytes[2] :].tolist() == [3, 4, 5, 6, 7]
    assert not flat[end : layout.offsets_bytes[2]].any()
    assert not flat[: 2**20].any()  # where an offset of 32 bits would point
    large[-70_001:] = 0
    launch("split_chunks", table, flat)
    np.testing.assert_array_equal(large[-70_001:], noise)

"""Leads the CUDA runtime API that is linked into CuPy's extension modules to runtime.c, in this process's memory only.

CuPy's wheels contain the runtime API as code of their own, in each extension module. The beginning of each such
function is overwritten by a jump to the function of the same name in runtime.c. No file is changed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILD = Path(os.environ["HOST_CUDA_BUILD"])
NOT_SUPPORTED = 801

# These say what they say without a GPU, too.
_ORIGINAL = {"cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion"}
_OTHER_NAMES = {
    "cudaGetDeviceProperties_v2": "cudaGetDeviceProperties",
    "cudaEventElapsedTime_v2": "cudaEventElapsedTime",
}
_READ_WRITE_EXECUTE = 7
_PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_runtime = ctypes.CDLL(str(BUILD / "runtime.so"))


def devices_with_a_context() -> set[int]:
    """The devices on which a thread of this process has made a CUDA context."""
    return {device for device in range(64) if _runtime.host_has_context(device)}


def install() -> None:
    """Redirects the extension modules of CuPy that are loaded; call it right after `import cupy`."""
    import cupy
    import cupy.cuda.cub
    import cupy.cuda.thrust
    from cupy.cuda import nccl, nvrtc  # noqa: F401 - loads them

    known = [
        ctypes.cast(function, ctypes.c_void_p) for function in (_runtime.host_cudaEventQuery, _runtime.host_has_context)
    ]
    ctypes.CDLL("libcuda.so.1").host_runtime(*known)
    addresses = _load_addresses()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.endswith(".so") and path in addresses and "/cupy" in path:
            for name, offset in _functions_in(path).items():
                _redirect(name, addresses[path] + offset)
    _compile_raw_modules_for_the_host(cupy)


def _load_addresses() -> dict[str, int]:
    addresses: dict[str, int] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[2] == "00000000":
                addresses.setdefault(fields[5].rstrip("\n"), int(fields[0].split("-")[0], 16))
    return addresses


def _functions_in(path: str) -> dict[str, int]:
    """Returns the functions of the runtime API in a file, by their offset; the build folder remembers them."""
    stamp = f"{path} {os.stat(path).st_size} {os.stat(path).st_mtime_ns}"
    remembered = BUILD / f"functions_{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.json"
    if not remembered.exists():
        listing = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"^([0-9a-f]+) [tT] (cuda[A-Z]\w+)$", listing, re.MULTILINE)
        _write_at_once(remembered, json.dumps({name: int(offset, 16) for offset, name in found}))
    functions: dict[str, int] = json.loads(remembered.read_text())
    return functions


def _redirect(name: str, address: int) -> None:
    if name in _ORIGINAL:
        return
    function = getattr(_runtime, f"host_{_OTHER_NAMES.get(name, name)}", None)
    if function is None:
        code = b"\xb8" + NOT_SUPPORTED.to_bytes(4, "little") + b"\xc3"  # mov eax, 801; ret
    else:
        target = ctypes.cast(function, ctypes.c_void_p).value or 0
        code = b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # mov rax, target; jmp rax
    page = address & -_PAGE
    length = (address + len(code) + _PAGE - 1 & -_PAGE) - page
    if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(length), _READ_WRITE_EXECUTE):
        raise OSError(ctypes.get_errno(), "this system does not let a process change its own code")
    ctypes.memmove(address, code, len(code))


def _compile_raw_modules_for_the_host(cupy) -> None:
    """Has each RawModule compiled by g++ too, so that the stub of the driver can run its kernels."""
    driver = ctypes.CDLL("libcuda.so.1")
    compiled_by_nvrtc = cupy.RawModule

    def raw_module(*, code: str, **options):
        names = re.findall(r'extern "C" __global__ void (\w+)\(', code)
        library = ctypes.CDLL(str(_compiled_by_gcc(code, names)))
        for name in names:
            driver.host_kernel(name.encode(), ctypes.cast(getattr(library, f"on_host_{name}"), ctypes.c_void_p))
        return compiled_by_nvrtc(code=code, **options)

    cupy.RawModule = raw_module


def _compiled_by_gcc(code: str, names: list[str]) -> Path:
    source = "\n".join(
        [f'#include "{HERE / "kernels_on_host.hpp"}"', code, *[f"ON_HOST({name})" for name in names], ""]
    )
    header = (HERE / "kernels_on_host.hpp").read_bytes()
    built = BUILD / f"kernels_{hashlib.sha256(header + source.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        own = built.with_suffix(f".{os.getpid()}")
        # The kernels copy arrays of any type as integers, which GPUs' compilers allow.
        command = ["g++", "-O1", "-std=c++17", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", "-x", "c++", "-"]
        done = subprocess.run([*command, "-o", str(own)], input=source, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ cannot compile a kernel of a RawModule for the host:\n{done.stderr}")
        os.replace(own, built)
    return built


def _write_at_once(path: Path, text: str) -> None:
    """So that other ranks read the whole text, or none."""
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text)
    os.replace(own, path)

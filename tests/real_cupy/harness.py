"""The real CuPy on a machine without a GPU: its Python, Cython, generated code and NVRTC run; the GPU is host memory.

What runs: everything that CuPy does on the host. Argument checks, memory pool, streams, events, DLPack, the code
generation of its kernels, and their compilation by NVRTC for the chosen GPU. gradsync's own kernels run, on the host.

What does not run: CuPy's kernels. They are compiled, loaded and launched, but leave the result's memory as it was. So a
test may check values only where bytes come by a copy, by NCCL or by a kernel of gradsync. Streams do not lag behind the
host, and NCCL's calls return when they have ended: no test here shows that work is ordered rightly on a GPU.

    redirect.py                CUDA's runtime API, which is linked into CuPy, leads to runtime.c
    driver.c                   libcuda.so.1: loads kernels, and runs gradsync's
    nccl_between_processes.py  NCCL, over sockets
    startup/sitecustomize.py   installs both in every Python process that has this `environment`
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
# The compute capability of each device. With five ranks each kernel is compiled for all of these GPUs.
CAPABILITIES = (90, 80, 70, 100, 90)
BUILDS = HERE.parent.parent / "build" / "real_cupy"


def why_not() -> str | None:
    """Returns why the real CuPy cannot run over host memory here, or None where it can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: `make test-cupy` installs it"
    if importlib.util.find_spec("cupy_backends") is None:
        return "this CuPy is not the real one"
    if platform.machine() != "x86_64":
        return "CuPy over host memory needs an x86-64 processor"
    missing = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    return f"CuPy over host memory needs {', '.join(missing)}" if missing else None


def environment() -> dict[str, str]:
    """Returns the variables with which a new Python process has CuPy over host memory. Builds the libraries once."""
    build = _built()
    python_path = [str(HERE / "startup"), os.environ.get("PYTHONPATH", "")]
    library_path = [str(build), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "HOST_CUDA_BUILD": str(build),
        "HOST_CUDA_DEVICES": ",".join(map(str, CAPABILITIES)),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, library_path)),
        "CUPY_CACHE_DIR": str(build / "kernels"),
        "PYTHONWARNINGS": "error",
    }


def _built() -> Path:
    """Returns the folder of the libraries, which have the name of their source: who builds, builds for all."""
    sources = {"runtime.so": HERE / "runtime.c", "libcuda.so.1": HERE / "driver.c"}
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources.values())).hexdigest()[:16]
    build = BUILDS / digest
    if not build.exists():
        own = BUILDS / f"{digest}.{os.getpid()}"
        own.mkdir(parents=True, exist_ok=True)
        for library, source in sources.items():
            command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", str(source), "-o", str(own / library)]
            subprocess.run(command, check=True, timeout=60)
        try:
            own.rename(build)
        except OSError:  # another process was first
            shutil.rmtree(own)
    return build

"""The GPU and the libraries that a result comes from."""

from __future__ import annotations

import subprocess
from typing import Any

import cupy

from gradsync.communicators.nccl.library import check_library, library_path, version_text


def gpu() -> dict[str, Any]:
    """Describes the current device."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "driver": _driver_version(),
    }


def versions() -> dict[str, str]:
    """Returns the versions that this process has loaded."""
    return {
        "cupy": cupy.__version__,
        "cuda_runtime": _cuda_version(cupy.cuda.runtime.runtimeGetVersion()),
        "cuda_of_driver": _cuda_version(cupy.cuda.runtime.driverGetVersion()),
        "nccl": version_text(check_library()),
        "nccl_library": library_path().rpartition("/")[2],
    }


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"  # containers may lack the tool
    return lines[0] if lines else "unknown"


def _cuda_version(number: int) -> str:
    """Returns CUDA's version as people write it: 12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"

"""NCCL: which library was loaded, from where, and whether it is the one that CuPy was built for."""

from __future__ import annotations

from typing import Any

from gradsync.communicators.nccl.library import version_text
from gradsync.doctor.checks.cupy_packages import has_several, installed_packages
from gradsync.doctor.finding import Finding, ok, unusable, warning
from gradsync.doctor.surroundings import Surroundings


def check_nccl(here: Surroundings) -> list[Finding]:
    """Which libnccl CuPy has loaded."""
    answer: Any = here.answers.get("cupy", {})
    if "file" not in answer:
        return []  # CuPy's own line says what to do
    if here.environ.get("NCCL_COMM_BLOCKING") == "0":
        return [
            unusable("NCCL", "NCCL_COMM_BLOCKING=0 is set, which CuPy cannot work with", "unset NCCL_COMM_BLOCKING")
        ]
    found = answer.get("nccl")
    wanted = _wheel(here)
    if not found or not found.get("available"):
        error = answer.get("nccl_error", "CuPy could not load libnccl.so.2")
        return [unusable("NCCL", error, f"pip install {wanted}")]
    text = f"{version_text(found['version'])} from {found['path']}, CuPy was built with {version_text(found['build'])}"
    if not found["path"].startswith("/"):
        return [warning("NCCL", f"{text}: no libnccl is in memory, so this is not NVIDIA's", "see CuPy's line")]
    if found["version"] // 10000 != found["build"] // 10000:
        return [warning("NCCL", f"{text}: another major version", f"pip install --upgrade {wanted}")]
    others = [package.name for package in here.packages if package.name.startswith("nvidia-nccl")]
    if others and wanted not in others and not has_several(here):
        return [warning("NCCL", f"{text}; installed is {', '.join(others)}, for another CUDA", f"pip install {wanted}")]
    return [ok("NCCL", text)]


def _wheel(here: Surroundings) -> str:
    """Returns the name of the wheel of NCCL that fits the CuPy that is installed."""
    names = [package.name for package in installed_packages(here)]
    return "nvidia-nccl-cu13" if "cupy-cuda13x" in names else "nvidia-nccl-cu12"

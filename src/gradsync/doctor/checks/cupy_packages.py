"""CuPy: which wheels are installed, whether they load, and whether they fit the driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsync.doctor.checks.gpus import cuda_version
from gradsync.doctor.finding import Finding, ok, unusable, warning
from gradsync.doctor.surroundings import CUPY_PACKAGES, Package, Surroundings

_OLDEST_CUPY = 14


def check_cupy(here: Surroundings) -> list[Finding]:
    """Whether CuPy can be used for NCCL."""
    installed = installed_packages(here)
    answer = here.answers.get("cupy", {"error": "it was not asked"})
    if has_several(here):
        return [_several(here, installed)]
    if not installed and "file" not in answer:
        return [
            unusable("CuPy", "not installed: only the backend nccl needs it", _install(here) if here.has_gpu else "")
        ]
    if "error" in answer:
        name = installed[0].name if installed else "cupy"
        return [unusable("CuPy", f"{name} does not load: {answer['error']}", f"pip install --force-reinstall {name}")]
    if not _owns(installed, answer["file"]):
        text = f"{answer['version']} from {answer['file']}, which no installed package has put there"
        advice = "what it says of GPUs may be made up: take its folder off PYTHONPATH"
        return [warning("CuPy", text, advice)]
    name = f"{installed[0].name} {answer['version']}"
    if int(answer["version"].partition(".")[0]) < _OLDEST_CUPY:
        advice = f"pip uninstall -y {installed[0].name}; then {_install(here)}"
        return [unusable("CuPy", f"{name}; gradsync needs CuPy {_OLDEST_CUPY} or newer", advice)]
    return [_loaded(here, name, answer)]


def installed_packages(here: Surroundings) -> list[Package]:
    """Returns the packages that bring `cupy`."""
    return [package for package in here.packages if package.name in CUPY_PACKAGES]


def has_several(here: Surroundings) -> bool:
    """Whether more than one does."""
    return len(installed_packages(here)) > 1


def _several(here: Surroundings, installed: list[Package]) -> Finding:
    names = " ".join(package.name for package in installed)
    shown = ", ".join(f"{package.name} {package.version}" for package in installed)
    text = f"{len(installed)} packages put their files in one folder: {shown}; what is loaded is a mixture"
    if not here.has_gpu:
        return warning("CuPy", text, f"pip uninstall -y {names}; then install the one for your driver")
    return warning("CuPy", text, f"pip uninstall -y {names}; then {_install(here)}")


def _loaded(here: Surroundings, name: str, answer: Mapping[str, Any]) -> Finding:
    runtime = f"{name}, CUDA runtime {cuda_version(answer['runtime'])}" if "runtime" in answer else name
    if not here.has_gpu:
        text = f"{runtime}; there is no NVIDIA driver here, so it has nothing to run on"
        return unusable("CuPy", text, "beside a GPU: install NVIDIA's driver; for a container: docker run --gpus all")
    if "count" not in answer:
        error = answer.get("count_error", "it does not say why")
        return unusable(
            "CuPy", f"{runtime}; it sees no GPU: {error}", "compare nvidia-smi's driver with the CUDA that CuPy is for"
        )
    driver = answer.get("driver", 0)
    if "runtime" in answer and driver and driver // 1000 < answer["runtime"] // 1000:
        text = f"{runtime}, but the driver is good for CUDA {cuda_version(driver)} only"
        return warning("CuPy", text, f"pip uninstall -y {name.split()[0]}; then {_install(here)}, or update the driver")
    if "nvrtc" not in answer:
        return unusable("CuPy", f"{runtime}; no NVRTC to compile kernels with", f"{_install(here)}: [ctk] brings it")
    return ok("CuPy", runtime)


def _install(here: Surroundings) -> str:
    """Returns what to type, for the driver's CUDA where that is known."""
    driver = here.answers.get("cupy", {}).get("driver", 0)
    if driver:
        return f"pip install 'gradsync[cuda{13 if driver >= 13000 else 12}]'"
    return "pip install 'gradsync[cuda12]' (cuda13 where nvidia-smi shows CUDA 13)"


def _owns(installed: list[Package], file: str) -> bool:
    return any(Path(file).is_relative_to(package.folder) for package in installed)

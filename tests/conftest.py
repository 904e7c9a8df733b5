"""What all tests share: nothing may be left running, and GPU tests say why they do not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Time is never what a property test is about: on a busy machine any example may take long.
hypothesis.settings.register_profile("gradsync", deadline=None)
hypothesis.settings.load_profile("gradsync")

# Rank processes import the test modules by name.
sys.path.insert(0, str(Path(__file__).parent))

import cross_check_launch  # noqa: E402
from cross_check_launch import INTEL_MPI, PEERS, Mpi  # noqa: E402


def why_no_gpu() -> str | None:
    """Returns why GPU tests cannot run here, or None when they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no usable GPU: {error}"
    return None if count else "CuPy sees no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    reason = why_no_gpu()
    if reason is not None:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


def _mpi_or_skip(found: Any, tmp_path_factory: pytest.TempPathFactory) -> Mpi:
    assert isinstance(found, Mpi)
    reason = found.why_not(tmp_path_factory.mktemp("mpi"))
    if reason is not None:
        pytest.skip(reason)
    return found


def pytest_sessionfinish() -> None:
    """Removes what was still too new when the last test over MPICH looked."""
    cross_check_launch.remove_abandoned_segments()


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Mpi:
    """MPICH, which comes with the test tools."""
    return _mpi_or_skip(PEERS["mpich"], tmp_path_factory)


@pytest.fixture(scope="session")
def open_mpi(tmp_path_factory: pytest.TempPathFactory) -> Mpi:
    """Open MPI, where `make peers` has installed it."""
    return _mpi_or_skip(PEERS["openmpi"], tmp_path_factory)


@pytest.fixture(scope="session")
def intel_mpi(tmp_path_factory: pytest.TempPathFactory) -> Mpi:
    """Intel MPI, likewise."""
    return _mpi_or_skip(INTEL_MPI, tmp_path_factory)


@pytest.fixture(scope="session")
def torch_python() -> str:
    """A Python with PyTorch and what gradsync needs: the environment that `make peers` makes."""
    found = cross_check_launch.torch_python()
    if found is None:
        pytest.skip(cross_check_launch.NO_TORCH)
    code = "import click, ml_dtypes, msgpack, torch"
    done = subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"{found}: {done.stderr.splitlines()[-1]}; `make peers` installs it")
    return found


@pytest.fixture(autouse=True)
def _no_secret_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps the secret of its run; tests that share one must not."""
    monkeypatch.setattr("gradsync.environment._secret", None)

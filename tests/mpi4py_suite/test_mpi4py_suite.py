"""mpi4py's own tests of the calls that gradsync.mpi has, on 1, 2, 3 and 5 ranks; run_suite.py lists what is skipped."""

import json
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run_suite.py")
#: The modules, and how many of their tests have to pass.
MODULES = {
    "test_cco_buf": 54,
    "test_cco_vec": 50,
    "test_cco_obj": 32,
    "test_p2p_buf": 4,
    "test_p2p_obj": 36,
    "test_msgzero": 6,
    "test_request": 6,
    "test_status": 5,
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """The folder of mpi4py's tests, from the source distribution of the version that is installed."""
    pytest.importorskip("mpi4py")
    folder = tmp_path_factory.mktemp("mpi4py")
    wanted = f"mpi4py=={version('mpi4py')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=mpi4py", "--no-build-isolation"]
    done = subprocess.run([*command, wanted], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot download the source of {wanted}: {done.stderr.strip().splitlines()[-1]}")
    [archive] = folder.glob("mpi4py-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [tests] = folder.glob("mpi4py-*/test")
    return tests


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_mpi4pys_own_tests(cli, suite, ranks):
    for module, passing in MODULES.items():
        variables = {"GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS": "30"}
        done = cli("run", "-n", str(ranks), str(RUNNER), str(suite), module, environment=variables)
        assert done.code == 0, f"{module}: {done.out}{done.err}"
        [line] = [line for line in done.out.splitlines() if '{"passed"' in line]
        counts = json.loads(line[line.index("{") :])
        assert (counts["failed"], counts["skipped by itself"]) == ([], []), module
        assert counts["passed"] >= passing, (module, counts)

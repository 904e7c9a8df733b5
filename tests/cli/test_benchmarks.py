"""The benchmarks: that each runs, under any launcher; what they print and write; that the pages show their figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradsync.communicators.shared_memory.compiled import RUNNING

ROOT = Path(__file__).resolve().parents[2]
FILES = [path.name for path in sorted((ROOT / "benchmarks").glob("test_*.py")) if path.name != "test_gpu.py"]


def of(file):
    return ROOT / "benchmarks" / file


@pytest.fixture
def pytest_of(cli):
    """Runs pytest as if no xdist were around: beside xdist pytest-benchmark times nothing."""

    def run(*arguments, launcher=()):
        command = [sys.executable, *launcher, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        return cli.program(*command, *arguments, environment={"PYTEST_XDIST_WORKER": None}, timeout=280)

    return run


@pytest.mark.parametrize("file", FILES)
def test_each_benchmark_runs(pytest_of, file):
    """Once, and on few and small arrays. gloo and DDP are skipped where there is no PyTorch."""
    done = pytest_of(of(file), "--benchmark-disable")
    assert done.code == 0, done.out + done.err
    assert "passed" in done.out


def test_the_output_says_which_threshold_to_take(pytest_of, tmp_path):
    shapes, out = tmp_path / "shapes.json", tmp_path / "out.json"
    shapes.write_text(json.dumps({"w": ["float32", [300, 7]], "b": ["float64", [7]], "scale": ["float16", []]}))
    done = pytest_of(of("test_thresholds.py"), "--shapes", shapes, "--benchmark-json", out)
    assert done.code == 0, done.out + done.err
    assert "side by side" in done.out
    assert f"kernels of shared memory: in {RUNNING.kind}" in done.out
    assert json.loads(out.read_text())["machine_info"]["kernels"] == RUNNING.kind
    [advice] = [line for line in done.out.splitlines() if line.startswith("shapes.json: ")]
    assert "MB" in advice
    found = json.loads(out.read_text())["benchmarks"]
    assert "10 MB" in [row["name"] for row in found]
    assert all(row["stats"]["median"] > 0 and "data" not in row["stats"] for row in found)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", "{}", '{"w": ["no dtype", [3]]}', '{"w": [3]}', '{"w": ["int32", [3]]}', '{"w": ["float32", [-1]]}'],
)
def test_a_wrong_file_of_shapes_says_what_is_needed(pytest_of, tmp_path, content):
    (tmp_path / "shapes.json").write_text(content)
    done = pytest_of(of("test_thresholds.py"), "--shapes", tmp_path / "shapes.json")
    assert done.code != 0
    assert '{"name": ["float32", [64, 3]], ...}' in done.out + done.err


def test_ranks_of_a_launcher_take_part(pytest_of):
    launcher = ["-m", "gradsync", "run", "--no-prefix", "-n", "2"]
    done = pytest_of(of("test_collectives.py"), "-k", "256 and not gloo", launcher=launcher)
    assert done.code == 0, done.out + done.err
    assert "side by side" in done.out
    assert "mpiexec" in done.out  # what to do, for mpi4py


@pytest.mark.mpi
def test_ranks_of_mpiexec_take_part(cli):
    mpiexec = [Path(sys.executable).parent / "mpiexec", "-n", "2", sys.executable, "-m", "pytest"]
    options = ["-p", "no:cacheprovider", "-k", "256 and not gloo"]
    done = cli.program(
        *mpiexec, of("test_collectives.py"), *options, environment={"PYTEST_XDIST_WORKER": None}, timeout=280
    )
    assert done.code == 0, done.out + done.err
    assert "side by side" in done.out
    assert "2 passed" in done.out


def test_another_commit_is_one_more_contender(pytest_of):
    options = ["-k", "256 and not gloo and not mpi4py", "--against", "HEAD", "--starts", "2"]
    done = pytest_of(of("test_collectives.py"), *options)
    assert done.code == 0, done.out + done.err
    assert "95 %" in done.out
    assert f"kernels of shared memory: in {RUNNING.kind}" in done.out  # those of the commit, too


@pytest.mark.parametrize("options", [["--against", "no-such-commit"], ["--ranks", "0"], ["-n", "2"]], ids=" ".join)
def test_wrong_options_are_refused(pytest_of, options):
    done = pytest_of(of("test_collectives.py"), *options)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert options[-1] in done.err or options[0] in done.err


def test_figures_can_be_saved_and_compared(pytest_of, tmp_path):
    options = [of("test_collectives.py"), "-k", "256 and gradsync", "--benchmark-storage", tmp_path]
    assert pytest_of(*options, "--benchmark-save=first").code == 0
    done = pytest_of(*options, "--benchmark-compare")
    assert done.code == 0, done.out + done.err
    assert "0001_first" in done.out


def test_a_rank_that_fails_shows_its_traceback(pytest_of, tmp_path):
    """Another rank may wait for it for ever: the team is ended, and the next row starts a new one."""
    (tmp_path / "test_failing.py").write_text(
        """
import systems

def step(contender, culprit):
    comm = systems.comm()
    def call():
        if comm.rank == culprit:
            raise ValueError("rank 1 alone")
        comm.barrier()
    return call

def test_failing(compare):
    compare("failing", step, 1)

def test_right(compare):
    compare("right", step, None, rounds=3)
"""
    )
    # The conftest of the benchmarks, for this folder.
    (tmp_path / "conftest.py").write_text(f"exec(open({str(of('conftest.py'))!r}).read())")
    done = pytest_of("-c", ROOT / "pyproject.toml", tmp_path / "test_failing.py")
    assert done.code == 1, done.out + done.err
    assert "ValueError: rank 1 alone" in done.out
    assert "1 failed, 1 passed" in done.out


def test_a_rank_that_dies_shows_its_last_lines(pytest_of, tmp_path):
    (tmp_path / "test_dying.py").write_text(
        """
import os

def step(contender):
    print("dies of this", flush=True)
    os._exit(3)

def test_dying(compare):
    compare("dying", step)
"""
    )
    (tmp_path / "conftest.py").write_text(f"exec(open({str(of('conftest.py'))!r}).read())")
    done = pytest_of("-c", ROOT / "pyproject.toml", tmp_path / "test_dying.py")
    assert done.code == 1, done.out + done.err
    assert "failed with exit code 3" in done.out


def test_the_pages_show_the_figures_of_the_results(cli):
    done = cli.program(sys.executable, of("tables.py"), "--check")
    assert done.code == 0, done.out + done.err


def test_a_threshold_is_advised_only_where_it_was_measured():
    from threshold import advice

    fast, slow = [1.0, 1.01] * 5, [2.0, 2.01] * 5
    assert "10 MB" in advice({1.0: slow, 10.0: fast})
    assert "1 MB" in advice({1.0: fast, 10.0: slow})
    assert "nothing to choose" in advice({1.0: fast, 10.0: fast})
    assert "not measured" in advice({1.0: fast, 2.5: slow})
    assert "chance" in advice({1.0: fast[:3], 10.0: slow[:3]})

"""Which kernels of shared memory a process runs: in C or in plain NumPy, the same on all ranks, of this version."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.shared_memory.compiled import RUNNING  # what this process would run

ROOT = Path(__file__).parents[2]
PLAIN = {"GRADSYNC_PLAIN_KERNELS": "1"}
NOT_PLAIN = {"GRADSYNC_PLAIN_KERNELS": None}  # where all tests run with it
SUMS = """
import sys
import numpy as np
import gradsync as gs
with gs.init_process_group() as comm:
    group = comm.split(0)  # a second communicator
    print(comm.all_reduce(np.ones(3)) + group.all_reduce(np.ones(300_000))[:3])
"""
built = pytest.mark.skipif(RUNNING.kind != "C", reason="the kernels in C do not run here")


def test_they_were_built_where_that_is_required():
    if os.environ.get("REQUIRE_KERNELS") == "1" and not os.environ.get("GRADSYNC_PLAIN_KERNELS"):
        assert RUNNING.kind == "C"
    assert bool(RUNNING.why_plain) == (RUNNING.kind != "C")


@pytest.fixture
def refusals(cli, tmp_path):
    """refusals(ranks, program) gives the text of each rank's BackendUnavailable; the program runs first."""

    def run(ranks, program):
        (tmp_path / "program.py").write_text(
            f"import os, platform\nimport gradsync as gs\n{program}\n"
            "try:\n    gs.init_process_group()\n"
            "except gs.BackendUnavailable as error:\n    print(str(error))\n"
        )
        done = cli("run", "-n", ranks, "--no-prefix", "program.py", cwd=tmp_path)
        return done.out.splitlines()

    return run


def test_aarch64_without_c_says_what_to_do(refusals):
    lines = refusals(2, "platform.machine = lambda: 'aarch64'; os.environ['GRADSYNC_PLAIN_KERNELS'] = '1'")
    assert len(lines) == 2
    assert all("aarch64 needs gradsync's kernels in C: GRADSYNC_PLAIN" in line for line in lines)


@built
@pytest.mark.ranks(2)
def test_aarch64_with_c(rank):
    platform.machine = lambda: "aarch64"
    with gs.init_process_group("shm") as comm:
        np.testing.assert_array_equal(comm.all_reduce(np.ones(3)), [2, 2, 2])


@built
@pytest.mark.parametrize("plain", [0, 2])
def test_mixed_kernels_are_refused_on_every_rank(refusals, plain):
    lines = refusals(3, f"if os.environ['RANK'] == '{plain}': os.environ['GRADSYNC_PLAIN_KERNELS'] = '1'")
    assert len(lines) == 3
    assert all("_kernels." in line and "compiled.py" in line for line in lines)
    assert all(f"rank {plain or 1} " in line for line in lines)


# -- A copy of the library with other kernels, or with none -----------------------------------------------------------


@pytest.fixture
def library(tmp_path):
    """A copy of the library without its kernels in C, and where they belong."""
    folder = tmp_path / "library"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(Path(gs.__file__).parent, folder / "gradsync", ignore=ignored)
    return folder, folder / "gradsync" / "communicators" / "shared_memory"


@pytest.fixture
def with_library(cli, library, tmp_path):
    """with_library(*arguments, **variables) runs gradsync from the copy; gives its exit code and both outputs."""

    def run(*arguments, **variables):
        (tmp_path / "sums.py").write_text(SUMS)
        program = [sys.executable, "-m", "gradsync", *arguments]
        done = cli.program(
            *program, cwd=tmp_path, environment={"PYTHONPATH": str(library[0]), **NOT_PLAIN, **variables}
        )
        return done.code, done.out, done.err

    return run


def kernels_of_doctor(with_library):
    code, out, _ = with_library("doctor", "--no-try", "--json")
    found = {finding["what"]: finding for finding in json.loads(out)["findings"]}
    return code, found["kernels"]


def test_without_c_rank_0_says_so_once_and_the_results_are_right(with_library):
    code, out, err = with_library("run", "-n", "2", "sums.py")
    assert (code, out.count("[4. 4. 4.]")) == (0, 2)
    [line] = err.splitlines()
    assert re.search(r"\[rank 0\] gradsync: shared memory runs in plain NumPy.* not built: install a C compiler", line)
    code, found = kernels_of_doctor(with_library)
    assert (code, found["status"]) == (0, "warning")
    assert "install a C compiler" in found["advice"]


def test_who_asks_for_numpy_is_not_told(with_library):
    assert with_library("run", "-n", "2", "sums.py", **PLAIN)[2] == ""


def test_an_extension_that_does_not_load_is_told(with_library, library):
    (library[1] / "_kernels.so").write_bytes(b"\x7fELF but damaged")
    code, out, err = with_library("run", "-n", "2", "sums.py")
    assert (code, out.count("[4. 4. 4.]")) == (0, 2)
    assert "cannot be loaded" in err
    assert kernels_of_doctor(with_library)[1]["status"] == "warning"


@built
def test_an_extension_of_another_version_is_an_error_at_import(with_library, library):
    shutil.copy(RUNNING.file, library[1])
    source = library[1] / "compiled.py"
    source.write_text(re.sub(r"LAYOUT_VERSION = \d+", "LAYOUT_VERSION = 1_000_000", source.read_text()))
    code, _, err = with_library("run", "-n", "2", "sums.py")
    assert code != 0
    assert f"ImportError: {library[1] / Path(RUNNING.file).name} was built from another version" in err
    assert "install gradsync again" in err
    code, found = kernels_of_doctor(with_library)
    assert (code, found["status"]) == (1, "broken")
    assert "another version" in found["text"]


# -- Building them ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", ["test", "test-plain", "test-mpi", "demo", "bench"])
def test_make_compiles_a_changed_file_anew(cli, tmp_path, target):
    """What make would run is only printed; -W FILE is as if the file had just changed."""
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".demo", ".test", ".lint", ".dev"):
        (tmp_path / name).touch()
    dry = ["make", "--dry-run", f"VENV={tmp_path}", target]
    source = next(Path(gs.__file__).parent.rglob("_kernels.c")).relative_to(ROOT)
    assert "pip install" not in cli.program(*dry, cwd=ROOT).out
    assert "pip install --quiet -e ." in cli.program(*dry, "-W", source, cwd=ROOT).out

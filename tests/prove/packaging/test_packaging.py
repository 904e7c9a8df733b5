"""The sdist and the wheel are whole, and the wheel is all that a user needs, in an environment with nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from empty_environment import ROOT, Environment, build, environment_with, files_of_the_repository

import gradsync as gs

pytest.importorskip("build", reason="the extra `prove` brings it")
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="releases are built from the repository")

# Only maintainers need these files of the repository.
NOT_RELEASED = re.compile(r"\.gitignore|\.ci/.*|Makefile|tests/.*|benchmarks/.*")
# What only setuptools makes.
MADE = re.compile(r"PKG-INFO|setup\.cfg|src/gradsync\.egg-info/.*")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def empty(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment_with(built[1], tmp_path_factory.mktemp("environment") / "empty")


def test_the_sdist_has_what_users_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames() if not sdist.getmember(name).isdir()}
    needed = {name for name in files_of_the_repository() if not NOT_RELEASED.fullmatch(name)}
    assert {name for name in inside if not MADE.fullmatch(name)} == needed


def test_the_wheel_has_the_library_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [metadata] = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    library = {path.removeprefix("src/") for path in files_of_the_repository() if path.startswith("src/gradsync/")}
    assert inside == library
    assert "gradsync/py.typed" in inside
    assert "gradsync/__init__.pyi" in inside  # __init__.py reads it
    assert f"\nVersion: {gs.__version__}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert {f"3.{minor}" for minor in range(10, 15)} <= set(re.findall(r"Python :: (3\.\d+)", metadata))


def test_two_ranks_train_in_an_empty_environment(empty: Environment, tmp_path: Path) -> None:
    assert empty.run("gradsync", "--version", cwd=tmp_path) == (0, f"gradsync, version {gs.__version__}\n")
    shutil.copy(ROOT / "examples" / "own_loop.py", tmp_path)
    code, shown = empty.run("gradsync", "run", "-n", "2", "own_loop.py", cwd=tmp_path)
    assert (code, shown) == (0, "[rank 0] 2 ranks over shm: weights [1. 2. 3.], bias [4.]\n")
    code, shown = empty.run("python", "-m", "gradsync", "bench", "thresholds", "--help", cwd=tmp_path)
    assert code == 0


ALONE = "import numpy as np, gradsync as gs\nwith gs.init_process_group('local', rank=0, world_size=1):\n"
MISSING = {
    "nccl": ("import gradsync as gs\ngs.init_process_group('nccl', rank=0, world_size=1)", "pip install 'cupy-cuda12x"),
    "mpi": ("import gradsync as gs\ngs.init_process_group('mpi', rank=0, world_size=1)", "`pip install mpi4py` where"),
    "parameters": (
        f"{ALONE} gs.AllreduceCallback(parameters={{'w': ((3,), 'bfloat16')}}).flush()",
        "pip install ml_dtypes",
    ),
}


@pytest.mark.parametrize("extra", MISSING)
def test_what_is_missing_says_how_to_get_it(empty: Environment, tmp_path: Path, extra: str) -> None:
    program, command = MISSING[extra]
    (tmp_path / "program.py").write_text(program)
    code, shown = empty.run("python", "program.py", cwd=tmp_path)
    assert code != 0
    assert command in shown.splitlines()[-1], shown


def test_the_demo_without_its_data_says_how_to_get_them(empty: Environment, tmp_path: Path) -> None:
    code, shown = empty.run("python", ROOT / "examples" / "train_digits.py", cwd=tmp_path)
    assert (code, shown) == (1, "the digits are part of scikit-learn: pip install scikit-learn\n")


def test_a_picture_without_matplotlib_says_how_to_get_it(empty: Environment, tmp_path: Path) -> None:
    words = "bench", "thresholds", "--model", "resnet50", "--plot", "x.png"
    code, shown = empty.run("gradsync", *words, cwd=tmp_path)
    assert (code, shown) == (1, "gradsync: error: --plot needs matplotlib: pip install matplotlib\n")


def test_a_users_typed_program(empty: Environment, tmp_path: Path) -> None:
    """And its mistakes are found: it says where they are, and mypy complains where there is none."""
    pytest.importorskip("mypy", reason="the extra `dev` brings it")
    shutil.copy(ROOT / "tests" / "prove" / "packaging" / "typed_program.py", tmp_path)
    words = ["--strict", "--python-executable", str(empty.python), "--config-file=", "typed_program.py"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.stdout == "Success: no issues found in 1 source file\n", checked.stdout + checked.stderr

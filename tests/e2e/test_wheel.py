"""The sdist and the wheel are whole, and the wheel is all that a user needs, in an environment with nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

import gradsync as gs

ROOT = Path(__file__).parents[2]
# Only maintainers need these files of the repository.
NOT_RELEASED = re.compile(r"\.gitignore|\.ci/.*|\.github/.*|Makefile|tests/.*|benchmarks/.*")
# What only setuptools makes.
MADE = re.compile(r"PKG-INFO|setup\.cfg|src/gradsync\.egg-info/.*")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="releases are built from the repository"),
    pytest.mark.skipif(find_spec("build") is None, reason="pip install build"),
]


def files_of_the_repository() -> set[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return {path for path in done.stdout.splitlines() if (ROOT / path).is_file()}


def variables() -> dict[str, str]:
    """Those of this process, without those that would lead Python back to this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GRADSYNC"))}


NO_COMPILER = {"CC": "/nonexistent", "REQUIRE_KERNELS": "0"}
KERNELS = re.compile(r"gradsync/communicators/shared_memory/_kernels\..*\.so")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist from a copy of the repository, and a wheel from that sdist."""
    return build(tmp_path_factory.mktemp("built"), {})


def build(folder: Path, more_variables: dict[str, str]) -> tuple[Path, Path]:
    for path in files_of_the_repository():
        (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / "source" / path)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    done = subprocess.run(command, env=variables() | more_variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def needed_by(package: Distribution, known: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """What a package declares to need without its extras, and what that needs."""
    for line in package.requires or ():
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if ";" not in line and name not in known:  # none of what gradsync needs depends on the platform
            found = distribution(name)
            yield found
            yield from needed_by(found, known | {name})


@pytest.fixture(scope="module")
def empty(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(built[1], tmp_path_factory.mktemp("environment") / "empty")


def environment_with(wheel: Path, folder: Path) -> Path:
    """The programs of an environment with the wheel, and links to what that needs, as this environment has it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, env=variables(), check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    [metadata] = packages.glob("gradsync-*.dist-info")
    for package in needed_by(Distribution.at(metadata)):
        for path in {Path(file.parts[0]) for file in package.files or () if ".." not in file.parts}:
            if not (packages / path).exists() and path.name != "__pycache__":
                (packages / path).symlink_to(Path(str(package.locate_file(path))).resolve())
    return folder / "bin"


@pytest.fixture
def run(cli, empty, tmp_path):
    """run(program, *arguments) runs a program of the empty environment; gives its exit code and its output."""
    hidden = dict.fromkeys(set(os.environ) - variables().keys())

    def run(program, *arguments, folder=empty):
        done = cli.program(folder / program, *arguments, cwd=tmp_path, typed="", environment=hidden)
        return done.code, done.out + done.err

    return run


def test_the_sdist_has_what_users_need(built):
    with tarfile.open(built[0]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames() if not sdist.getmember(name).isdir()}
    needed = {name for name in files_of_the_repository() if not NOT_RELEASED.fullmatch(name)}
    assert {name for name in inside if not MADE.fullmatch(name)} == needed


def test_the_wheel_has_the_library_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [metadata] = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    library = {path.removeprefix("src/") for path in files_of_the_repository() if path.startswith("src/gradsync/")}
    compiled = {name for name in inside if KERNELS.fullmatch(name)}
    assert inside - compiled == {name for name in library if not name.endswith(".c")}
    assert {"gradsync/py.typed", "gradsync/__init__.pyi"} <= inside
    assert f"\nVersion: {gs.__version__}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    extras = set(re.findall(r"(?m)^Provides-Extra: (.*)$", metadata))
    assert extras == {"cuda12", "cuda13", "mpi"}  # for users; what working on gradsync needs are groups


def test_the_readmes_commands_run_in_an_empty_environment(built, run, tmp_path):
    """With the examples of the sdist."""
    assert run("gradsync", "--version") == (0, f"gradsync, version {gs.__version__}\n")
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    (tmp_path / "examples").symlink_to(source / "examples")
    blocks = re.findall(r"```console\n\$ ([^\n]+)\n(.*?)```", (source / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for command, shown in blocks:
        if "survive.py" in command:  # needs scikit-learn, which `make demo` has installed
            continue
        _, printed = run(*command.split())
        assert [line for line in shown.splitlines() if "pid" not in line and line not in printed.splitlines()] == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_one_wheel_for_all_pythons_has_the_kernels_in_c(built, run):
    with zipfile.ZipFile(built[1]) as wheel:
        [kernels] = [name for name in wheel.namelist() if KERNELS.fullmatch(name)]
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert "-cp311-abi3-linux_" in built[1].name
        assert kernels.endswith("_kernels.abi3.so")
    code, shown = run(
        "python", "-c", "from gradsync.communicators.shared_memory import compiled; print(compiled.RUNNING)"
    )
    assert (code, shown.partition(" with")[0]) == (0, "those in C")


def test_without_a_compiler_it_is_installed_all_the_same(run, tmp_path):
    _, wheel = build(tmp_path / "built", NO_COMPILER)
    with zipfile.ZipFile(wheel) as inside:
        assert not any(map(KERNELS.fullmatch, inside.namelist()))
    folder = environment_with(wheel, tmp_path / "environment")
    shutil.copy(ROOT / "examples" / "own_loop.py", tmp_path)
    code, shown = run("gradsync", "run", "-n", "2", "own_loop.py", folder=folder)
    assert code == 0
    assert "[rank 0] 2 ranks over shm: weights [1. 2. 3.], bias [4.]" in shown
    assert "the kernels in C were not built: install a C compiler" in shown


def test_who_requires_the_kernels_gets_no_wheel_without_them(tmp_path):
    with pytest.raises(AssertionError, match="nonexistent"):
        build(tmp_path / "built", {"CC": "/nonexistent", "REQUIRE_KERNELS": "1"})


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("gs.init_process_group('nccl', rank=0, world_size=1)", "pip install 'cupy-cuda12x"),
        ("gs.init_process_group('mpi', rank=0, world_size=1)", "pip install mpi4py"),
        (
            "gs.init_process_group('local', rank=0, world_size=1)\n"
            "gs.AllreduceCallback(parameters={'w': ((3,), 'bfloat16')}).flush()",
            "pip install ml_dtypes",
        ),
    ],
)
def test_what_is_missing_says_how_to_get_it(run, tmp_path, program, advice):
    (tmp_path / "program.py").write_text(f"import gradsync as gs\n{program}\n")
    code, shown = run("python", "program.py")
    assert code != 0
    assert advice in shown.splitlines()[-1], shown


def test_the_demo_without_its_data_says_how_to_get_them(run):
    code, shown = run("python", ROOT / "examples" / "train_digits.py")
    assert (code, "pip install scikit-learn" in shown) == (1, True)


def test_a_users_typed_program(cli, empty, tmp_path):
    """mypy --strict takes it, and its mistakes are found: mypy complains of a comment that nothing needs."""
    if find_spec("mypy") is None:
        pytest.skip("pip install mypy")
    program = Path(__file__).parent / "typed_program.py"
    words = [
        "--strict",
        "--python-executable",
        empty / "python",
        "--config-file=",
        "--cache-dir",
        tmp_path,
        program.name,
    ]
    done = cli.python("-m", "mypy", *words, cwd=program.parent)
    assert done.out == "Success: no issues found in 1 source file\n", done.out + done.err

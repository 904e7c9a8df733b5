"""What docs/install.md says of other platforms, as far as Linux can tell: with what it alone has hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RANK = "import numpy as np, gradsync as gs\n"
START = f"""{RANK}
def one(): return 1
if __name__ == "__main__":
    for start in (lambda: gs.launch(one, nprocs=2), lambda: gs.spawn(one, nprocs=2), gs.launcher(one, n_gpus=2)):
        try:
            start()
        except gs.BackendUnavailable as error:
            print(error)
"""
SHARED_MEMORY = f"""{RANK}
try:
    gs.init_process_group("shm", rank=0, world_size=1)
except gs.BackendUnavailable as error:
    print(error)
"""


def run(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"GRADSYNC_BACKEND": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def run_without_linux(program: Path) -> tuple[int, str]:
    return run(ROOT / "tests" / "without_linux.py", program)


def written(folder: Path, program: str) -> Path:
    path = folder / "program.py"
    path.write_text(program)
    return path


def test_one_rank_trains_on_macos() -> None:
    code, shown = run_without_linux(ROOT / "examples" / "own_loop.py")
    assert (code, shown) == (0, "1 ranks over local: weights [1. 2. 3.], bias [4.]\n")
    code, shown = run_without_linux(ROOT / "examples" / "gradients_in_buckets.py")
    assert (code, shown) == (0, "weights [1. 2. 3.], bias [4.]\n")


def test_every_public_name_loads_on_macos(tmp_path: Path) -> None:
    program = written(tmp_path, f"{RANK}print(len([getattr(gs, name) for name in gs.__all__]) == len(gs.__all__))")
    assert run_without_linux(program) == (0, "True\n")


def test_starting_ranks_on_macos_is_refused(tmp_path: Path) -> None:
    code, shown = run_without_linux(written(tmp_path, START))
    refusal = "starting ranks needs Linux, this is darwin: run the script as one rank by itself, with "
    assert (code, shown) == (0, f"{refusal}GRADSYNC_BACKEND=local\n" * 3)


def test_shared_memory_on_macos_is_refused(tmp_path: Path) -> None:
    code, shown = run_without_linux(written(tmp_path, SHARED_MEMORY))
    assert code == 0
    assert shown.startswith("shared memory needs Linux on x86-64, this is darwin on ")


def test_on_windows_the_first_use_says_what_to_do(tmp_path: Path) -> None:
    program = "import sys; sys.platform = 'win32'; import gradsync as gs; print(gs.__version__); gs.launch"
    code, shown = run(written(tmp_path, program))
    assert code == 1
    assert shown.splitlines()[-1] == (
        "ImportError: gradsync.launch is not for Windows: use gradsync in WSL 2, which is Linux (wsl --install)"
    )

"""Gradients that were handed over and never reduced: an error where the group is left, else exit code 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from places import SHM, STAND_IN, Place, on

FORGOTTEN = "handed over and never reduced (first: 'weights'): end each backward pass with flush()"

SCRIPT = """
import atexit, gc, os, sys
atexit.register(lambda: print("registered first"))
import numpy as np
import gradsync as gs

how = sys.argv[1]


def train(comm):
    sync = gs.AllreduceCallback()
    if how == "a backward pass raises":
        try:
            with sync.backward():
                sync("weights", np.ones(3))
                raise KeyError("no such batch")
        except KeyError:
            return sync
    sync("weights", np.ones(3))
    sync("bias", np.ones(3))
    if how == "flushed":
        sync.flush()
    if how == "aborted":
        comm.abort("enough")
    if how == "raises":
        raise KeyError("lost")
    if how == "closed":
        comm.close()
    if how == "destroyed, and caught":
        try:
            gs.destroy_process_group()
        except gs.InvalidArgument as error:
            print("caught", error)
    if how == "forks":
        pid = os.fork()
        if pid == 0:
            del sync
            gc.collect()
            sys.exit(0)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        sync.flush()
    if how == "destroyed, and an exception is on its way":
        try:
            raise KeyError("lost")
        finally:
            gs.destroy_process_group()
    if how.startswith("sys.exit"):
        sys.exit(int(how[-2]))
    if how == "is collected":
        del sync
        gc.collect()
        return None
    return sync


if "with" in how:
    with gs.init_process_group() as comm:
        kept = train(comm)
        if "collected" in how:
            del kept
else:
    kept = train(gs.init_process_group())
print("the last line")
"""

#: How a program ends, its exit code, and whether it says that gradients were forgotten.
ENDINGS = {
    "ends": (0, True),
    "is collected": (0, True),
    "sys.exit(0)": (0, True),
    "sys.exit(3)": (3, True),
    "closed": (0, True),
    "with": (1, True),
    "with, collected": (1, True),
    "flushed": (0, False),
    "aborted": (0, False),
    "forks": (0, False),
    "a backward pass raises": (0, False),
    "destroyed, and caught": (0, False),
    "destroyed, and an exception is on its way": (1, False),
    "raises": (1, False),
}
ENDS_AT_ITS_LAST_LINE = {
    "ends",
    "is collected",
    "closed",
    "flushed",
    "aborted",
    "forks",
    "a backward pass raises",
    "destroyed, and caught",
}


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADSYNC_")}
    return subprocess.run(
        command, env={**kept, **variables}, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("how", ENDINGS)
def test_the_exit_code_of_a_script(how: str, tmp_path: Path) -> None:
    """All that Python does at its end is done: handlers of earlier modules run, and what was printed is there."""
    code, is_told = ENDINGS[how]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run([sys.executable, str(script), how], GRADSYNC_BACKEND="local")
    assert done.returncode == code, done
    assert (f"rank 0/1: 2 gradients were {FORGOTTEN}" in done.stderr) == is_told, done
    assert "registered first" in done.stdout
    assert ("the last line" in done.stdout) == (how in ENDS_AT_ITS_LAST_LINE)
    assert ("InvalidArgument" in done.stderr) == how.startswith("with")
    assert ("KeyError: 'lost'" in done.stderr) == (how == "raises" or "on its way" in how)
    if how == "forks":
        assert "child 0" in done.stdout
    if is_told and not how.startswith("with"):
        assert done.stderr.startswith("error: rank 0/1: 2 gradients were ")
        assert done.stderr.count("\n") == 1
    elif code == 0:
        assert done.stderr == ""


@pytest.mark.parametrize("how", ["ends", "flushed"])
def test_the_exit_code_under_gradsync_run(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run([sys.executable, "-m", "gradsync", "run", "-n", "2", "--backend", "shm", str(script), how])
    code, is_told = ENDINGS[how]
    assert done.returncode == code, done
    assert (f"/2: 2 gradients were {FORGOTTEN}" in done.stderr) == is_told, done


FUNCTIONS = """
import sys
import numpy as np
import gradsync as gs

kept = []


def in_group():
    sync = gs.AllreduceCallback()
    sync("weights", np.ones(3))
    if "kept" in sys.argv:
        kept.append(sync)


def with_group_of_its_own(*_):
    gs.init_process_group("shm")
    in_group()


if __name__ == "__main__":
    how = sys.argv[1]
    try:
        if how == "launcher":
            gs.launcher(in_group, world_size=2, backend="shm")()
        elif how == "spawn":
            gs.spawn(with_group_of_its_own, nprocs=2)
        else:
            gs.launch(with_group_of_its_own, (), 2)
    except Exception as error:
        print(type(error).__name__, error, getattr(error, "traceback_text", ""))
"""


@pytest.mark.parametrize(("how", "kept"), [("launcher", ""), ("launcher", "kept")])
def test_a_decorated_function_fails_with_a_typed_error(how: str, kept: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FUNCTIONS)
    done = run([sys.executable, str(script), how, kept])
    assert f"InvalidArgument: rank 0/2: 1 gradient was {FORGOTTEN}" in done.stdout or (
        f"InvalidArgument: rank 1/2: 1 gradient was {FORGOTTEN}" in done.stdout
    ), done


@pytest.mark.parametrize(("how", "kept"), [("spawn", "kept"), ("launch", "")])
def test_the_rank_of_a_function_without_destroy_logs_it(how: str, kept: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FUNCTIONS)
    done = run([sys.executable, str(script), how, kept])
    assert (done.returncode, done.stdout) == (0, "")
    for rank in range(2):
        assert f"error: rank {rank}/2: 1 gradient was {FORGOTTEN}" in done.stderr


def leave_a_group(comm: Any, kit_name: str) -> str:
    """Every rank forgets its flush; a group that is closed by the program is left with them in it."""
    from kits import make_kit

    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("mean")
    future = sync("weights", kit.put(np.ones(3)))
    try:
        gs.destroy_process_group()
    except gs.InvalidArgument as error:
        assert isinstance(future.exception(), gs.GradientCancelled)
        return str(error)
    return ""


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2, 3), *on(STAND_IN, 2)])
def test_leaving_a_group_raises(place: Place, world_size: int) -> None:
    texts = place.run(world_size, leave_a_group, place.kit)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}/{world_size}: 1 gradient was {FORGOTTEN}"), text


def test_an_error_at_a_prompt_does_not_hide_it() -> None:
    lines = [
        "import numpy as np, gradsync as gs",
        "comm = gs.init_process_group('local')",
        "1 / 0",
        "sync = gs.AllreduceCallback()",
        "future = sync('weights', np.ones(3))",
    ]
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input="\n".join([*lines, ""]), capture_output=True, text=True, timeout=100
    )
    assert "ZeroDivisionError" in done.stderr
    assert FORGOTTEN in done.stderr
    assert done.returncode == 0

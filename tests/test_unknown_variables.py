"""Variables that gradsync does not know are told once for a run, with the name that was probably meant.

One that it once had is refused, with what to do in its place.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gradsync as gs

SCRIPT = "import gradsync as gs\ngs.init_process_group().close()\n"


def of_another_launcher(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("command", "variables", "count"),
    [
        (["-m", "gradsync", "run", "-n", "2"], {}, 1),
        ([], {"GRADSYNC_BACKEND": "local"}, 1),
        ([], {"GRADSYNC_BACKEND": "local", **of_another_launcher(0)}, 1),
        ([], {"GRADSYNC_BACKEND": "local", **of_another_launcher(1)}, 0),
    ],
    ids=["launcher", "no launcher", "first rank of another launcher", "second rank of another launcher"],
)
def test_it_is_told_once_for_a_run(command: list[str], variables: dict[str, str], count: int, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, **variables, "GRADSYNC_TIMOUT": "3"}
    done = subprocess.run([sys.executable, *command, str(script)], env=environ, capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if "GRADSYNC_TIMOUT" in line]
    line = "gradsync: warning: GRADSYNC_TIMOUT: gradsync has no such variable and ignores it; did you mean "
    assert told == [f"{line}GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS?"] * count, done.stderr


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["-m", "gradsync", "run", "-n", "2", "script.py"], {}),
        (["-m", "gradsync", "serve", "--world-size", "2", "--secret-file", "secret"], {}),
        (["script.py"], {}),
        (["script.py"], of_another_launcher(1)),
    ],
    ids=["launcher", "server", "no launcher", "second rank of another launcher"],
)
def test_one_that_has_gone_is_refused(command: list[str], variables: dict[str, str], tmp_path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "secret").write_text("5a" * 32)
    (tmp_path / "secret").chmod(0o600)
    environ = {**os.environ, **variables, "GRADSYNC_STATE_DIR": "state"}
    done = subprocess.run([sys.executable, *command], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "GRADSYNC_STATE_DIR any more (removed in 0.3): choose a directory yourself, and pass it" in done.stderr
    assert "no such variable" not in done.stderr


@pytest.mark.parametrize("start", [lambda f: gs.launch(f), lambda f: gs.spawn(f, nprocs=1), lambda f: gs.launcher(f)()])
def test_one_that_has_gone_is_refused_by_functions_that_start_ranks(start, monkeypatch) -> None:
    monkeypatch.setenv("GRADSYNC_STATE_DIR", "state")
    with pytest.raises(gs.InvalidArgument, match="no GRADSYNC_STATE_DIR any more"):
        start(print)
    monkeypatch.setenv("GRADSYNC_STATE_DIR", "")
    assert gs.launch(os.getpid) is not None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS", "soon", "needs to be a finite number of seconds above 0, got 'soon'"),
        ("GRADSYNC_FLIGHT_RECORDER_ENTRIES", "0", "needs to be an integer from 1 to 1000000, got '0'"),
        ("GRADSYNC_ALLOW_SHARED_GPU", "yes", "needs to be 0 or 1, got 'yes'"),
        ("GRADSYNC_LOG", "loud", "needs to be debug, info, warning, error or critical, got 'loud'"),
    ],
)
def test_what_each_rank_would_refuse_the_launcher_refuses_once(name: str, value: str, text: str, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"print('a rank has started', flush=True)\n{SCRIPT}")
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", str(script)]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count(f"{name} {text}") == 1, done.stderr

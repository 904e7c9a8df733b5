"""Variables that gradsync does not know are told once for a run, with the name that was probably meant."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from gradsync import unknown_variables
from gradsync.unknown_variables import nearest_variable, warn_of_unknown_variables

SCRIPT = "import gradsync as gs\ngs.init_process_group().close()\n"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GRADSYNC_TIMOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_TIMEOUT", "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        ("GRADSYNC_BACKED", "GRADSYNC_BACKEND"),
        ("GRADSYNC_SECRETFILE", "GRADSYNC_SECRET_FILE"),
        ("GRADSYNC_TRACE_DIR", "GRADSYNC_TRACE"),
        ("GRADSYNC_RECORDER_ENTRIES", "GRADSYNC_FLIGHT_RECORDER_ENTRIES"),
        ("GRADSYNC_MAX_RESTART", "GRADSYNC_MAX_RESTARTS"),
        ("GRADSYNC_", None),
        ("GRADSYNC_HEARTBEAT", None),
    ],
)
def test_the_variable_that_was_meant_is_found(name: str, meant: str | None) -> None:
    assert nearest_variable(name) == meant


def test_each_is_told_once_in_a_process(caplog, monkeypatch) -> None:
    monkeypatch.setattr(unknown_variables, "_told", set())
    environ = {"GRADSYNC_BACKED": "shm", "GRADSYNC_BACKEND": "shm", "GRADSYNC_TEST_X": "1", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING, logger="gradsync"):
        for _ in range(2):
            warn_of_unknown_variables(environ)
        warn_of_unknown_variables(environ | {"GRADSYNC_VERBOSE": "1"})
    assert [record.getMessage().split(": ")[2] for record in caplog.records] == ["GRADSYNC_BACKED", "GRADSYNC_VERBOSE"]


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
    line = "gradsync: warning: GRADSYNC_TIMOUT: no such variable, so it does nothing: did you mean "
    assert told == [f"{line}GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS?"] * count, done.stderr

"""Variables that gradsync does not know are told once for a run, with the name that was probably meant."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
    line = "gradsync: warning: GRADSYNC_TIMOUT: no such variable, so it does nothing: did you mean "
    assert told == [f"{line}GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS?"] * count, done.stderr

"""Dumps hold what a look at a failed run needs; they appear when something fails, and where somebody asks for them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics.dump import read_dumps

pytestmark = pytest.mark.usefixtures("unarmed")


def test_a_file_may_be_named(tmp_path: Path) -> None:
    path = gs.dump_flight_recorder(tmp_path / "mine.json")
    assert path == tmp_path / "mine.json"
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_the_call_that_the_page_shows_keeps_the_dumps_of_all_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/tracing.md").read_text()
    [call] = set(re.findall(r"`(gs\.dump_flight_recorder\(.*?\))`", page))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", f"import gradsync as gs; {call}"], cwd=tmp_path, check=True)
    assert len(list(tmp_path.rglob("*.json"))) == 2


@pytest.mark.parametrize("path", [3, b"folder", ["folder"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(gs.InvalidArgument, match="^dump_flight_recorder needs a path as text or as a Path, got "):
        gs.dump_flight_recorder(path)
    with pytest.raises(gs.InvalidArgument, match="^trace needs a path as text or as a Path, got "), gs.trace(path):
        pass


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(gs.InvalidArgument, match="cannot be written to"):
        gs.dump_flight_recorder(tmp_path / "file" / "folder")


def test_what_ends_a_traced_block_is_told_though_no_trace_can_be_written(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyError, match="of the program"), gs.trace(tmp_path / "file" / "folder"):
        raise KeyError("of the program")
    assert "the trace was not written: " in caplog.text
    with pytest.raises(gs.InvalidArgument, match="cannot be written"), gs.trace(tmp_path / "file" / "folder"):
        pass


def test_any_thread_may_dump_while_collectives_run(tmp_path: Path) -> None:
    with local_communicator() as comm:
        thread = threading.Thread(target=lambda: [gs.dump_flight_recorder(tmp_path) for _ in range(20)])
        thread.start()
        while thread.is_alive():
            comm.barrier()
        thread.join()
    assert read_dumps([tmp_path])[0][0].rank == 0


SCRIPT = """
import sys, time
import numpy as np
import gradsync as gs
with gs.init_process_group("shm", collective_timeout_seconds=2.5) as comm:
    for _ in range(4):
        comm.all_reduce(np.ones(4))
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()
"""


def gradsync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradsync", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_rank_that_does_not_come_is_told_from_the_dumps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "dumps"
    assert gradsync("run", "-n", "2", "--dump-dir", str(folder), str(script)).returncode != 0
    told = gradsync("trace", str(folder))
    assert told.returncode == 1, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0] == "rank 1 has not begun #6 of group 'world', barrier, which rank 0 has begun"
    assert lines[1] == f"  rank 1 at {script}:9 in <module>"
    assert lines[2] == "no rank differs from another in the collectives that can be compared"
    assert "rank 0 has begun 6 collectives; rank 1 has begun 5" in lines[3]
    assert "script.py:9" in json.dumps([json.loads(file.read_text())["stacks"] for file in folder.iterdir()])


def test_a_rank_that_raises_leaves_a_dump_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.replace("time.sleep(60)", 'raise KeyError("train-0003")')
    # On a busy machine the launcher may ask rank 0 to end before rank 0 has written its dump.
    ignoring = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script.write_text(text.replace("import sys, time", ignoring))
    folder = tmp_path / "dumps"
    done = gradsync("run", "-n", "2", "--dump-dir", str(folder), str(script))
    assert done.returncode == 1
    *_, cause, hint = done.stderr.splitlines()
    assert cause == "KeyError: 'train-0003'"
    assert hint == f"gradsync: `gradsync trace {folder}` shows what the ranks were doing"
    found, _ = read_dumps([folder])
    assert [dump.rank for dump in found] == [0, 1]
    assert re.search(r"rank 1(/2| aborted)", found[0].reason)  # the server's words, or those of rank 1 in the segment
    assert found[1].reason == "KeyError: 'train-0003'"
    told = gradsync("trace", str(folder))
    lines = told.stdout.splitlines()
    assert lines[0] == f"rank 1 failed: KeyError: 'train-0003', at {script}:9 in <module>"
    assert lines[1] == "rank 1 has not begun #6 of group 'world', barrier, which rank 0 has begun"
    assert told.returncode == 1
    assert "no rank differs" not in told.stdout
    assert lines.count(f"  at {script}:9 in <module>") == 1


def test_the_place_of_a_raise_is_the_programs_own_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = SCRIPT.replace("time.sleep(60)", "load()").replace("with gs", "def load():\n    json.loads('{')\nwith gs")
    script.write_text(text.replace("import sys", "import json, sys"))
    gradsync("run", "-n", "2", "--dump-dir", str(tmp_path / "dumps"), str(script))
    first = gradsync("trace", str(tmp_path / "dumps")).stdout.splitlines()[0]
    assert first.startswith("rank 1 failed: JSONDecodeError: ")
    assert first.endswith(f", at {script}:6 in load")


def test_an_error_that_follows_the_failure_of_another_rank_is_no_cause(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    caught = "    try:\n        comm.barrier()\n    except gs.RankFailed:\n        raise SystemError('lost')\n"
    script.write_text(SCRIPT.replace("time.sleep(60)", "raise KeyError(3)").replace("    comm.barrier()\n", caught))
    gradsync("run", "-n", "2", "--dump-dir", str(tmp_path / "dumps"), str(script))
    told = gradsync("trace", str(tmp_path / "dumps")).stdout
    assert re.findall(r"(?m)^ranks? \d+ failed: .*", told) == [f"rank 1 failed: KeyError: 3, at {script}:9 in <module>"]


def test_the_trace_of_a_run_has_each_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("time.sleep(60)", "pass"))
    done = gradsync("run", "-n", "2", "--trace", str(tmp_path / "traced"), str(script))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "trace.json"
    told = gradsync("trace", str(tmp_path / "traced"), "--out", str(out))
    assert (told.returncode, told.stderr) == (0, "")
    assert {event["pid"] for event in json.loads(out.read_text())["traceEvents"]} == {0, 1}

"""docs/security.md is true: its commands make a secret with which ranks of two launchers meet."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gradsync as gs
from gradsync import environment
from gradsync.rendezvous import server, wire

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
SECRET = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)[0]  # the others: partitions/test_listeners.py
SCRIPT = """
import gradsync as gs
with gs.init_process_group("shm") as comm:
    print(comm.objects.all_gather(comm.rank))
"""


def meet(folder: Path) -> list[str]:
    """Runs two launchers of a rank each; returns what they print."""
    (folder / "train.py").write_text(SCRIPT)
    address = f"127.0.0.1:{gs.free_port()}"
    started = []
    for node in range(2):
        place = ["--nnodes", "2", "--node-rank", str(node), "--rendezvous", address, "--secret-file", "gradsync.secret"]
        line = [sys.executable, "-m", "gradsync", "run", "-n", "1", *place, "train.py"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(line, cwd=folder, **options))
    return [process.communicate(timeout=100)[0] for process in started]


def test_a_secret_with_which_launchers_meet(tmp_path: Path) -> None:
    subprocess.run(["/bin/sh", "-ec", SECRET], cwd=tmp_path, check=True, timeout=60)
    for node, told in enumerate(meet(tmp_path)):
        assert f"[rank {node}] [0, 1]\n" in told


def test_limits_are_those_of_the_code() -> None:
    limits = dict(
        re.findall(r"^\| ((?:size|time|number of unauth|data)[^|]*) \| ([^|]*) \|$", PAGE, flags=re.MULTILINE)
    )
    more = f"{server.MAX_UNAUTHENTICATED} plus one for each rank. The server closes the oldest connection first"
    assert limits == {
        "size of a frame before the client's proof": f"{wire.MAX_HANDSHAKE_FRAME_BYTES} bytes",
        "size of a frame after the client's proof": f"{wire.MAX_FRAME_BYTES // 1024} KB",
        "time from the connection to the first valid message": (
            f"{server.HANDSHAKE_SECONDS:g} s, even if bytes arrive all the time"
        ),
        "number of unauthenticated connections": more,
        "data that a client has not read yet": f"{server.MAX_OUTPUT_BYTES // 2**20} MB",
    }


def test_every_variable_is_named() -> None:
    names = {environment.SECRET, environment.SECRET_FILE, *environment._REMOVED}
    assert names <= set(re.findall(r"GRADSYNC_[A-Z_]+", PAGE))

"""docs/security.md is true: its commands make a secret and certificates with which ranks of two launchers meet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs
from gradsync import environment
from gradsync.rendezvous import event_loop, server_connection, wire

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
SECRET, SELF_SIGNED, CA, NODE = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
SCRIPT = """
import gradsync as gs
with gs.init_process_group("shm") as comm:
    print(comm.objects.all_gather(comm.rank))
"""

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command on this machine")


def shell(text: str, folder: Path) -> dict[str, str]:
    """Runs lines in a folder, and returns the variables of TLS that they export."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["/bin/sh", "-ec", f"{text}\nenv"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in lines if name.startswith("GRADSYNC_TLS")}


def meet(folder: Path, variables: list[dict[str, str]]) -> list[str]:
    """Runs two launchers of a rank each with these variables; returns what they print."""
    (folder / "train.py").write_text(SCRIPT)
    address = f"127.0.0.1:{gs.free_port()}"
    started = []
    for node, own in enumerate(variables):
        place = ["--nnodes", "2", "--node-rank", str(node), "--rendezvous", address, "--secret-file", "gradsync.secret"]
        line = [sys.executable, "-m", "gradsync", "run", "-n", "1", *place, "train.py"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(line, cwd=folder, env=os.environ | own, **options))
    return [process.communicate(timeout=100)[0] for process in started]


@needs_openssl
def test_certificates_that_sign_themselves(tmp_path: Path) -> None:
    shell(SECRET, tmp_path)
    own = [shell(SELF_SIGNED, tmp_path / f"node{node}") for node in range(2)]
    assert own[0].keys() == {environment.TLS_CERTIFICATE, environment.TLS_KEY}
    for node, told in enumerate(meet(tmp_path, own)):
        assert f"[rank {node}] [0, 1]\n" in told


@needs_openssl
def test_certificates_of_a_ca(tmp_path: Path) -> None:
    shell(SECRET, tmp_path)
    shell(CA, tmp_path)
    own = []
    for node in range(2):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        for name in ("ca.pem", "ca.key.pem"):
            shutil.copy(tmp_path / name, folder)
        own.append(shell(NODE, folder))
    assert own[0].keys() == {environment.TLS_CERTIFICATE, environment.TLS_KEY, environment.TLS_CA}
    for node, told in enumerate(meet(tmp_path, own)):
        assert f"[rank {node}] [0, 1]\n" in told


def test_limits_are_those_of_the_code() -> None:
    rows = r"^\| (a frame [^|]*|from connecting[^|]*|strangers[^|]*|what a peer[^|]*) \| ([^|]*) \|$"
    limits = dict(re.findall(rows, PAGE, flags=re.MULTILINE))
    assert limits == {
        "a frame before the proof": f"{wire.MAX_HANDSHAKE_FRAME_BYTES} bytes",
        "a frame after it": f"{wire.MAX_FRAME_BYTES // 1024} KiB",
        "from connecting to the first message that holds": (
            f"{event_loop.HANDSHAKE_SECONDS:g} s, however often a stranger speaks"
        ),
        "strangers at once": f"{event_loop.MAX_STRANGERS}, and one for each rank; the oldest goes first",
        "what a peer may leave unread": f"{server_connection.MAX_OUTPUT_BYTES // 2**20} MiB",
    }


def test_every_variable_is_named() -> None:
    names = {environment.TLS_CERTIFICATE, environment.TLS_KEY, environment.TLS_CA}
    assert names | {environment.SECRET, environment.SECRET_FILE} <= set(re.findall(r"GRADSYNC_[A-Z_]+", PAGE))

"""The end of an interpreter while a collective is stuck: within seconds, in order, with the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradsync as gs
from rank_processes import STAND_IN


def start_plain_ranks(tmp_path: Path, count: int, *arguments: str, script: str) -> list[subprocess.Popen[str]]:
    """Starts ranks as a user without our launcher would: RANK, WORLD_SIZE and MASTER_* only."""
    path = tmp_path / "script.py"
    path.write_text(script)
    port = gs.free_port()  # and the one beside it, where the ranks meet, is not one that the kernel hands out either
    processes = []
    for rank in range(count):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(path), *arguments],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


SCRIPT = """
import contextlib
import sys
import time

import cupy

import gradsync as gs
from gradsync import process_group
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.nccl import nccl_backend as nccl
from gradsync.communicators.nccl.connect import connect

nccl._DRAIN_SECONDS = 0.3
world = gs.init_process_group("nccl", timeout_seconds=30, allow_shared_gpu=True)
client = process_group._client
used = world
if "forget" in sys.argv:
    used = Communicator(connect(client, process_group._settings, "forgotten"))
callback = gs.AllreduceCallback("sum", used)


def step():
    with callback.backward():
        callback("w", cupy.ones(3))


step()
cupy.cuda.runtime.deviceSynchronize()  # rank 1 shall have nothing under way
client.barrier()
if world.rank == 1:
    used._backend._nccl.call = lambda *_: None  # it agrees on the next collective, and its GPU never comes to it
    step()
    if "forget" in sys.argv:  # the world's end in order needs both ranks
        client.get("rank 0 is stuck", timeout_seconds=30)
        gs.destroy_process_group()
        sys.exit(0)
    with contextlib.suppress(gs.RankFailed):
        client.get("nobody sets this", timeout_seconds=30)
    with contextlib.suppress(gs.RankFailed):  # its watcher may have heard of that, too
        gs.destroy_process_group()
    sys.exit(0)
step()
print(time.monotonic())
if "forget" in sys.argv:
    client.set("rank 0 is stuck", b"")
if "raise" in sys.argv:
    raise KeyError("lost")
if "exit" in sys.argv:
    sys.exit(7)
"""


def run(tmp_path: Path, how: str) -> None:
    processes = start_plain_ranks(tmp_path, 2, how, script=SCRIPT)
    (stuck_at, errors), (_, other_errors) = [process.communicate(timeout=60) for process in processes]
    seconds = time.monotonic() - float(stuck_at)
    wanted = {"raise": 1, "exit": 7}.get(how, 0)
    assert [process.returncode for process in processes] == [wanted, 0], (errors, other_errors)
    assert seconds < 15
    if how == "raise":
        assert errors.rstrip().endswith("KeyError: 'lost'")
    elif how == "forget":
        assert errors == ""
    else:  # the exit code is settled by then, but nobody shall take the last step for done
        assert "CollectiveTimeout" in errors or "RankFailed" in errors
    assert other_errors == ""


@pytest.mark.parametrize("how", ["end", "raise", "exit", "forget"])
def test_the_interpreter_ends_beside_a_stuck_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAKE_CUPY_DEVICES", "2")
    monkeypatch.setenv("FAKE_CUPY_HANG", "1")
    run(tmp_path, how)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["end", "raise", "exit", "forget"])
def test_the_interpreter_ends_beside_a_stuck_collective_on_a_gpu(tmp_path: Path, how: str) -> None:
    run(tmp_path, how)

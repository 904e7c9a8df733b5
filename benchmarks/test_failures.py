"""How soon a failure is reported, until the output names its cause and until all have ended; how soon others go on.

Two ranks run a loop. In the middle of it rank 1 prints the time, and fails. Whether a report is right in all its parts,
and whether anything is left behind, is for tests/e2e.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import gradsync as gs
from compare import Compare, contenders
from systems import Absent, Step, rendezvous_server, started

SCRIPT = """
import os, signal, sys, time, numpy as np, gradsync as gs
with gs.init_process_group() as comm:
    for step in range(2000):
        if step == 100 and comm.rank == 1:
            print("fails at", time.monotonic(), flush=True)
            exec(sys.argv[1])
        comm.all_reduce(np.ones(1000, np.float32))
"""
RANK_1 = r"gradsync: rank 1 \(pid \d+ on \S+\)"
LATE, NO_SERVER = "is late in a collective: notice", "loses the rendezvous server"
#: What rank 1 does, the words that name it as the cause, and the number of rounds: few of those that take long.
FAILURES = {
    "raises an exception": ("raise ValueError('no such batch')", rf"{RANK_1} failed with exit code 1", 10),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", rf"{RANK_1} was killed by SIGKILL", 10),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", r"rank 1 \(pid \d+\) was paused by a signal", 3),
    LATE: ("time.sleep(6)", r"rank 0 has waited .* for rank 1;", 2),
    NO_SERVER: ("os.kill(int(sys.argv[2]), signal.SIGKILL)", r"RendezvousError: .*rendezvous server", 10),
}
# A launcher runs the server of its ranks, and would go with it. So these two ranks have none.
BOTH_RANKS = ["sh", "-c", 'RANK=0 "$@" & RANK=1 "$@" & wait', "sh", sys.executable]


def failing(_: str, failure: str, script: Path, all_ended: list[float]) -> Step:
    code, report, _ = FAILURES[failure]
    if failure == NO_SERVER and gs.is_launched():
        raise Absent("the ranks would take pytest's launcher for theirs: start pytest without one")

    def step() -> float:
        with ExitStack() as stack:
            command, variables = [sys.executable, "-m", "gradsync", "run", "-n", "2", str(script), code], {}
            if failure == NO_SERVER:
                server, address, secret = stack.enter_context(rendezvous_server(2))
                command = [*BOTH_RANKS, str(script), code, str(server.pid)]
                variables = {
                    "GRADSYNC_ADDRESS": address,
                    "GRADSYNC_SECRET": secret,
                    "WORLD_SIZE": "2",
                }
            run = stack.enter_context(started(command, env=os.environ | variables, stderr=subprocess.STDOUT))
            lines = [(time.monotonic(), line) for line in run.stdout]
            run.wait(60)
            ended = time.monotonic()
        output = "".join(line for _, line in lines)
        failed = re.search(r"fails at (\S+)", output)
        told = [at for at, line in lines if re.search(report, line)]
        assert failed, output
        assert told, output
        all_ended.append(ended - float(failed[1]))
        return told[-1] - float(failed[1])  # without a launcher each rank tells: the later one counts

    return step


@pytest.mark.parametrize("failure", FAILURES)
@contenders("reported")
def test_failure(compare: Compare, tmp_path: Path, failure: str) -> None:
    if compare.disabled and failure == LATE:
        pytest.skip("waits for 6 s")
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    all_ended: list[float] = []
    rounds = FAILURES[failure][2]
    compare(f"a rank {failure}", failing, failure, script, all_ended, ranks=0, rounds=rounds, warm_up=1)
    compare.note(all_ended_seconds=statistics.median(all_ended))


GOES_ON = """
import os, signal, time, numpy as np, gradsync as gs
comm = gs.init_process_group()
try:
    for step in range(2000):
        if step == 100 and comm.rank == 1:
            print("fails at", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(np.ones(1000, np.float32))
except gs.RankFailed:
    comm = gs.rebuild()
    comm.all_reduce(np.ones(1000, np.float32))
    print("goes on at", time.monotonic(), flush=True)
"""


def going_on(_: str, script: Path) -> Step:
    command = [sys.executable, "-m", "gradsync", "run", "-n", "4", "--min-ranks", "3", str(script)]

    def step() -> float:
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
        failed, goes_on = (re.findall(rf"^\[.*{what} at (\S+)", output, re.MULTILINE) for what in ("fails", "goes on"))
        assert len(goes_on) == 3, output
        return max(map(float, goes_on)) - float(failed[0])

    return step


@contenders("gs.rebuild")
def test_going_on(compare: Compare, tmp_path: Path) -> None:
    """Until the next all-reduce of the other three."""
    script = tmp_path / "goes_on.py"
    script.write_text(GOES_ON)
    compare("one of four ranks is killed", going_on, script, ranks=0, rounds=20, warm_up=1)

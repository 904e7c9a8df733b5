"""Runs that end at a random moment: a rank is killed, Ctrl-C, the launcher is killed. Nothing is left.

ROUNDS=300 pytest -m slow tests/launching/test_random_ends.py: as many rounds of each.
"""

import contextlib
import os
import random
import re
import signal
import time

import pytest

ROUNDS = int(os.environ.get("ROUNDS", "12"))
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("seed", range(ROUNDS))]

TRAINS = """
    import os, subprocess
    import numpy as np
    import gradsync as gs
    os.write(1, b"pid %d\\n" % os.getpid())
    subprocess.Popen(["sh", "-c", "sleep 100 & sleep 100"], start_new_session=True)  # helpers, one of them orphaned
    with gs.init_process_group() as comm:
        sync = gs.AllreduceCallback("mean", parameters={"w": np.ones(50_000)})
        while True:
            with sync.backward():
                sync("w", np.ones(50_000))
"""

TRAINS_ON = """
    import os, time
    import numpy as np
    import gradsync as gs
    comm = gs.init_process_group()
    sync = gs.AllreduceCallback("mean")
    state, gradient = {"step": 0}, np.ones(1000)
    while True:
        try:
            state = gs.broadcast_tree(state, root=comm.most_advanced)
            if state["step"] == 100:
                break
            while state["step"] < 100:
                with sync.backward():
                    sync("w", gradient)
                state["step"] += 1
                time.sleep(0.005)
        except (gs.RankFailed, gs.CollectiveTimeout):
            comm = gs.rebuild()
    os.write(1, f"{comm.member}: {state['step']} steps, {comm.world_size} ranks\\n".encode())
"""


@pytest.fixture
def running(cli, script, seed):
    """Gives a run, its ranks' process ids and a random generator, some time after the ranks have begun."""
    path = script(TRAINS)
    launcher = cli.start("run", "--no-prefix", "-n", 3, path)
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(3)]
    dice = random.Random(seed)
    time.sleep(dice.uniform(0.0, 0.6))
    return launcher, pids, dice


def test_a_rank_that_is_killed_ends_all(running):
    launcher, pids, dice = running
    victim = dice.choice(pids)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    code, _, err = launcher.result(60)
    assert code == 128 + signal.SIGKILL
    assert time.monotonic() - began < 10
    blamed = re.search(r"^gradsync: rank \d \(pid (\d+) on \S+\) was killed by SIGKILL", err, re.M)
    assert int(blamed[1]) == victim


def test_a_rank_that_dies_at_any_moment_from_its_start_on_is_replaced(cli, script, seed):
    """One of its processes is killed: the rank, or its guard. While the ranks connect, the others fail with it."""
    path = script(TRAINS_ON)
    dice = random.Random(seed)
    launcher = cli.start("run", "--no-prefix", "-n", 3, "--min-ranks", 2, "--respawn", 3, path)
    time.sleep(dice.uniform(0.0, 1.2))
    if processes := [pid for pid in cli.processes() if pid != launcher.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(dice.choice(processes), signal.SIGKILL)
    code, out, err = launcher.result(60)
    assert (code, out.count(": 100 steps, ")) in ((0, 2), (0, 3)), err


def test_ctrl_c_ends_all(running):
    launcher, _, dice = running
    for _ in range(dice.randint(1, 3)):
        launcher.send_signal(signal.SIGINT)
        time.sleep(dice.uniform(0.0, 0.05))
    code, _, err = launcher.result(60)
    assert code in (130, -signal.SIGINT)  # the last one may come when the command has done all, but for its exit
    assert "gradsync: stopping 3 ranks" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_while_its_ranks_start_leaves_nothing(number, cli, script, seed):
    launcher = cli.start("run", "--no-prefix", "-n", 3, script(TRAINS))
    time.sleep(random.Random(seed).uniform(0.0, 0.8))
    launcher.send_signal(number)
    assert launcher.result(60).code in (128 + number, -number)
    cli.close()


def test_the_end_of_a_launcher_that_is_killed_ends_all(running, cli):
    launcher, _, _ = running
    launcher.kill()
    launcher.result(60)
    cli.close()  # waits for its ranks, and fails if one is left

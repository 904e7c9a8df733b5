"""Real processes fail, each fault at each point of a run: the culprit is named, the others raise, nothing is left."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
    import ctypes, os, resource, signal, sys, time
    import numpy as np

    fault, point, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def strike(here):
        if here != point or int(os.environ["RANK"]) != victim:
            return
        if fault == "raises":
            raise ValueError("wrong shapes in layer 3")
        if fault == "runs out of memory":
            raise MemoryError("no room for the batch")
        if fault == "exits with 3":
            sys.exit(3)
        if fault == "exits at once":
            os._exit(4)
        if fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        if fault == "hangs":
            time.sleep(600)
        if fault == "hangs with Python's lock":
            ctypes.PyDLL(None).sleep(600)
        if fault == "becomes another program":
            os.execv("/bin/true", ["true"])
        if fault == "leaves early":
            import gradsync as gs
            gs.destroy_process_group()
            sys.exit(0)

    SIGNALS = {
        "is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP, "crashes": signal.SIGSEGV,
        "is interrupted": signal.SIGINT, "is terminated": signal.SIGTERM,
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    strike("before it joins")
    import gradsync as gs
    try:
        comm = gs.init_process_group(timeout_seconds=8, collective_timeout_seconds=5)
        sync = gs.AllreduceCallback("mean")
        for step in range(4):
            with sync.backward():
                for name in "abc":
                    sync(name, np.ones(100_000))
                    if step == 2 and name == "b":
                        strike("in a backward pass")
            if step == 3:
                strike("between steps")
            comm.all_reduce(np.ones(1000))
        strike("before it leaves")
        comm.barrier()
    except gs.GradsyncError as error:
        print(f"rank {os.environ['RANK']}: {type(error).__name__}", flush=True)
        raise
"""

#: The exit code of the launcher, and words of which one says what happened.
FAULTS = {
    "raises": (1, ("ValueError: wrong shapes in layer 3",)),
    "runs out of memory": (1, ("MemoryError: no room for the batch",)),
    "exits with 3": (3, ("exit code 3",)),
    "exits at once": (4, ("exit code 4",)),
    "is killed": (128 + signal.SIGKILL, ("SIGKILL",)),
    "crashes": (128 + signal.SIGSEGV, ("SIGSEGV",)),
    "is stopped": (1, ("stopped",)),
    "is interrupted": (None, ("KeyboardInterrupt", "SIGINT", "exit code 130")),
    "is terminated": (128 + signal.SIGTERM, ("SIGTERM",)),
    "hangs": (1, ("waited", "missing: rank", "not joined")),
    "hangs with Python's lock": (1, ("did not answer", "missing: rank", "not joined", "holds Python's lock")),
    "becomes another program": (1, ("exit code 0",)),
}
POINTS = ("before it joins", "in a backward pass", "between steps", "before it leaves")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_fails(cli, script, fault, point):
    code, words = FAULTS[fault]
    done = cli("run", "-n", 3, "--backend", "shm", script(SCRIPT), fault, point, 1)
    assert done.code != 0, done
    assert code is None or done.code == code, done
    assert "rank 1" in done.err
    assert any(word in done.err for word in words), done.err
    for rank in (0, 2):  # those that raised, raised an error of ours
        assert f"[rank {rank}] rank {rank}: " not in done.out or any(
            f"rank {rank}: {name}" in done.out
            for name in ("RankFailed", "CollectiveTimeout", "RendezvousTimeout", "RendezvousError", "PlanMismatch")
        ), done.out


@pytest.mark.parametrize("point", POINTS[1:])
def test_a_rank_that_leaves_early_is_named(cli, script, point):
    done = cli("run", "-n", 3, "--backend", "shm", script(SCRIPT), "leaves early", point, 1)
    assert done.code == 1
    assert "RankFailed" in done.err
    assert "rank 1" in done.err


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault", ["raises", "is killed", "is stopped", "hangs"])
def test_any_rank_may_be_the_one(cli, script, fault, victim):
    done = cli("run", "-n", 3, "--backend", "shm", script(SCRIPT), fault, "in a backward pass", victim)
    assert done.code == FAULTS[fault][0]
    assert f"rank {victim}" in done.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("point", POINTS)
def test_the_launcher_ends_in_the_middle_of_anything(cli, script, point, number):
    """Its ranks hang at that point; nothing of them is left."""
    path = script(SCRIPT.replace("time.sleep(600)", "print('hangs', flush=True), time.sleep(600)"))
    launcher = cli.start("run", "-n", 3, "--backend", "shm", path, "hangs", point, 1)
    launcher.read_until("hangs")
    launcher.send_signal(number)
    assert launcher.result().code in (-number, 128 + number)

"""Processes that end with and without an order: none hangs, and the ranks that wait for it learn who left and why."""

from __future__ import annotations

import signal
import sys

import pytest

SCRIPT = """
    import os, signal, sys, threading, time
    import numpy as np
    import gradsync as gs

    how, leaver = sys.argv[1], int(sys.argv[2])
    if "earlier error" in how:  # as a test runner leaves it there, for a debugger
        sys.last_value = KeyError("lost")
    comm = gs.init_process_group("shm")
    groups = [comm.split(0), comm.split(0, key=-comm.rank)]
    comm.barrier()
    if comm.rank != leaver:
        try:
            comm.all_reduce(np.ones(100_000))
        except gs.RankFailed as error:
            print("failed:", error.rank, error, flush=True)
        sys.exit(0)

    def pend():
        return [groups[0].asynchronous.all_reduce(np.ones(1000)) for _ in range(5)]  # nobody else comes to them

    def stop(number, frame):
        raise SystemExit(5)

    if "pending" in how:
        futures = pend()
    if "closed groups" in how:
        for group in groups:
            group.close()
    if "with" in how:
        with comm:
            if "raise" in how:
                raise KeyError("lost")
        sys.exit(0)
    if "inside" in how:
        signal.signal(signal.SIGALRM, stop)
        if "thread" in how:
            threading.Timer(0.2, lambda: os._exit(6)).start()
        else:
            number = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGALRM": signal.SIGALRM}[how.split()[-1]]
            threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()
        if "future" in how:
            pend()[0].result()
        groups[0].all_reduce(np.ones(1000))
    if "destroy" in how:
        gs.destroy_process_group()
    if "close" in how.split():
        comm.close()
    if "abort" in how:
        comm.abort("enough")
    if "sys.exit" in how:
        sys.exit(3)
    if "raise" in how:
        raise KeyError("lost")
    if "os._exit" in how:
        os._exit(4)
"""

#: How a rank leaves, its exit code, and what the other one reads of the reason.
ENDINGS = {
    "end": (0, ""),
    "earlier error, raise": (1, "KeyError: 'lost'"),
    "closed groups, destroy": (0, ""),
    "abort": (0, "enough"),
    "raise": (1, "KeyError: 'lost'"),
    "os._exit": (4, ""),
    "with, raise": (1, "KeyError: 'lost'"),
    "pending, end": (0, ""),
    "pending, raise": (1, "KeyError: 'lost'"),
    "pending, abort": (0, "enough"),
    "inside, a thread": (6, ""),
    "inside, SIGALRM": (5, ""),
    "inside, Ctrl-C": (-signal.SIGINT, ""),
    "inside, SIGTERM": (-signal.SIGTERM, ""),
    "inside a future, Ctrl-C": (-signal.SIGINT, ""),
}


@pytest.fixture
def two_ranks(cli, script, tmp_path):
    """two_ranks(script, *arguments) starts them at a server that neither hosts, so that each may end first."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5a" * 32)
    server = cli.start("serve", "--world-size", 2, "--secret-file", secret)
    meeting = {"GRADSYNC_ADDRESS": server.stdout.readline().strip(), "GRADSYNC_HOSTED": "1", "WORLD_SIZE": "2"}
    meeting |= {"GRADSYNC_SECRET_FILE": str(secret), "LOCAL_WORLD_SIZE": "2"}

    def start(text, *arguments):
        path = script(text)
        variables = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        return [cli.start_program(sys.executable, path, *arguments, environment=each) for each in variables]

    yield start
    server.send_signal(signal.SIGTERM)
    assert server.result().code == 0


@pytest.mark.parametrize(("how", "leaver"), [*((how, 1) for how in ENDINGS), ("end", 0)])
def test_a_process_ends_and_the_other_rank_learns_who_left(two_ranks, how, leaver):
    code, reason = ENDINGS[how]
    results = [each.result() for each in two_ranks(SCRIPT, how, leaver)]
    left, other = results[leaver], results[1 - leaver]
    assert left.code == code, left
    assert other.code == 0, other
    assert other.out.startswith(f"failed: {leaver} ")
    assert reason in other.out
    assert reason or "KeyError" not in other.out
    if code in (0, 3, 4, 5, 6) and how != "pending, abort":  # whose futures may have failed before it ends
        assert (left.err, other.err) == ("", "")


@pytest.mark.parametrize("close", ["", "group.close(); comm.close()"])
def test_one_local_rank_ends_with_work_that_nobody_asked_for(cli, script, close):
    path = script(f"""
        import numpy as np, gradsync as gs
        comm = gs.init_process_group("local")
        group = comm.split(0)
        futures = [c.asynchronous.all_reduce(np.ones(1000)) for c in (comm, group) for _ in range(100)]
        {close}
    """)
    assert cli.python(path) == (0, "", "")

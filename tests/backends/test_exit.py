"""Processes that end with and without an order: none hangs, and the rank that waits for it learns who left and why.

How a communicator ends while its process lives is in tests/contract/test_lifetime.py.
"""

from __future__ import annotations

import secrets
import signal
import sys

import pytest

from gradsync.rendezvous.server import RendezvousServer  # as gradsync's launcher hosts it: each rank may end first

SCRIPT = """
    import os, signal, sys, threading
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

    def stop(number, frame):
        raise SystemExit(5)

    if "pending" in how:
        futures = [groups[0].asynchronous.send(np.ones(1000), 1 - leaver) for _ in range(5)]  # which nobody receives
    if "closed groups" in how:
        for group in groups:
            group.close()
    if "inside" in how:
        signal.signal(signal.SIGALRM, stop)
        number = signal.SIGINT if "Ctrl-C" in how else signal.SIGALRM
        threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()
        if "future" in how:
            groups[0].asynchronous.all_reduce(np.ones(1000)).result()
        groups[0].all_reduce(np.ones(1000))
    if "destroy" in how:
        gs.destroy_process_group()
    if "raise" in how:
        raise KeyError("lost")
    if "os._exit" in how:
        os._exit(4)
"""


@pytest.mark.parametrize(
    ("how", "leaver", "code", "reason"),
    [
        ("earlier error, end", 0, 0, ""),
        ("earlier error, raise", 1, 1, "KeyError: 'lost'"),
        ("closed groups, destroy", 1, 0, ""),
        ("os._exit", 1, 4, ""),
        ("pending, end", 1, 0, ""),
        ("inside, SIGALRM", 1, 5, ""),
        ("inside a future, Ctrl-C", 1, -signal.SIGINT, ""),
    ],
)
def test_a_process_ends_and_the_other_rank_learns_who_left(cli, script, how, leaver, code, reason):
    """`reason` is what the other one reads of it."""
    secret, path = secrets.token_bytes(32), script(SCRIPT)
    server = RendezvousServer(2, secret=secret)
    server.start()
    try:
        meeting = {"GRADSYNC_ADDRESS": server.address, "GRADSYNC_SECRET": secret.hex()}
        meeting |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            cli.start_program(
                sys.executable, path, how, leaver, environment=meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(2)
        ]
        results = [each.result() for each in ranks]
    finally:
        server.stop()
    left, other = results[leaver], results[1 - leaver]
    assert (left.code, other.code) == (code, 0), results
    assert other.out.startswith(f"failed: {leaver} ")
    assert reason in other.out
    assert reason or "KeyError" not in other.out
    if code in (0, 4, 5):
        lost = "5 messages under way" if "pending" in how else ""
        assert (lost in left.err, bool(left.err), other.err) == (True, bool(lost), "")


def test_one_local_rank_ends_with_work_that_nobody_asked_for(cli, script):
    path = script("""
        import numpy as np, gradsync as gs
        comm = gs.init_process_group("local")
        group = comm.split(0)
        futures = [c.asynchronous.all_reduce(np.ones(1000)) for c in (comm, group) for _ in range(100)]
    """)
    assert cli.python(path) == (0, "", "")

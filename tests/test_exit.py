"""Processes that end with and without an order: none hangs, and the ranks that wait for it are told."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from contract import IS_EVERYWHERE
from gradsync.rendezvous.server import RendezvousServer

ENDS_WITHIN_SECONDS = 45.0  # 2 on an idle machine; what could hold an end up waits 100 s
_NEVER_SECONDS = 110.0

SCRIPT = """
import os, signal, sys, threading, time

import numpy as np

import gradsync as gs

how, leaver = sys.argv[1], int(sys.argv[2])
if "earlier error" in how:  # as a test runner leaves it there, for a debugger
    sys.last_value = KeyError("lost")
comm = gs.init_process_group(timeout_seconds=100, collective_timeout_seconds=100)
groups = [comm.split(0), comm.split(0, key=-comm.rank)]
comm.barrier()
if comm.rank != leaver:
    try:
        comm.all_reduce(np.ones(100_000))
    except gs.RankFailed as error:
        print("told", time.monotonic(), error)
    sys.exit(0)

others = groups[0]  # nobody else comes to a collective of it


def leave():
    print("leaving", time.monotonic(), flush=True)


def leave_by(error):
    leave()
    raise error


def pend():
    return [others.asynchronous.all_reduce(np.ones(1000)) for _ in range(5)]


if "pending" in how:
    futures = pend()
if "closed groups" in how:
    for group in groups:
        group.close()
if "with" in how:
    with comm:
        leave()
        if "raise" in how:
            raise KeyError("lost")
    sys.exit(0)
if "inside" in how:
    signal.signal(signal.SIGALRM, lambda number, frame: leave_by(SystemExit(5)))
    if "thread" in how:
        threading.Timer(0.2, lambda: (leave(), os._exit(6))).start()
    elif "Ctrl-C" in how:
        threading.Timer(0.2, lambda: (leave(), os.kill(os.getpid(), signal.SIGINT))).start()
    elif "SIGTERM" in how:
        threading.Timer(0.2, lambda: (leave(), os.kill(os.getpid(), signal.SIGTERM))).start()
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    if "future" in how:
        pend()[0].result()
    others.all_reduce(np.ones(1000))
leave()
if "close" in how.split():
    comm.close()
if "destroy" in how:
    gs.destroy_process_group()
if "abort" in how:
    comm.abort("enough")
if "sys.exit" in how:
    sys.exit(3)
if "raise" in how:
    raise KeyError("lost")
if "os._exit" in how:
    sys.stdout.flush()
    os._exit(4)
"""

#: How a rank leaves, its exit code, and what the other one is told.
ENDINGS = {
    "end": (0, ""),
    "earlier error, end": (0, ""),
    "earlier error, raise": (1, "KeyError: 'lost'"),
    "close": (0, ""),
    "destroy": (0, ""),
    "closed groups, destroy": (0, ""),
    "abort": (0, "enough"),
    "sys.exit": (3, ""),
    "raise": (1, "KeyError: 'lost'"),
    "os._exit": (4, ""),
    "with": (0, ""),
    "with, raise": (1, "KeyError: 'lost'"),
    "pending, end": (0, ""),
    "pending, raise": (1, "KeyError: 'lost'"),
    "pending, sys.exit": (3, ""),
    "pending, os._exit": (4, ""),
    "pending, abort": (0, "enough"),
    "inside, sys.exit by a signal": (5, ""),
    "inside, os._exit in a thread": (6, ""),
    "inside, Ctrl-C": (-signal.SIGINT, ""),
    "inside, SIGTERM": (-signal.SIGTERM, ""),
    "inside a future, Ctrl-C": (-signal.SIGINT, ""),
}


class Ended(NamedTuple):
    """How one process ended."""

    output: str
    errors: str
    code: int
    at: float


@contextmanager
def ranks(count: int, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts ranks that meet at a server of the tests: none of them hosts it, so that each may end first."""
    secret = secrets.token_bytes(32)
    with RendezvousServer(count, secret=secret) as server:
        processes = []
        for rank in range(count):
            variables = {
                **os.environ,
                "GRADSYNC_RANK": str(rank),
                "GRADSYNC_WORLD_SIZE": str(count),
                "GRADSYNC_LOCAL_RANK": str(rank),
                "GRADSYNC_LOCAL_WORLD_SIZE": str(count),
                "GRADSYNC_ADDRESS": server.address,
                "GRADSYNC_HOSTED": "1",
                "GRADSYNC_SECRET": secret.hex(),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, *arguments],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def ended(process: subprocess.Popen[str]) -> Ended:
    output, errors = process.communicate(timeout=_NEVER_SECONDS)
    return Ended(output, errors, process.returncode, time.monotonic())


def time_of(word: str, output: str) -> float:
    """Returns when a rank said something."""
    return next(float(line.split()[1]) for line in output.splitlines() if line.startswith(f"{word} "))


#: Of two endings that take one way, `make test` has the one on which more depends.
_LIKE_OTHERS = {"earlier error, end", "close", "sys.exit", "with", "pending, os._exit"}
_CASES = [(how, 1) for how in ENDINGS if IS_EVERYWHERE or how not in _LIKE_OTHERS]
_CASES += [("end", 0), *([("raise", 0), ("os._exit", 0)] if IS_EVERYWHERE else [])]


@pytest.mark.parametrize(("how", "leaver"), _CASES)
def test_a_process_ends_and_the_other_rank_is_told(how: str, leaver: int) -> None:
    code, text = ENDINGS[how]
    with ranks(2, how, str(leaver)) as processes, ThreadPoolExecutor(2) as threads:
        of_ranks = list(threads.map(ended, processes))
    left, told = of_ranks[leaver], of_ranks[1 - leaver]
    assert left.code == code, left
    assert told.code == 0, told
    assert f"rank {leaver}" in told.output
    assert text in told.output
    assert text or "KeyError" not in told.output
    leaving, heard = time_of("leaving", left.output), time_of("told", told.output)
    assert left.at - leaving < ENDS_WITHIN_SECONDS, left
    assert heard - leaving < ENDS_WITHIN_SECONDS, told
    assert told.at - heard < ENDS_WITHIN_SECONDS, told
    if code in (0, 3, 4, 5, 6):
        errors = left.errors.splitlines()
        if how == "pending, abort":  # the other rank may have gone, and what pends have failed, before this one ends
            errors = [
                line
                for line in errors
                if "failed, and its future was never asked for the result: RankFailed" not in line
            ]
        assert (errors, told.errors) == ([], "")


ALONE = """
import os, sys
import numpy as np
import gradsync as gs
comm = gs.init_process_group("local")
group = comm.split(0)
futures = [c.asynchronous.all_reduce(np.ones(1000)) for c in (comm, group) for _ in range(100)]
if "close" in sys.argv:
    group.close()
    comm.close()
"""


@pytest.mark.parametrize("how", ["end", "close"])
def test_one_local_rank_ends_with_work_in_the_background(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, how], capture_output=True, text=True, timeout=_NEVER_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

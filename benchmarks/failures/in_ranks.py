"""A rank of a scene: it reaches a phase, in which one rank, the culprit, fails.

    python -m failures.in_ranks PHASE FAULT [options]

The other ranks are measured: when they get an error, and which.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gradsync as gs
from failures import diary

_SMALL = np.ones(1000, np.float32)
_BIG_ELEMENTS = 16 << 20
_HELD: list[bytes] = []
_CHUNK_BYTES = 16 << 20
_ESTABLISHED = "01"
_LOOK_SECONDS = 0.01
_init_process_group = gs.init_process_group  # imports its modules now, and not within a measured time
_JOINING_SECONDS = 0.3  # ample: nothing outside a rank sees that it has joined


# -- Faults --------------------------------------------------------------------------------------------------


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_with_3() -> None:
    print("the disk is full", file=sys.stderr, flush=True)
    sys.exit(3)


def exit_with_0() -> None:
    os._exit(0)


def import_what_is_not_there() -> None:
    import a_module_that_is_not_there  # noqa: F401


def raise_error() -> None:
    raise ValueError("no such batch")


def ask_for_too_much() -> None:
    np.empty(1 << 60, np.uint8)


def ask_for_too_much_on_the_gpu() -> None:
    import cupy

    cupy.empty(1 << 50, cupy.uint8)


def allocate_until_killed() -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    while True:
        diary.note(diary.FAULT)  # the last one before the kill counts
        _HELD.append(b"x" * _CHUNK_BYTES)


def load_batch() -> None:
    """Never returns a batch, like a data loader that hangs."""
    threading.Event().wait()


FAULTS: dict[str, Callable[[], None]] = {
    "kill": kill_myself,
    "stop": stop_myself,
    "exit-3": exit_with_3,
    "exit-0": exit_with_0,
    "import": import_what_is_not_there,
    "raise": raise_error,
    "memory": ask_for_too_much,
    "gpu-memory": ask_for_too_much_on_the_gpu,
    "fill-memory": allocate_until_killed,
    "stall": load_batch,
    "none": load_batch,
}


# -- Phases --------------------------------------------------------------------------------------------------


class Rank:
    """This process's part.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rank = int(os.environ["RANK"])
        self._is_culprit = self._rank == options.culprit and options.fault != "none"

    def before_init(self) -> None:
        self._come_to_the_point()
        if self._is_culprit:
            self._strike_when_told()
        self._init()

    def in_init(self) -> None:
        """The last rank never joins, so that the others wait there."""
        if self._rank == int(os.environ["WORLD_SIZE"]) - 1:
            diary.note(diary.READY, **_facts())
            load_batch()
        self._strike_from_a_thread(_await_company)
        self._come_to_the_point()
        self._init()

    def in_all_reduce(self) -> None:
        with self._init() as comm:
            self._repeat(comm, lambda: comm.all_reduce(_SMALL))

    def in_big_all_reduce(self) -> None:
        array = np.ones(_BIG_ELEMENTS, np.float32)
        with self._init() as comm:
            self._repeat(comm, lambda: comm.all_reduce(array, "max"))

    def in_barrier(self) -> None:
        with self._init() as comm:
            self._repeat(comm, comm.barrier)

    def computing(self) -> None:
        """The culprit is in its own code, and the others wait for it in a collective."""
        with self._init() as comm:
            comm.all_reduce(_SMALL, "max")
            self._come_to_the_point()
            if self._is_culprit:
                self._strike_when_told()
            while True:
                comm.all_reduce(_SMALL, "max")

    def leaving(self) -> None:
        """Nothing fails: one all-reduce, then the end."""
        self._come_to_the_point()
        with self._init() as comm:
            comm.all_reduce(_SMALL)

    def _init(self) -> gs.Communicator:
        return _init_process_group(
            timeout_seconds=self._options.timeout, collective_timeout_seconds=self._options.collective_timeout
        )

    def _repeat(self, comm: gs.Communicator, collective: Callable[[], object]) -> None:
        comm.barrier()
        self._strike_from_a_thread()
        self._come_to_the_point()
        while True:
            collective()

    def _come_to_the_point(self) -> None:
        if self._options.children:
            _leave_children_of_every_kind()
        if self._options.stubborn:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        diary.note(diary.READY, **_facts())

    def _strike_from_a_thread(self, wait: Callable[[], None] = lambda: None) -> None:
        """Lets the fault happen beside the main thread, once that has had time to get into its wait."""
        if self._is_culprit:
            threading.Thread(target=self._strike_when_told, args=(wait,), daemon=True).start()

    def _strike_when_told(self, wait: Callable[[], None] = lambda: None) -> None:
        diary.await_go()
        wait()
        diary.note(diary.FAULT)
        FAULTS[self._options.fault]()


def _await_company() -> None:
    """Waits until all ranks but one are connected to the server, and a moment more for them to join."""
    port = int(os.environ["GRADSYNC_ADDRESS"].rpartition(":")[2])
    wanted = int(os.environ["WORLD_SIZE"]) - 1
    connections = 0
    while connections < wanted:
        time.sleep(_LOOK_SECONDS)
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        peers = [peer for _, _, peer, state, *_ in rows if state == _ESTABLISHED]
        connections = sum(int(peer.rpartition(":")[2], 16) == port for peer in peers)
    time.sleep(_JOINING_SECONDS)


def _facts() -> dict[str, str]:
    return {"address": os.environ.get("GRADSYNC_ADDRESS", "")}


def _leave_children_of_every_kind() -> None:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sh", "-c", "setsid sleep 1001 & sleep 1002 &"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pause()
        os._exit(0)


PHASES = {
    "before-init": Rank.before_init,
    "in-init": Rank.in_init,
    "all_reduce": Rank.in_all_reduce,
    "big-all_reduce": Rank.in_big_all_reduce,
    "barrier": Rank.in_barrier,
    "computing": Rank.computing,
    "leaving": Rank.leaving,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Play a rank's part in a scene of benchmarks/failure_detection.py.")
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--culprit", type=int, default=1, help="the rank that fails")
    parser.add_argument("--timeout", type=float, default=30.0)
    parser.add_argument("--collective-timeout", type=float, default=30.0)
    parser.add_argument("--children", action="store_true", help="start processes that nobody waits for")
    parser.add_argument("--stubborn", action="store_true", help="ignore requests to end")
    options = parser.parse_args()
    with diary.errors_noted():
        PHASES[options.phase](Rank(options))


if __name__ == "__main__":
    main()

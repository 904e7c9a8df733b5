"""Disconnects one of two machines, or kills its launcher, and measures how soon both sides report it.

    python benchmarks/network_partition.py                # writes benchmarks/results/network_partition.json
    python benchmarks/network_partition.py --rounds 1     # writes nothing

The machines are network namespaces on one bridge, each with one `gradsync run --nnodes 2` of one rank. A time is from
the fault to the launcher's report on standard error, which names the rank or the server that is gone. "link down": as
of a pulled cable; "DROP": as by a firewall, links stay up and the bridge no longer carries that machine's packets;
"SIGKILL": of the launcher, whose own side says nothing. "MPI": ranks of mpiexec, two on each machine; the time is to
the error of the side's first rank, which says why.
The exit code is 1 when a side named nobody, or something was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measurement import add_output, provenance, write_result

FOLDER = Path(__file__).parent
_TESTS = FOLDER.parent / "tests"
sys.path[:0] = [str(_TESTS / folder) for folder in (".", "launching", "prove/tools", "prove/partitions")]

import namespaces  # noqa: E402
from mpi_machines import MpiJob  # noqa: E402
from node_commands import Nodes  # noqa: E402

ROUNDS = 7
# 3 s by the heartbeats, and two of them across hosts.
TARGET_SECONDS = {"link down": 4.0, "DROP": 4.0, "SIGKILL": 0.5, "link down, MPI": 4.0, "DROP, MPI": 4.0}
NEVER_SECONDS = 30.0
FAULTS: dict[str, Callable[[Nodes, int], None]] = {
    "link down": lambda run, victim: run.machines[victim].take_link_down(),
    "DROP": lambda run, victim: run.machines[victim].drop_packets(),
    "SIGKILL": lambda run, victim: run.processes[victim].kill(),
}
MPI_FAULTS: dict[str, Callable[[namespaces.Machine], None]] = {
    "link down, MPI": lambda machine: machine.take_link_down(),
    "DROP, MPI": lambda machine: machine.drop_packets(),
}
NAMES = {0: "rank 1/2 .* (died|cannot be reached)", 1: "rendezvous server at .* (is gone|cannot be reached)"}
SAYS = {0: "acknowledges nothing", 1: "rendezvous server"}  # each side's name for the other


def reports(run: Nodes, sides: list[int], began: float) -> dict[int, float]:
    """Waits for the line of each side, and returns how long it took."""
    found: dict[int, float] = {}
    told = dict.fromkeys(sides, "")
    with selectors.DefaultSelector() as selector:
        for node in sides:
            selector.register(run.processes[node].stderr, selectors.EVENT_READ, node)
        while len(found) < len(sides):
            ready = selector.select(max(0.0, began + NEVER_SECONDS - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                text = os.read(key.fd, 65536).decode()
                told[key.data] += text
                if re.search(NAMES[key.data], told[key.data]):
                    found[key.data] = time.monotonic() - began
                if not text or key.data in found:
                    selector.unregister(key.fileobj)
    return found


def observe(fault: str, victim: int) -> tuple[dict[int, float], list[str]]:
    """Causes a fault once; returns when each side reported it, and the complaints."""
    sides = [1 - victim] if fault == "SIGKILL" else [0, 1]
    with tempfile.TemporaryDirectory() as folder, namespaces.machines(2) as machines:
        with Nodes(Path(folder), f"{machines[0].ipv4}:29400", 2, machines) as run:
            run.start_all("wait")
            for node in range(2):
                run.await_ids(node)
            time.sleep(1.0)  # until heartbeats are regular
            began = time.monotonic()
            FAULTS[fault](run, victim)
            found = reports(run, sides, began)
            for node in sides:
                run.processes[node].communicate(timeout=NEVER_SECONDS)
        wrong = [f"node {node} did not name the other" for node in sides if node not in found]
        return found, wrong + [f"left behind: {what}" for what in namespaces.left_behind(machines)]


def observe_mpi(fault: str) -> tuple[dict[int, float], list[str]]:
    """The same for ranks of an MPI job; the machine that does not host the rendezvous is cut off."""
    with tempfile.TemporaryDirectory() as folder, namespaces.machines(2) as machines:
        with contextlib.closing(MpiJob(machines, Path(folder))) as job:
            job.start(100_000)
            job.await_started()
            time.sleep(1.0)
            began = time.time()
            MPI_FAULTS[fault](machines[1])
            sides = {node: job.await_any_ended([2 * node, 2 * node + 1]) for node in range(2)}
            machines[1].rejoin()  # mpiexec ends what is left of its job
            job.end()
        found = {node: side["at"] - began for node, side in sides.items() if "at" in side}
        wrong = [f"node {node}: {side}" for node, side in sides.items() if SAYS[node] not in side.get("text", "")]
        return found, wrong + [f"left behind: {what}" for what in namespaces.left_behind(machines)]


def rows_of(fault: str, victim: int, rounds: int) -> list[dict[str, Any]]:
    """Causes a fault on one machine in each round; returns a row for each side that reports it."""
    times: dict[int, list[float]] = {}
    wrong: list[str] = []
    for _ in range(rounds):
        found, complaints = observe_mpi(fault) if fault in MPI_FAULTS else observe(fault, victim)
        wrong += complaints
        for node, seconds in found.items():
            times.setdefault(node, []).append(seconds)
    for complaint in wrong:
        print(f"{fault} of node {victim}: {complaint}")
    return [
        {
            "fault": fault,
            "victim": "hosts the rendezvous" if victim == 0 else "does not host it",
            "side": "cut off" if node == victim else "other",
            "median_seconds": statistics.median(samples),
            "worst_seconds": max(samples),
            "target_seconds": TARGET_SECONDS[fault],
            "samples": samples,
            "complaints": wrong,
        }
        for node, samples in sorted(times.items())
    ]


def main() -> int:
    """Measures all rows, prints them, and writes them unless the rounds are shortened."""
    parser = argparse.ArgumentParser(description="Measures how soon a machine that is cut off is told.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    add_output(parser, "network_partition")
    options = parser.parse_args()
    rounds: int = options.rounds
    why_not = namespaces.why_none()
    if why_not is not None:
        print(f"not measured: {why_not}")
        return 0
    where = provenance("benchmarks/network_partition.py")
    faults = [(fault, victim) for fault in FAULTS for victim in (0, 1)] + [(fault, 1) for fault in MPI_FAULTS]
    found = [line for fault, victim in faults for line in rows_of(fault, victim, rounds)]
    write_result("network_partition", options.output, {**where, "results": found}, is_whole=rounds >= ROUNDS)
    return int(any(line["complaints"] for line in found))


if __name__ == "__main__":
    sys.exit(main())

"""Ranks join, leave and join again while thousands of hostile connections come to the same server: nobody is harmed.

    python tests/prove/hostile/hostile.py --json benchmarks/results/proof_hostile.json   # 10,000 of them

The server runs in a process of its own, the strangers in another, 16 ranks with real clients in this one. They join
together, meet at a barrier, share a value and leave, as often as the attack lasts; before it they do so undisturbed.
The exit code is 1 when a rank was harmed, a stranger stayed, or the server has more descriptors or 16 MiB more memory;
that joins take longer than promised is only shown: a busy machine does that, too. A short form is a test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gradsync.rendezvous.client import RendezvousClient
from measurement import provenance

FOLDER = Path(__file__).parent
RANKS = 16
STRANGERS = 10_000
UNDISTURBED_ROUNDS = 20
TARGET_JOIN_SECONDS = 1.0
TARGET_MEMORY_BYTES = 16 * 2**20
_ROUND_SECONDS = 60.0
_SETTLED_WITHIN_SECONDS = 15.0
_AFTER_ATTACK_ROUNDS = 2


@dataclass(frozen=True)
class Server:
    """A server that runs in a process of its own."""

    pid: int
    address: str
    secret: bytes

    def descriptors(self) -> int:
        """Returns how many it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_bytes(self, name: str) -> int:
        """Returns a figure of /proc: "VmRSS", what it has, or "VmHWM", the most that it has had."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
        raise AssertionError(f"no {name} in /proc/{self.pid}/status")

    def forget_peak(self) -> None:
        """Lets VmHWM begin anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@dataclass
class Joins:
    """How long each rank took to join, from when all of a generation began; and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, float]:
        """Sums them up."""
        return {
            "count": len(self.seconds),
            "median_seconds": statistics.median(self.seconds),
            "p99_seconds": statistics.quantiles(self.seconds, n=100, method="inclusive")[98],
            "worst_seconds": max(self.seconds),
        }


@dataclass
class Result:
    """What an attack has done."""

    undisturbed: dict[str, float]
    under_attack: dict[str, float]
    strangers: dict[str, Any]
    memory_growth_bytes: int
    descriptors_before: int
    descriptors_after: int
    faults: list[str]

    @property
    def complaints(self) -> list[str]:
        """What may not be, on however busy a machine."""
        stayed = {kind: n - self.strangers["ended"].get(kind, 0) for kind, n in self.strangers["begun"].items()}
        found = [f"{number} strangers ({kind}) were not turned away" for kind, number in stayed.items() if number]
        if self.descriptors_after != self.descriptors_before:
            found.append(f"{self.descriptors_before} descriptors before, {self.descriptors_after} after")
        if self.memory_growth_bytes > TARGET_MEMORY_BYTES:
            found.append(f"{self.memory_growth_bytes / 2**20:.1f} MiB more memory")
        return self.faults + found


@contextlib.contextmanager
def serving(ranks: int) -> Iterator[Server]:
    """Runs a server for so many ranks."""
    secret = secrets.token_bytes(32)
    command = [sys.executable, "-m", "simulated_ranks.serve_gradsync", str(ranks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=BENCHMARKS) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(secret.hex() + "\n")
        process.stdin.flush()
        port = process.stdout.readline().strip()
        assert port, f"{command} ended without a port"
        yield Server(process.pid, f"127.0.0.1:{port}", secret)
        process.stdin.close()
        assert process.wait(30) == 0


def join_again_and_again(server: Server, ranks: int, goes_on: Callable[[int], bool]) -> Joins:
    """Lets all ranks join, work and leave, for as many rounds as `goes_on(number)` says."""
    joins = Joins()
    number = 0

    def next_round() -> None:
        nonlocal number, is_over
        number, is_over = number + 1, bool(joins.faults) or not goes_on(number)

    is_over = False
    together = threading.Barrier(ranks, action=next_round)

    def live(rank: int) -> None:
        while True:
            together.wait(_ROUND_SECONDS)
            if is_over:
                return
            try:
                joins.seconds.append(_one_life(server, rank, ranks))
            except Exception as error:
                joins.faults.append(f"rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return joins


def _one_life(server: Server, rank: int, ranks: int) -> float:
    """Joins, works and leaves; returns how long it took to join."""
    began = time.monotonic()
    with RendezvousClient.connect(
        server.address, secret=server.secret, rank=rank, world_size=ranks, timeout_seconds=_ROUND_SECONDS
    ) as client:
        joined = time.monotonic()
        client.set(f"from {rank}", bytes([rank]))
        client.barrier(timeout_seconds=_ROUND_SECONDS)
        neighbour = (rank + 1) % ranks
        assert client.get(f"from {neighbour}") == bytes([neighbour])
    return joined - began


def attack(strangers: int, ranks: int = RANKS, undisturbed_rounds: int = UNDISTURBED_ROUNDS) -> Result:
    """Lets so many strangers come to a server while ranks use it."""
    with serving(ranks) as server:
        undisturbed = join_again_and_again(server, ranks, lambda number: number < undisturbed_rounds)
        before = _settled_descriptors(server, None)
        server.forget_peak()
        memory = server.memory_bytes("VmRSS")
        command = [sys.executable, str(FOLDER / "hostile_connections.py"), *server.address.split(":"), str(strangers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hostile:
            disturbed = join_again_and_again(server, ranks, _while_it_runs(hostile))
            assert hostile.stdout is not None
            told = json.loads(hostile.stdout.read())
        return Result(
            undisturbed.as_json(),
            disturbed.as_json(),
            told,
            server.memory_bytes("VmHWM") - memory,
            before,
            _settled_descriptors(server, before),
            undisturbed.faults + disturbed.faults,
        )


def _while_it_runs(process: subprocess.Popen[str]) -> Callable[[int], bool]:
    """Lets ranks go on for as long as a process does, and for some rounds after it."""
    rounds_left = _AFTER_ATTACK_ROUNDS

    def goes_on(_number: int) -> bool:
        nonlocal rounds_left
        rounds_left -= process.poll() is not None
        return rounds_left >= 0

    return goes_on


def _settled_descriptors(server: Server, wanted: int | None) -> int:
    """Returns how many descriptors the server has, once it has no connections, or these do not end in time."""
    deadline = time.monotonic() + _SETTLED_WITHIN_SECONDS
    found, earlier = server.descriptors(), -1
    while time.monotonic() < deadline and (found != earlier if wanted is None else found != wanted):
        time.sleep(0.1)
        found, earlier = server.descriptors(), found
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=STRANGERS)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    made = provenance("tests/prove/hostile/hostile.py")
    result = attack(options.count, options.ranks)
    targets = {"join_p99_seconds": TARGET_JOIN_SECONDS, "memory_growth_bytes": TARGET_MEMORY_BYTES}
    settings = {"strangers": options.count, "ranks": options.ranks}
    summary = {"strangers": options.count, "joins": result.under_attack["count"], "complaints": len(result.complaints)}
    body = {**made, "settings": settings, "targets": targets, "summary": summary, "results": asdict(result)}
    print(json.dumps(body["results"], indent=2))
    for complaint in result.complaints:
        print(f"WRONG: {complaint}")
    if result.under_attack["p99_seconds"] > TARGET_JOIN_SECONDS:
        print(f"joins took longer than {TARGET_JOIN_SECONDS:g} s (99th percentile)")
    if options.json is not None:
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 1 if result.complaints else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures rendezvous servers with thousands of ranks: gradsync's and PyTorch's TCPStore, in one run.

    python benchmarks/beside_peers.py --install   # makes PyTorch's environment under benchmarks/.environments
    python benchmarks/rendezvous_scale.py       # writes benchmarks/results/rendezvous_scale.json
    python benchmarks/rendezvous_scale.py --quick

Each server runs in a process of its own. Its ranks are simulated by two processes with a connection for each rank, by
one event loop for all contenders: gradsync's ranks run the library's own handshake and MACs, TCPStore's speak its wire
format. A run goes through join (connect, prove, wait for all), id (rank 0 hands in 128 bytes, all others fetch them)
and barrier. Wall time includes the simulated ranks', which share the machine's cores with the server; the server's
processor time does not.
Contenders take turns, every second round backwards. The exit code is 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradsync.rendezvous.liveness import heartbeat_seconds
from measurement import Seconds, add_output, provenance, write_result
from peers import systems
from peers.contenders import TORCH
from simulated_ranks import run
from simulated_ranks.contenders import CONTENDERS, GRADSYNC, LEAVE, PHASES
from simulated_ranks.names import can_give_names
from simulated_ranks.run import LOAD_PROCESSES, Phase, Run

FOLDER = Path(__file__).parent
play = functools.partial(run.play, torch_python=str(systems.ENVIRONMENTS / TORCH / "bin" / "python"))
RANKS = (1024, 4096)
ROUNDS, QUICK_ROUNDS, WARM_UP = 5, 2, 1
BEAT_SECONDS, QUICK_BEAT_SECONDS = 20.0, 3.0
BEATING_ROUNDS = 2  # of gradsync's: they take long
PROMISED_RANKS, PROMISED_SECONDS, PROMISED_SHARE = 1024, 1.0, 0.05


def measure(present: Sequence[str], ranks: int, rounds: int, beat_seconds: float) -> dict[str, list[Run]]:
    """Returns the runs of each contender."""
    runs: dict[str, list[Run]] = {contender: [] for contender in present}
    for round_ in range(WARM_UP + rounds):
        beats = beat_seconds if WARM_UP <= round_ < WARM_UP + BEATING_ROUNDS else 0.0
        for contender in present[:: 1 if round_ % 2 else -1]:
            runs[contender].append(play(contender, ranks, beat_seconds=beats if contender == GRADSYNC else 0.0))
    return {contender: of_contender[WARM_UP:] for contender, of_contender in runs.items()}


def result(contender: str, ranks: int, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the statistics of one contender's runs at one size."""
    phases = [phase for phase in (*PHASES, LEAVE) if phase in runs[0].phases]
    beating = [run for run in runs if run.heartbeats]
    return {
        "contender": contender,
        "ranks": ranks,
        "phases": {phase: _times(runs, [phase]) for phase in phases},
        "together": _times(runs, PHASES),
        "memory_growth_bytes": Seconds.of([run.memory_growth_bytes for run in runs]).median,
        "lost_connections": max(run.lost_connections for run in runs),
        "heartbeats": {
            "interval_seconds": heartbeat_seconds(ranks),
            "share_of_a_core": asdict(_spread(beating, lambda r: r.heartbeat_cpu_seconds / r.heartbeat_seconds)),
            "server_cpu_seconds_each": asdict(_spread(beating, lambda r: r.heartbeat_cpu_seconds / r.heartbeats)),
        }
        if beating
        else None,
    }


def _times(runs: Sequence[Run], phases: Sequence[str]) -> dict[str, Any]:
    """Returns the distribution of each time, summed over the phases."""

    def total(time_of: Callable[[Phase], float]) -> dict[str, Any]:
        return asdict(_spread(runs, lambda run: sum(time_of(run.phases[phase]) for phase in phases)))

    return {
        "wall_seconds": total(lambda phase: phase.wall_seconds),
        "server_cpu_seconds": total(lambda phase: phase.server_cpu_seconds),
        "clients_cpu_seconds": total(lambda phase: phase.clients_cpu_seconds),
    }


def _spread(runs: Sequence[Run], value_of: Callable[[Run], float]) -> Seconds:
    return Seconds.of([value_of(run) for run in runs])


def promises(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns gradsync's promises, and whether they are kept."""
    [ours] = [r for r in results if (r["contender"], r["ranks"]) == (GRADSYNC, PROMISED_RANKS)]
    lost = sum(r["lost_connections"] for r in results if r["contender"] == GRADSYNC)
    found = [
        ("join, id and barrier: server's processor seconds", "server_cpu_seconds", PROMISED_SECONDS),
        ("join, id and barrier: wall seconds", "wall_seconds", PROMISED_SECONDS),
    ]
    kept = [
        {"what": what, "ranks": PROMISED_RANKS, "value": ours["together"][key]["median"], "limit": limit}
        for what, key, limit in found
    ]
    share = ours["heartbeats"]["share_of_a_core"]["median"]
    kept.append(
        {"what": "heartbeats: share of a core", "ranks": PROMISED_RANKS, "value": share, "limit": PROMISED_SHARE}
    )
    kept.append({"what": "connections lost", "ranks": max(r["ranks"] for r in results), "value": lost, "limit": 0})
    return [{**promise, "kept": promise["value"] <= promise["limit"]} for promise in kept]


def torch_version() -> str:
    """Returns the version of the PyTorch whose store is compared."""
    python = str(systems.ENVIRONMENTS / TORCH / "bin" / "python")
    source = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run([python, "-E", "-c", source], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure rendezvous servers under thousands of simulated ranks.")
    parser.add_argument("--quick", action="store_true", help="few rounds; writes only with --output")
    add_output(parser, "rendezvous_scale")
    return parser.parse_args()


def main() -> int:
    """Measures, shows and writes."""
    options = parse_options()
    made: dict[str, Any] = provenance("benchmarks/rendezvous_scale.py")
    present = CONTENDERS if systems.is_installed(TORCH) else (GRADSYNC,)
    if len(present) > 1:
        made["versions"]["torch"] = torch_version()
    made["method"] = {"load_processes": LOAD_PROCESSES, "loopback_is_named": can_give_names()}
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    beat_seconds = QUICK_BEAT_SECONDS if options.quick else BEAT_SECONDS
    results = []
    for ranks in RANKS:
        by_contender = measure(present, ranks, rounds, beat_seconds)
        results += [result(contender, ranks, runs) for contender, runs in by_contender.items()]
        made["results"], made["promises"] = results, promises(results)
        # After each size, because the larger one takes long.
        write_result("rendezvous_scale", options.output, made, is_whole=not options.quick)
    for promise in made["promises"]:
        kept = "kept" if promise["kept"] else "NOT KEPT"
        print(f"{promise['ranks']} ranks, {promise['what']}: {promise['value']:.3g} <= {promise['limit']:g}: {kept}")
    return int(not all(promise["kept"] for promise in made["promises"]))


if __name__ == "__main__":
    sys.exit(main())

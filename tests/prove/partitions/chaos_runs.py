"""Runs of `gradsync run` in which one rank's control connection goes through the chaos proxy, and what is wrong then.

A run may end in two ways only: with every sum right and no error, or with a typed error on every rank that names the
rank behind the proxy, in the time that was promised. Anything else is a complaint.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

from chaos_proxy import CORRUPT, DROP, DUPLICATE, Plan

from failures.diary import ERROR, FAULT, Note
from failures.observation import blamed_by_launcher
from failures.plans import text_of
from failures.points import SPAWN
from failures.runs import LAUNCHER
from failures.scene import Scene, SceneFailed
from gradsync.rendezvous.wire import MAX_FRAME_SECONDS

RANKS = 3
VICTIM = 1
FEW_STEPS = 300
_TOLD_SECONDS = 0.5
_HALF_OPEN_SECONDS = 4.0
# What comes may look like the beginning of a longer message, for which its reader waits: a limit, and a heartbeat.
_UNFINISHED_SECONDS = MAX_FRAME_SECONDS + 0.5
_LIMIT_SECONDS = {DROP: _HALF_OPEN_SECONDS, DUPLICATE: _UNFINISHED_SECONDS, CORRUPT: _UNFINISHED_SECONDS}
_BUSY_SECONDS = 2.0  # a machine on which other tests run
_BYTES_OF_MEETING = 900  # of either direction, from the first word to the first step


@dataclass(frozen=True)
class ProxiedRun:
    """How a run ended.

    Attributes:
        exit_code: the launcher's.
        errors: what ranks caught.
        told_seconds: from the incident to the last error; None where there was no error, or no incident.
        complaints: what was wrong.
    """

    exit_code: int | None
    errors: tuple[Note, ...]
    told_seconds: float | None
    complaints: tuple[str, ...]

    @property
    def is_unharmed(self) -> bool:
        return not self.errors and self.exit_code == 0


def run_through(plan: Plan, *, steps: int | None = FEW_STEPS, timeout: float = 20.0) -> ProxiedRun:
    """Runs a training with one rank behind the proxy.

    Args:
        plan: what the proxy does.
        steps: after which the training ends; None: only an error ends it.
        timeout: seconds for the ranks to meet.
    """
    options = ["--plan", text_of(plan), "--timeout", str(timeout)]
    options += [] if steps is None else ["--steps", str(steps)]
    command = ["-m", "gradsync", "run", "-n", str(RANKS), "--backend", "shm", "-m", "failures.in_phases"]
    with Scene() as scene:
        try:
            scene.start(LAUNCHER, [*command, SPAWN, "none", str(VICTIM), *options])
            scene.wait_for_end(LAUNCHER)
        except SceneFailed as failure:
            return ProxiedRun(None, tuple(scene.of(ERROR)), None, (str(failure),))
        _, left = scene.left_behind()
        return _judged(scene, plan, tuple(f"left {thing}" for thing in left))


def _judged(scene: Scene, plan: Plan, left: tuple[str, ...]) -> ProxiedRun:
    errors, incidents, code = tuple(scene.of(ERROR)), scene.of(FAULT), scene.exit_code(LAUNCHER)
    told = max(note.at for note in errors) - incidents[0].at if errors and incidents else None
    complaints = [*left, *(_complaint for note in errors for _complaint in _complaints_of(note))]
    if (code == 0) != (not errors):
        complaints.append(f"the launcher ended with {code}, and these ranks got an error: {[n.rank for n in errors]}")
    if errors and not incidents:
        complaints.append("an error without an incident")
    if errors and (blamed := blamed_by_launcher(scene)) != VICTIM:
        complaints.append(f"the launcher blames {blamed}:\n" + "\n".join(line.text for line in scene.lines[-12:]))
    kind = None if plan.incident is None else plan.incident.kind
    limit = _LIMIT_SECONDS.get(kind, _TOLD_SECONDS)
    if told is not None and told > limit + _BUSY_SECONDS:
        complaints.append(f"told after {told:.2f} s, at most {limit:g} s were promised")
    return ProxiedRun(code, errors, told, tuple(complaints))


def _complaints_of(note: Note) -> list[str]:
    facts, found = note.facts, []
    if not facts["is_typed"]:
        found.append(f"rank {note.rank} got {facts['type']}, which is not ours: {facts['text'][:300]}")
    if note.rank != VICTIM and facts["blamed"] != VICTIM:
        found.append(f"rank {note.rank} blames {facts['blamed']}: {facts['text'][:300]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs behind a proxy, with an incident that each seed draws.")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    faulty = 0
    for seed in range(options.first, options.first + options.seeds):
        plan = Plan.drawn(seed, most_bytes=_BYTES_OF_MEETING)
        run = run_through(plan)
        faulty += bool(run.complaints)
        told = "" if run.told_seconds is None else f", told after {run.told_seconds:.2f} s"
        outcome = "unharmed" if run.is_unharmed else f"{len(run.errors)} ranks got an error{told}"
        print(f"seed {seed}: {plan.incident}: {'; '.join(run.complaints) or outcome}", flush=True)
    print(f"{options.seeds} seeds, {faulty} with something wrong")
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(main())

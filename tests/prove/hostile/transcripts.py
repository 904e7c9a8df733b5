"""Sends mutated and replayed transcripts to both sides of the rendezvous' protocol: none may be accepted.

    python tests/prove/hostile/transcripts.py --count 1000000 --json benchmarks/results/proof_transcripts.json

A side counts as deceived when a frame that is not the next genuine frame of its session completed the handshake or
came out of `Session.open`: when what it has accepted is no beginning of what its peer has really sent. Any other error
than the protocol's own counts too. A short form is a test, which also sends them to protocols that were weakened on
purpose, and must find every one of those deceived.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from mutations import ATTACKS, Attack, scene_of
from recorded_sessions import record_runs

from measurement import provenance

_TRIALS_PER_RECORDING = 500


@dataclass
class Tally:
    """What became of the transcripts that were mutated in one way.

    Attributes:
        sent: how many.
        deceived: how many were accepted.
        errors: how the others ended, by error; "nothing accepted" where a side still waits for bytes.
    """

    sent: int = 0
    deceived: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def is_deceived(attack: Attack) -> tuple[bool, str]:
    """Sends an attack; returns whether more was accepted than the peer had sent, and how it ended."""
    try:
        accepted_bytes, error = attack.victim.take(attack.stream)
    except Exception as error:  # no error of the protocol: it would end the server
        return True, f"untyped: {type(error).__name__}"
    ending = "waits for more" if error is None else type(error).__name__
    return attack.stream[:accepted_bytes] != attack.genuine[:accepted_bytes], ending


def run(count: int, seed: int) -> dict[str, Tally]:
    """Sends so many mutated transcripts, of every kind in turn, and returns what became of them.

    Raises:
        AssertionError: a genuine transcript was not accepted to its end: the others would prove nothing.
    """
    rng = random.Random(seed)
    tallies = {name: Tally() for name in ATTACKS}
    runs = []
    for number in range(count):
        if number % _TRIALS_PER_RECORDING == 0:
            runs = record_runs(rng)
            _check_genuine(runs)
        name = list(ATTACKS)[number % len(ATTACKS)]
        attack = ATTACKS[name](scene_of(rng, runs))
        while attack.stream == attack.genuine:  # the mutation has changed nothing
            attack = ATTACKS[name](scene_of(rng, runs))
        deceived, ending = is_deceived(attack)
        tallies[name].sent += 1
        tallies[name].deceived += deceived
        tallies[name].errors[ending] += 1
    return tallies


def _check_genuine(runs: list[Any]) -> None:
    for session in runs:
        for direction in (session.to_server, session.to_client):
            stream = b"".join(direction.frames)
            assert direction.receiver.take(stream) == (len(stream), None)


def as_json(tallies: dict[str, Tally], seed: int, seconds: float) -> dict[str, Any]:
    """Returns the whole result, with where it comes from."""
    rows = [
        {"mutation": name, "sent": tally.sent, "accepted": tally.deceived, "ended_as": dict(tally.errors)}
        for name, tally in tallies.items()
    ]
    count = sum(tally.sent for tally in tallies.values())
    summary = {"sent": count, "accepted": sum(tally.deceived for tally in tallies.values())}
    made = provenance("tests/prove/hostile/transcripts.py")
    settings = {"count": count, "seed": seed}
    return {**made, "settings": settings, "seconds": seconds, "summary": summary, "results": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    began = time.monotonic()
    tallies = run(options.count, options.seed)
    seconds = time.monotonic() - began
    for name, tally in tallies.items():
        print(f"{name:32s} {tally.sent:8d} sent, {tally.deceived} accepted  {dict(tally.errors)}")
    deceived = sum(tally.deceived for tally in tallies.values())
    print(f"seed {options.seed}: {options.count} transcripts in {seconds:.0f} s, {deceived} accepted")
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(tallies, options.seed, seconds), indent=2) + "\n")
    return 1 if deceived else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs every proof in full, one after the other, and sums them up: `make prove` (about three hours on two cores).

    python tests/prove.py                # writes benchmarks/results/proof_*.json and fault_matrix.json
    python tests/prove.py --quick        # the same proofs, each much shortened; writes nothing (5 minutes)
    python tests/prove.py --only kills matrix

Each proof is a command of its own, which fails when it finds something; so does this one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLE_WIDTH = 150  # of a log, where no terminal tells its own
_TOLD_LINES = 30  # of the output of a proof that fails
_LONGEST_HEADLINE = 90


@dataclass(frozen=True)
class Proof:
    """One of them.

    Attributes:
        name: short, for the command line.
        what: is proven.
        command: after the interpreter.
        quick: what takes the place of the options with --quick.
        result: the name of its JSON, where it writes one.
    """

    name: str
    what: str
    command: tuple[str, ...]
    quick: tuple[str, ...]
    result: str | None = None

    def arguments(self, *, is_quick: bool, folder: Path) -> list[str]:
        """Gives its command line, with its result in a folder."""
        options = self.quick if is_quick else self.command[1:]
        output = [] if self.result is None else ["--json", str(folder / f"{self.result}.json")]
        return [sys.executable, self.command[0], *options, *output]


PROOFS = (
    Proof(
        "model",
        "the core, all interleavings of three ranks",
        ("tests/proof/model_check.py",),
        ("--quick",),
        "proof_model_check",
    ),
    Proof(
        "simulation",
        "server and clients, seeds",
        ("tests/proof/simulation_run.py", "--seeds", "100000"),
        ("--seeds", "200"),
        "proof_simulation",
    ),
    Proof(
        "transcripts",
        "mutated and replayed transcripts",
        ("tests/proof/transcripts.py", "--count", "1000000"),
        ("--count", "5000"),
        "proof_transcripts",
    ),
    Proof(
        "hostile",
        "hostile connections beside a joining run",
        ("tests/proof/hostile.py",),
        ("--count", "500"),
        "proof_hostile",
    ),
    Proof(
        "fuzz",
        "parsers of bytes and texts from outside",
        ("tests/fuzz/run.py", "all", "--seconds", "60"),
        ("all", "--seconds", "1"),
    ),
    Proof(
        "differential",
        "same bits and same errors as the first edition",
        ("tests/differential.py", "--programs", "1000"),
        ("--programs", "20"),
    ),
    Proof("matrix", "fault x phase x victim", ("benchmarks/fault_matrix.py",), ("--quick",), "fault_matrix"),
    Proof(
        "proxy",
        "a network that delays, breaks, repeats and loses",
        ("tests/proof/chaos_runs.py", "--seeds", "200"),
        ("--seeds", "5"),
    ),
    Proof(
        "kills",
        "random kills leave nothing behind",
        ("tests/chaos.py", "--rounds", "1000", "--at-a-time", "2"),
        ("--rounds", "8"),
        "proof_kills",
    ),
    Proof(
        "restarts",
        "kills and restarts end with the same bits",
        ("tests/restart_soak.py", "--kills", "300"),
        ("--kills", "6"),
        "proof_restarts",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a proof ended."""

    proof: Proof
    exit_code: int
    seconds: float
    headline: str


def run(proof: Proof, *, is_quick: bool, folder: Path, console: Console) -> Outcome:
    """Runs one proof to its end; shows the end of its output where it fails."""
    began = time.monotonic()
    arguments = proof.arguments(is_quick=is_quick, folder=folder)
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0:
        console.print("\n".join(lines[-_TOLD_LINES:]), markup=False, highlight=False, soft_wrap=True)
    headline = headline_of(folder / f"{proof.result}.json") if proof.result else (lines or [""])[-1]
    return Outcome(proof, done.returncode, time.monotonic() - began, headline[:_LONGEST_HEADLINE])


def headline_of(path: Path) -> str:
    """Gives the figures with which a result sums itself up, in "summary" or at its top; "" where there are none."""
    if not path.exists():
        return ""
    body: dict[str, Any] = json.loads(path.read_text())
    figures = body.get("summary", body)
    return ", ".join(
        f"{name.replace('_', ' ')} {value:,}" for name, value in figures.items() if isinstance(value, (int, float))
    )


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Gives a line for each proof."""
    table = Table(title="Proofs")
    table.add_column("proof", no_wrap=True)
    table.add_column("of", no_wrap=True)
    table.add_column("holds", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("found")
    for outcome in outcomes:
        verdict = "yes" if outcome.exit_code == 0 else f"[red]NO ({outcome.exit_code})[/red]"
        proof = outcome.proof
        table.add_row(proof.name, proof.what, verdict, f"{outcome.seconds:.0f}", outcome.headline)
    return table


def chosen(names: Sequence[str]) -> list[Proof]:
    """Gives the proofs of these names; all where none is given."""
    return [proof for proof in PROOFS if not names or proof.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs every proof in full, and sums them up.")
    parser.add_argument("--quick", action="store_true", help="each much shortened; writes nothing")
    parser.add_argument("--only", nargs="+", default=[], choices=[proof.name for proof in PROOFS], metavar="PROOF")
    options = parser.parse_args()
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.quick else RESULTS
        for proof in chosen(options.only):
            console.print(f"{proof.name}: {proof.what} ...", highlight=False)
            outcomes.append(run(proof, is_quick=options.quick, folder=folder, console=console))
    console.print(table_of(outcomes))
    return int(any(outcome.exit_code != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

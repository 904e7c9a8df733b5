"""Measures this checkout against another one, in turns, on two ranks over shared memory.

    python benchmarks/two_checkouts.py --old ../acad6487 --output results.json
    python benchmarks/two_checkouts.py --old ../acad6487 --only "10,000 gradients of 100"
    python benchmarks/two_checkouts.py --old ../acad6487 --quick  # few rounds, to see that it runs

Each block starts three pairs of ranks: two of the other checkout, one of this. (The place of its memory makes
a process faster than another by several per cent, for its whole life.) A block has some turns, in which each pair times
some rounds while the others sleep, in an order that changes. A round counts with its slowest rank, a block with its
quickest round: other programs can only add time. A case's ratio is the median over the blocks, with a 95 % interval
from resampling them (bootstrap). The ratio of the other checkout to itself, from the same blocks, shows the noise.

Even two folders of one commit may differ by a fifth where arrays are new in each step: their paths shift the memory of
a process. Before you believe such a ratio, make a second folder of the other commit, and compare with that one too.

A case is "kept" where its interval lies below the limit, "broken" where it lies above, "open" where it has the limit in
it. It is "not measured" where the interval of the checkout against itself does not include 1, or is further from 1 than
the limit.
The exit code is 1 when a case is broken, 2 when a rank failed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from measurement import Seconds, busy_machine, provenance, slowest_rank, write_result
from models import gpt2_small, resnet50
from peers.crew import Crew, CrewFailed, Start

BLOCKS, TURNS, QUICK_BLOCKS, SEED = 15, 2, 2, 5
RANKS = 2
OLD, AGAIN, NEW = "old", "old again", "new"
_HERE = Path(__file__).resolve().parent
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """A timed operation, in float32.

    Attributes:
        name: in tables and results.
        kind: "gradients" (the same arrays in each step), "new gradients" (new arrays in each step), "bucket views",
            "clipped gradients" (with nonfinite="raise" and clip_norm), or a collective.
        shapes: of the arrays, in the order in which they are handed over.
        limit: the largest allowed ratio new / old.
        rounds: of a turn.
        calls: repetitions in a round.
        warm_up: rounds of a turn that are thrown away first.
    """

    name: str
    kind: str
    shapes: list[tuple[int, ...]]
    limit: float
    rounds: int
    calls: int = 1
    warm_up: int = 1


CASES = [
    Case("ResNet-50", "gradients", resnet50()[::-1], 1.03, rounds=5),
    Case("ResNet-50, new arrays", "new gradients", resnet50()[::-1], 1.03, rounds=5),
    Case("ResNet-50, bucket views", "bucket views", resnet50()[::-1], 1.03, rounds=5),
    Case("ResNet-50, checked and clipped", "clipped gradients", resnet50()[::-1], 1.03, rounds=3),
    Case("GPT-2 small", "gradients", gpt2_small()[::-1], 1.03, rounds=2),
    Case("10,000 gradients of 100", "gradients", [(100,)] * 10_000, 1.03, rounds=5),
    Case("10,000 gradients of 100, new arrays", "new gradients", [(100,)] * 10_000, 1.03, rounds=3),
    Case("all_reduce 4 KB", "all_reduce", [(1024,)], 1.03, rounds=10, calls=100),
    *(
        Case(f"{kind} {size}", kind, [shape], 1.03, rounds=10, calls=calls)
        for size, shape, calls in (("64 KB", (2, 8192), 50), ("256 KB", (2, 32768), 20), ("1 MB", (2, 131_072), 10))
        for kind in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
    ),
    Case("all_reduce 4 MB", "all_reduce", [(1024, 1024)], 1.03, rounds=10, calls=4),
    Case("all_reduce 16 MB", "all_reduce", [(4096, 1024)], 1.03, rounds=8, calls=2),
]


@dataclass(frozen=True)
class Ratio:
    """The ratio of two times: the median over the blocks, and its 95 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, more: list[list[float]], less: list[list[float]]) -> Ratio:
        """Compares the rounds of two, block by block."""
        ratios = np.array([min(of_more) / min(of_less) for of_more, of_less in zip(more, less, strict=True)])
        chosen = np.random.default_rng(0).integers(len(ratios), size=(10_000, len(ratios)))
        low, high = np.quantile(np.median(ratios[chosen], axis=1), [0.025, 0.975])
        return cls(float(np.median(ratios)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def verdict_of(ratio: Ratio, control: Ratio, limit: float) -> str:
    """Returns "kept", "broken", "open" or "not measured"; see above."""
    noise_limit = max(limit, 1 / limit)
    if not control.low <= 1 <= control.high or max(control.high, 1 / control.low) > noise_limit:
        return "not measured"
    if ratio.high < limit:
        return "kept"
    return "broken" if ratio.low > limit else "open"


def started(name: str, checkout: Path, folder: str) -> Crew:
    """Starts a pair of ranks of a checkout.

    Raises:
        CrewFailed: the ranks did not start, or import another gradsync.
    """
    source = (checkout / "src").resolve()

    def starts(address: str) -> list[Start]:
        command = [
            sys.executable,
            "-m",
            "gradsync",
            "run",
            "-n",
            str(RANKS),
            str(_HERE / "two_checkouts_rank.py"),
            address,
        ]
        return [Start(command, {**_THREADS, "PYTHONPATH": str(source)})]

    crew = Crew(name.replace(" ", "-"), folder, starts, RANKS)
    if not Path(crew.versions["gradsync"]).is_relative_to(source):
        with crew:
            raise CrewFailed(f"{name}: the ranks import {crew.versions['gradsync']}, and not what is in {source}", [])
    return crew


def time_block(case: Case, crews: dict[str, Crew], turns: int, order: random.Random) -> dict[str, list[float]]:
    """Returns the seconds of each round of a block, by crew."""
    seconds: dict[str, list[float]] = {name: [] for name in crews}
    for crew in crews.values():
        crew.ask("prepare", case.kind, case.shapes)
    for _ in range(turns):
        for name in order.sample(list(crews), len(crews)):
            seconds[name] += slowest_rank(crews[name].ask("time", case.warm_up, case.rounds, case.calls))
    for crew in crews.values():
        crew.ask("release")
    return seconds


def measure(
    cases: list[Case], checkouts: dict[str, Path], blocks: int, turns: int
) -> list[dict[str, list[list[float]]]]:
    """Returns the seconds of each round of each case, by crew and block.

    Raises:
        CrewFailed: a rank did not start, or failed.
    """
    order = random.Random(SEED)
    seconds: list[dict[str, list[list[float]]]] = [{name: [] for name in checkouts} for _ in cases]
    for _ in range(blocks):
        with tempfile.TemporaryDirectory(prefix="two-checkouts-") as folder, ExitStack() as stack:
            crews = {name: stack.enter_context(started(name, path, folder)) for name, path in checkouts.items()}
            for case, of_case in zip(cases, seconds, strict=True):
                for name, of_block in time_block(case, crews, turns, order).items():
                    of_case[name].append(of_block)
    return seconds


def row_of(case: Case, seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Returns the results of a case."""
    ratio, control = Ratio.of(seconds[NEW], seconds[OLD]), Ratio.of(seconds[AGAIN], seconds[OLD])
    pooled = {name: [one for block in blocks for one in block] for name, blocks in seconds.items()}
    return {
        "case": case.name,
        "limit": case.limit,
        "new_to_old": asdict(ratio),
        "old_to_old": asdict(control),
        "verdict": verdict_of(ratio, control, case.limit),
        "step_seconds": {name: asdict(Seconds.of(samples)) for name, samples in pooled.items()},
        "block_minima_seconds": {name: [min(block) for block in blocks] for name, blocks in seconds.items()},
    }


def commit_of(checkout: Path) -> str:
    """Returns the commit of a checkout, with "+" where files differ from it."""
    told = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
        told.append(done.stdout.strip() if done.returncode == 0 else "unknown")
    return told[0] + ("+" if told[1] else "")


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Returns a line for each case."""
    table = Table("case", "old", "new / old (95 %)", "old / old (95 %)", "limit", "verdict")
    for row in rows:
        old = f"{1e3 * row['step_seconds'][OLD]['median']:.3g} ms"
        ratios = [str(Ratio(**row[name])) for name in ("new_to_old", "old_to_old")]
        table.add_row(row["case"], old, *ratios, str(row["limit"]), row["verdict"])
    return table


def main(arguments: list[str] | None = None) -> int:
    """Measures, shows and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="the other checkout")
    parser.add_argument("--new", type=Path, default=_HERE.parent, help="default: the one that this script is in")
    parser.add_argument("--output", type=Path, help="where the JSON goes; none: nowhere")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help="some cases")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"default: {BLOCKS}")
    parser.add_argument("--quick", action="store_true", help="two short blocks")
    options = parser.parse_args(arguments)
    origin = provenance("benchmarks/two_checkouts.py") | {
        "command": "python benchmarks/two_checkouts.py --old OLD --output RESULTS"
    }
    if busy := busy_machine():
        print(busy, file=sys.stderr)
    blocks, turns = (QUICK_BLOCKS, 1) if options.quick else (options.blocks, TURNS)
    cases = [case for case in CASES if options.only is None or case.name in options.only]
    checkouts = {OLD: options.old, AGAIN: options.old, NEW: options.new}
    try:
        measured = measure(cases, checkouts, blocks, turns)
        rows = [row_of(case, seconds) for case, seconds in zip(cases, measured, strict=True)]
    except CrewFailed as error:
        print(f"two_checkouts: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.width = max(console.width, 120)  # of a log, without a terminal
    console.print(table_of(rows))
    commits = {name: commit_of(path) for name, path in {OLD: options.old, NEW: options.new}.items()}
    settings = {"ranks": RANKS, "blocks": blocks, "turns_a_block": turns, "seed": SEED, "threads": _THREADS}
    result = {**origin, "commits": commits, "settings": settings, "rows": rows}
    write_result("two_checkouts", options.output, result, is_whole=False)
    return int(any(row["verdict"] == "broken" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

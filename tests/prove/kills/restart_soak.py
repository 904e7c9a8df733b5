"""Kills and stops ranks of a training again and again, which starts again each time: its result stays the same bits.

    python tests/prove/kills/restart_soak.py --kills 200 --json benchmarks/results/proof_restarts.json

Each run is `gradsync run --max-restarts` on restart_training.py beside it, with checkpoints in a directory. A
random rank gets SIGKILL or SIGSTOP at a random moment of each start, be it while the ranks boot, meet, train or write
a checkpoint, so and so many times; then the training comes to its end. Its final weights, momentum and number of
epochs must be those of a run that nothing disturbed, bit for bit, and nothing may be left behind. Run by `make prove`;
a short form is a test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from chaos import GUARD, addresses_in, command_line, end_all

from failures import leftovers
from measurement import provenance
from process_table import parent_of

RANKS = 3
EPOCHS = 80  # about a second of training: most starts are struck in it
KILLS_OF_ONE_RUN = 10
MARK = "GRADSYNC_TEST_RESTART_SOAK"
_SCRIPT = Path(__file__).with_name("restart_training.py")
_LONGEST_MOMENT_SECONDS = 1.2
_STOPPED_SHARE = 0.2  # each costs seconds, until the heartbeats tell
_ENDS_WITHIN_SECONDS = 60.0
_LOOK_SECONDS = 0.01


@dataclass
class Disturbed:
    """A run that was disturbed.

    Attributes:
        struck: the signals that hit ranks.
        faults: what was wrong afterwards.
        seconds: how long it took.
    """

    struck: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Run:
    """A training under `gradsync run`. None of its processes is left when the context ends."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self._folder = folder
        self._epochs = epochs
        self._mark = f"{os.getpid()}-{folder.name}"

    def __enter__(self) -> Run:
        state, scratch = self._folder / "state", self._folder / "scratch"
        state.mkdir()
        scratch.mkdir()
        with (self._folder / "output").open("w") as output:
            options = ["-n", str(RANKS), "--grace", "1", "--max-restarts", "1000000"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradsync", "run", *options, str(_SCRIPT), str(state), str(self._epochs)],
                env=os.environ | {MARK: self._mark, "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self.process, MARK, self._mark)

    def ranks(self) -> set[int]:
        """Gives the processes that are ranks now: a guard's only children here."""
        found = set()
        for pid in leftovers.marked_processes(MARK, self._mark):
            with contextlib.suppress(OSError):  # it has ended
                if command_line(parent_of(pid)).startswith(GUARD):
                    found.add(pid)
        return found

    def final_state(self) -> dict[str, bytes]:
        with np.load(self._folder / "state" / "checkpoint.npz") as saved:
            return {name: saved[name].tobytes() for name in saved.files}

    def left_behind(self) -> list[str]:
        """Names what is there after its end."""
        _, left = leftovers.await_end(MARK, self._mark, 1.0)
        found = [leftovers.describe_process(pid) for pid in left]
        found += leftovers.open_ports(addresses_in((self._folder / "output").read_text()))
        return found + [path.name for path in (self._folder / "scratch").iterdir()]


def undisturbed(epochs: int) -> dict[str, bytes]:
    """Gives the state that a training ends with when nothing happens."""
    with tempfile.TemporaryDirectory(prefix="gradsync-restarts-") as folder, Run(Path(folder), epochs) as run:
        code = run.process.wait(_ENDS_WITHIN_SECONDS)
        if code != 0:
            raise RuntimeError(f"the undisturbed training ended with {code}: {(Path(folder) / 'output').read_text()}")
        return run.final_state()


def disturbed(generator: random.Random, kills: int, epochs: int, want: dict[str, bytes]) -> Disturbed:
    """Strikes at most so many times, lets the training end, and looks at what it has come to."""
    began, result = time.monotonic(), Disturbed()
    with tempfile.TemporaryDirectory(prefix="gradsync-restarts-") as folder, Run(Path(folder), epochs) as run:
        struck: set[int] = set()
        for _ in range(kills):
            time.sleep(generator.uniform(0.0, _LONGEST_MOMENT_SECONDS))  # the moment is what is random
            if not _strike(run, generator, struck, result):
                break
        try:
            code = run.process.wait(_ENDS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            result.faults.append("it hangs")
        else:
            result.faults += [f"it ended with {code}"] if code else _differences(run.final_state(), want)
            result.faults += [f"left {what}" for what in run.left_behind()]
        if result.faults:
            result.faults.append((Path(folder) / "output").read_text()[-2000:])
    result.seconds = time.monotonic() - began
    return result


def _strike(run: Run, generator: random.Random, struck: set[int], result: Disturbed) -> bool:
    """Hits a rank that runs, of a start that has not been hit; returns whether the training still went on."""
    deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
    while time.monotonic() < deadline and run.process.poll() is None:
        ranks = sorted(run.ranks())
        if ranks and not struck.intersection(ranks):
            number = signal.SIGSTOP if generator.random() < _STOPPED_SHARE else signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):  # done with its work
                os.kill(generator.choice(ranks), number)
                result.struck.append(number.name)
            struck.update(ranks)
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _differences(got: dict[str, bytes], want: dict[str, bytes]) -> list[str]:
    return [f"{name} differs from the undisturbed run's" for name in want if got.get(name) != want[name]]


def soak(kills: int, seed: int, epochs: int = EPOCHS) -> list[Disturbed]:
    """Disturbs one run after the other until so many signals have hit."""
    want = undisturbed(epochs)
    generator = random.Random(seed)
    runs: list[Disturbed] = []
    while (left := kills - sum(len(run.struck) for run in runs)) > 0:
        runs.append(disturbed(generator, min(left, KILLS_OF_ONE_RUN), epochs, want))
        verdict = "; ".join(runs[-1].faults) or "the same bits, nothing left"
        print(f"run {len(runs)}: struck {len(runs[-1].struck)} times, {runs[-1].seconds:.1f} s: {verdict}", flush=True)
    return runs


def summary_of(runs: Sequence[Disturbed]) -> dict[str, object]:
    struck = Counter(name for run in runs for name in run.struck)
    faulty = [run.faults for run in runs if run.faults]
    return {"runs": len(runs), "struck": dict(struck), "faulty_runs": len(faulty), "faults": faulty}


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills and restarts; the training must end with the same bits.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    made = provenance("tests/prove/kills/restart_soak.py")
    runs = soak(options.kills, options.seed)
    summary = summary_of(runs)
    print(f"seed {options.seed}: {summary['struck']} in {len(runs)} runs; {summary['faulty_runs']} runs were wrong")
    if options.json is not None:
        body = {**made, "seed": options.seed, "ranks": RANKS, "epochs": EPOCHS, "summary": summary}
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    return int(bool(summary["faulty_runs"]))


if __name__ == "__main__":
    sys.exit(main())

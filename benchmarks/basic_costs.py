"""Measures imports, the start of a run, steps of known models, and the flight recorder, with two ranks.

    python benchmarks/basic_costs.py            # writes benchmarks/results/basic_costs.json
    python benchmarks/basic_costs.py --quick    # fewer rounds, writes nothing

Contenders take turns, round by round, so that a change of the machine's speed affects all of them. A round counts with
the time of its slowest rank; a contender counts with the median of its rounds. The exit code is 1 when a promise is
not kept.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import gradsync as gs
from gradsync.communicators.agreement import agreement_on
from gradsync.diagnostics.recorder import FlightRecorder
from measurement import Seconds, add_output, provenance, slowest_rank, write_result
from models import MODELS, element_count

FOLDER = Path(__file__).parent
RANKS = 2
_ENTRIES = 10_000


@dataclass(frozen=True)
class Row:
    """One measurement, its baseline, and the promised ratio."""

    what: str
    detail: str
    seconds: Seconds
    baseline: str = ""
    baseline_seconds: Seconds | None = None
    must_ratio: float | None = None
    must_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.baseline_seconds and self.seconds.median / self.baseline_seconds.median

    @property
    def kept(self) -> bool | None:
        """Whether the promise is kept; None without a promise."""
        if self.must_seconds is not None:
            return self.seconds.median < self.must_seconds
        if self.must_ratio is not None and self.ratio is not None:
            return self.ratio <= self.must_ratio
        return None


# -- Synchronising gradients ---------------------------------------------------------------------------------


def synchronisation(rounds: int, warm_up: int) -> list[Row]:
    """Times a step's gradients through AllreduceCallback, and a plain copy of them, on both ranks at once."""
    rows = []
    for model, shapes in MODELS.items():
        by_rank = gs.launch(functools.partial(time_gradients, model, rounds, warm_up), nprocs=RANKS)
        count, mebibytes = len(shapes()), 4 * element_count(shapes()) / 2**20
        rows.append(
            Row(
                f"synchronise {model}",
                f"{count} float32 gradients of {mebibytes:.0f} MiB through AllreduceCallback, default settings",
                Seconds.of(slowest_rank([times["synchronise"] for times in by_rank])),
                "local copy",
                Seconds.of(slowest_rank([times["copy"] for times in by_rank])),
                must_ratio=2.0 if model == "ResNet-50" else None,
            )
        )
    return rows


def time_gradients(model: str, rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Runs on each rank. Returns the seconds of each round by contender."""
    with gs.init_process_group() as comm:
        # A backward pass produces gradients last first. Filling them, and the copies, touches every page.
        gradients = [np.full(shape, comm.rank, np.float32) for shape in reversed(MODELS[model]())]
        copies = [np.full_like(gradient, -1) for gradient in gradients]
        callback = gs.AllreduceCallback("mean")

        def synchronise() -> None:
            with callback.backward():
                futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
            for future in futures:
                future.result()

        def copy() -> None:
            for source, destination in zip(gradients, copies, strict=True):
                np.copyto(destination, source)

        times = take_turns({"synchronise": synchronise, "copy": copy}, rounds, warm_up, comm.barrier)
        mean = (comm.world_size - 1) / 2
        if not all((array == mean).all() for array in (*gradients, *copies)):
            raise RuntimeError(f"rank {comm.rank}: the gradients of {model} are not the mean {mean} of all ranks")
        return times


def take_turns(
    contenders: dict[str, Callable[[], object]], rounds: int, warm_up: int, together: Callable[[], None]
) -> dict[str, list[float]]:
    """Times the contenders in turn; every second round backwards, so that none always follows the same one.

    Args:
        contenders: name -> the operation to time.
        rounds: how many timings of each to return.
        warm_up: how many timings to throw away before them.
        together: called before each timing, so that the ranks begin at once.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(warm_up + rounds):
        for name in list(contenders)[:: 1 if round_ % 2 else -1]:
            together()
            began = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - began)
    return {name: samples[warm_up:] for name, samples in times.items()}


# -- Starting ------------------------------------------------------------------------------------------------


def start_up(rounds: int, warm_up: int) -> list[Row]:
    """Times `gradsync run` from before its process exists to the return of the first all-reduce on every rank."""
    command = [*gradsync_command(), "run", "--no-prefix", "-n", str(RANKS), str(FOLDER / "first_all_reduce.py")]
    samples = []
    for _ in range(warm_up + rounds):
        began = time.monotonic()
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        moments = [float(line) for line in run.stdout.split()]
        if len(moments) != RANKS:
            raise RuntimeError(f"expected a moment from each of {RANKS} ranks, got {run.stdout!r}")
        samples.append(max(moments) - began)
    detail = f"`gradsync run -n {RANKS}` from before its process exists to the first all-reduce of every rank"
    return [Row(f"gradsync run -n {RANKS}, first all-reduce", detail, Seconds.of(samples[warm_up:]), must_seconds=0.5)]


def gradsync_command() -> list[str]:
    """Returns this interpreter's installed command, or the module if only the sources are there."""
    installed = Path(sys.executable).with_name("gradsync")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "gradsync"]


def imports(rounds: int, warm_up: int) -> list[Row]:
    """Times imports in fresh processes."""
    sources = {
        "python": "pass",
        "numpy": "import numpy",
        "gradsync": "import gradsync",
        "names": "from gradsync import AllreduceCallback, bcast_list_, init_process_group",
    }
    contenders = {
        name: lambda source=source: subprocess.run([sys.executable, "-c", source], check=True)
        for name, source in sources.items()
    }
    times = take_turns(contenders, rounds, warm_up, lambda: None)
    seconds = {name: Seconds.of(samples) for name, samples in times.items()}
    ours = "import gradsync", "in a fresh process", seconds["gradsync"]
    return [
        Row(*ours, "import numpy", seconds["numpy"], must_ratio=1.3),
        Row(*ours, "bare python", seconds["python"]),
        Row("import the names in own_loop.py", sources["names"], seconds["names"], "import numpy", seconds["numpy"]),
    ]


# -- The flight recorder ----------------------------------------------------------------------------------------


def recorder(rounds: int, warm_up: int) -> list[Row]:
    """Times what the flight recorder adds to each collective."""
    own, agreement = FlightRecorder("world"), agreement_on("all_reduce", (1000,), np.dtype(np.float32), "mean")
    samples = []
    for _ in range(warm_up + rounds):
        began = time.perf_counter()
        for _ in range(_ENTRIES):
            own.begin(agreement)
            own.end(False)
        samples.append((time.perf_counter() - began) / _ENTRIES)
    detail = f"begun and ended, the mean of {_ENTRIES} in a row, the loop included"
    return [Row("an entry of the flight recorder", detail, Seconds.of(samples[warm_up:]), must_seconds=1e-6)]


# -- The report ----------------------------------------------------------------------------------------------


def table_of(rows: list[Row]) -> Table:
    table = Table(title="First light: medians of the slowest rank")
    table.add_column("what")
    table.add_column("time", justify="right")
    table.add_column("against")
    for heading in ("time", "ratio", "must"):
        table.add_column(heading, justify="right")
    table.add_column("ok")
    for row in rows:
        must = f"<= {row.must_ratio}" if row.must_ratio else f"< {row.must_seconds} s" if row.must_seconds else ""
        table.add_row(
            row.what,
            str(row.seconds),
            row.baseline,
            str(row.baseline_seconds or ""),
            f"{row.ratio:.2f}" if row.ratio else "",
            must,
            {None: "", True: "yes", False: "[red]NO[/red]"}[row.kept],
        )
    return table


def as_dictionary(rows: list[Row], made: dict[str, Any], settings: dict[str, int]) -> dict[str, Any]:
    results = [{**asdict(row), "ratio": row.ratio, "kept": row.kept} for row in rows]
    return {**made, "settings": settings, "results": results}


# -- Busy cores ----------------------------------------------------------------------------------------------


def busy_cores(rounds: int, warm_up: int) -> list[Row]:
    """Times an all-reduce with idle cores and with one busy process for each core, in alternating blocks."""
    times: dict[int, dict[str, list[float]]] = {4 * 2**10: {}, 10 * 2**20: {}}
    for _ in range(3):
        for state, hogs in (("idle", 0), ("busy", len(os.sched_getaffinity(0)))):
            processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(hogs)]
            try:
                by_rank = gs.launch(functools.partial(time_all_reduces, tuple(times), rounds, warm_up), nprocs=RANKS)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            for size_bytes, samples in times.items():
                samples.setdefault(state, []).extend(slowest_rank([of_rank[size_bytes] for of_rank in by_rank]))
    return [
        Row(
            f"all_reduce of {size_bytes // 2**10} KiB, busy cores",
            "float32, one busy process for each core beside the ranks",
            Seconds.of(samples["busy"]),
            "idle cores",
            Seconds.of(samples["idle"]),
            must_ratio=10.0 if size_bytes > 2**20 else None,
        )
        for size_bytes, samples in times.items()
    ]


def time_all_reduces(sizes_bytes: tuple[int, ...], rounds: int, warm_up: int) -> dict[int, list[float]]:
    """Runs on each rank. Returns the seconds of each round by size."""
    with gs.init_process_group() as comm:
        times = {}
        for size_bytes in sizes_bytes:
            array = np.ones(size_bytes // 4, np.float32)
            contender = {"all_reduce": lambda array=array: comm.all_reduce(array, "mean")}
            times[size_bytes] = take_turns(contender, rounds, warm_up, comm.barrier)["all_reduce"]
        return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what gradsync promises of its first version.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes only with --output")
    parser.add_argument(
        "--only", choices=("imports", "start-up", "gradients", "busy", "recorder"), help="one part; writes likewise"
    )
    add_output(parser, "basic_costs")
    options = parser.parse_args()
    settings = {"ranks": RANKS, "gradient_rounds": 31, "start_up_rounds": 11, "import_rounds": 21, "warm_up": 3}
    if options.quick:
        settings |= {"gradient_rounds": 7, "start_up_rounds": 5, "import_rounds": 5, "warm_up": 1}
    made = provenance("benchmarks/basic_costs.py")
    parts = {
        "imports": (imports, settings["import_rounds"]),
        "start-up": (start_up, settings["start_up_rounds"]),
        "gradients": (synchronisation, settings["gradient_rounds"]),
        "busy": (busy_cores, settings["gradient_rounds"]),
        "recorder": (recorder, settings["gradient_rounds"]),
    }
    rows = [
        row
        for name, (measure, rounds) in parts.items()
        if options.only in (None, name)
        for row in measure(rounds, settings["warm_up"])
    ]
    Console().print(table_of(rows))
    whole = not options.quick and options.only is None
    write_result("basic_costs", options.output, as_dictionary(rows, made, settings), is_whole=whole)
    return 1 if any(row.kept is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

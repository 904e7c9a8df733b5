"""`gradsync bench thresholds`, from its options to what it prints and writes. Mistakes are told before it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradsync.bench.gradients import gradients_of, total_bytes
from gradsync.bench.measurement import provenance
from gradsync.bench.outputs import check_outputs, write_json
from gradsync.bench.text import megabytes
from gradsync.bench.threshold_plot import plot
from gradsync.bench.threshold_report import bar_chart, notes, recommendation, table
from gradsync.bench.threshold_sweep import Measured, Sweep, run_sweep
from gradsync.bench.thresholds import (
    DEFAULT_MEGABYTES,
    Row,
    as_dictionary,
    parse_megabytes,
    plan_sweep,
    recommend,
    rows_of,
)
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RankFailed
from gradsync.launching.launcher import launcher
from gradsync.visible_devices import count_gpus

_RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class ThresholdOptions:
    """The options of the command, as its help explains them."""

    model: str
    nprocs: int | None = None
    backend: str = "auto"
    thresholds: str | None = None
    steps: int = 20
    limit_seconds: float = 45.0
    json_path: str | None = None
    plot_path: str | None = None

    def __post_init__(self) -> None:
        if self.backend == "local" and self.ranks != 1:
            raise InvalidArgument(f"backend 'local' is for one rank, got -n {self.ranks}")
        if self.backend == "nccl" and count_gpus() == 0:
            raise BackendUnavailable("backend 'nccl' cannot run here: no GPU is visible; use 'shm' on one host")
        check_outputs(self.json_path, self.plot_path)

    @property
    def ranks(self) -> int:
        """How many to start."""
        if self.nprocs is not None:
            return self.nprocs
        if self.backend == "local":
            return 1
        return (count_gpus() if self.backend != "shm" else 0) or _RANKS_WITHOUT_GPU


def bench_thresholds(options: ThresholdOptions) -> None:
    """Measures, prints and writes what the options ask for.

    Raises:
        InvalidArgument, BackendUnavailable: before anything runs.
        RankFailed: a rank failed; nothing is written.
    """
    made = provenance(["gradsync", *sys.argv[1:]])
    specs = gradients_of(options.model)
    print(f"{_title(options.model)}: {len(specs)} gradients, {megabytes(total_bytes(specs))}", flush=True)
    thresholds = parse_megabytes(DEFAULT_MEGABYTES if options.thresholds is None else options.thresholds)
    sweep = Sweep(specs, plan_sweep(specs, thresholds), options.steps, options.limit_seconds)
    measured = _measure(options, sweep)
    rows = rows_of(sweep.contenders, measured.timings, total_bytes=sweep.total_bytes, ranks=options.ranks)
    _report(options, measured, rows)
    settings = {**asdict(options), "gradients": len(specs), "total_bytes": total_bytes(specs), "ranks": options.ranks}
    settings |= {"rounds": measured.rounds, "measured_backend": measured.backend, "device": measured.device}
    result = {
        "settings": settings,
        "rows": [as_dictionary(row) for row in rows],
        "recommended_threshold_bytes": recommend(rows).contender.threshold_bytes,
    }
    write_json(options.json_path, made, result)


def _measure(options: ThresholdOptions, sweep: Sweep) -> Measured:
    try:
        by_rank: list[Measured] = launcher(run_sweep, n_gpus=options.ranks, backend=options.backend)(sweep)
    except RankFailed as error:
        # The command tells errors on one line, which a traceback is not made for.
        print(error.traceback_text, file=sys.stderr)
        raise GradsyncError(str(error).partition("\n")[0]) from None
    return by_rank[0]


def _report(options: ThresholdOptions, measured: Measured, rows: Sequence[Row]) -> None:
    place = "" if measured.device == "cpu" else f" on {measured.device} and its like"
    rounds = f"{measured.rounds} steps each"
    if measured.rounds < options.steps:
        rounds += f" of {options.steps}, for --time-limit {options.limit_seconds:g} s was reached"
    ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
    print(f"{ranks} over {measured.backend}{place}; medians of the slowest rank, {rounds}\n")
    print("\n\n".join(filter(None, (table(rows), notes(rows), bar_chart(rows), recommendation(rows)))))
    if options.plot_path is not None:
        plot(rows, f"{_title(options.model)}: {ranks} over {measured.backend}", options.plot_path)
        print(f"drawn in {options.plot_path}")


def _title(model: str) -> str:
    return Path(model).name

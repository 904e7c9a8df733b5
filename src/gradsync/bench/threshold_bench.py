"""`gradsync bench thresholds`, from its options to what it prints and writes. Mistakes are told before it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradsync.bench.gradients import gradients_of, total_bytes
from gradsync.bench.measurement import provenance
from gradsync.bench.outputs import check_outputs, write_json
from gradsync.bench.prediction import Prediction, describe, link_of, predict
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
from gradsync.bucketing.plan import GradientSpec
from gradsync.cost_model import Link
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RankFailed
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
    gpus: int | None = None
    backward_ms: float | None = None
    latency_us: float | None = None
    bandwidth_gbs: float | None = None

    def __post_init__(self) -> None:
        for_prediction = (self.backward_ms, self.latency_us, self.bandwidth_gbs)
        if self.gpus is None and any(value is not None for value in for_prediction):
            raise InvalidArgument("--backward-ms, --latency-us and --bandwidth-gbs are for --predict GPUS")
        if self.gpus is not None and self.backward_ms is None:
            raise InvalidArgument("--predict needs --backward-ms: how long the backward pass takes")
        if self.backend == "local" and self.ranks != 1:
            raise InvalidArgument(f"backend 'local' is for one rank, got -n {self.ranks}")
        if self.backend == "nccl" and count_gpus() == 0:
            raise BackendUnavailable("backend 'nccl' cannot run here: no GPU is visible; use 'shm' on one host")
        if self.measures and self.gpus is not None and self.ranks == 1:
            raise InvalidArgument(
                "--predict measures on two ranks or more: use -n 2, or give --latency-us and --bandwidth-gbs"
            )
        if not self.measures and self.plot_path is not None:
            raise InvalidArgument(
                "--plot draws what was measured, and with --latency-us and --bandwidth-gbs nothing is"
            )
        check_outputs(self.json_path, self.plot_path)

    @property
    def ranks(self) -> int:
        """How many to start."""
        if self.nprocs is not None:
            return self.nprocs
        if self.backend == "local":
            return 1
        return (count_gpus() if self.backend != "shm" else 0) or _RANKS_WITHOUT_GPU

    @property
    def measures(self) -> bool:
        """Whether anything is run."""
        return self.gpus is None or self.latency_us is None or self.bandwidth_gbs is None


def bench_thresholds(options: ThresholdOptions) -> None:
    """Measures, prints and writes what the options ask for.

    Raises:
        InvalidArgument, BackendUnavailable: before anything runs.
        RankFailed: a rank failed; nothing is written.
    """
    made = provenance(["gradsync", *sys.argv[1:]])
    specs = gradients_of(options.model)
    print(f"{_title(options.model)}: {len(specs)} gradients, {megabytes(total_bytes(specs))}", flush=True)
    rows: list[Row] = []
    settings = {**asdict(options), "gradients": len(specs), "total_bytes": total_bytes(specs), "ranks": options.ranks}
    if options.measures:
        sweep = _planned(options, specs)
        measured = _measure(options, sweep)
        settings |= {"rounds": measured.rounds, "measured_backend": measured.backend, "device": measured.device}
        rows = rows_of(sweep.contenders, measured.timings, total_bytes=sweep.total_bytes, ranks=options.ranks)
        _report(options, measured, rows)
    prediction = _prediction(options, total_bytes(specs), rows)
    if prediction is not None:
        print(describe(prediction))
    write_json(options.json_path, made, _result(settings, rows, prediction))


def _planned(options: ThresholdOptions, specs: Sequence[GradientSpec]) -> Sweep:
    contenders = plan_sweep(
        specs, parse_megabytes(DEFAULT_MEGABYTES if options.thresholds is None else options.thresholds)
    )
    if options.gpus is not None and len({contender.all_reduces for contender in contenders}) < 2:
        raise InvalidArgument(
            "--predict needs --thresholds that make different numbers of buckets to measure latency and bandwidth by, "
            "or --latency-us and --bandwidth-gbs"
        )
    return Sweep(specs, contenders, options.steps, options.limit_seconds)


def _measure(options: ThresholdOptions, sweep: Sweep) -> Measured:
    from gradsync.launching.launcher import launcher  # here: a prediction alone starts nothing

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


def _prediction(options: ThresholdOptions, size_bytes: int, rows: Sequence[Row]) -> Prediction | None:
    if options.gpus is None or options.backward_ms is None:
        return None
    link, origin = Link(0.0, 0.0), "given"
    if options.measures:
        link = link_of(rows, size_bytes, options.ranks)
        origin = f"measured on {options.ranks} ranks here, which says little of a network between machines"
    if options.latency_us is not None:
        link = replace(link, latency_seconds=1e-6 * options.latency_us)
    if options.bandwidth_gbs is not None:
        link = replace(link, seconds_per_byte=1e-9 / options.bandwidth_gbs)
    return predict(size_bytes, options.gpus, 1e-3 * options.backward_ms, link, origin)


def _result(settings: dict[str, Any], rows: Sequence[Row], prediction: Prediction | None) -> dict[str, Any]:
    return {
        "settings": settings,
        "rows": [as_dictionary(row) for row in rows],
        "recommended_threshold_bytes": recommend(rows).contender.threshold_bytes if rows else None,
        "prediction": prediction and asdict(prediction),
    }


def _title(model: str) -> str:
    return Path(model).name

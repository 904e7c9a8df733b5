"""`gradsync bench thresholds`, from its options to what it prints and writes. Mistakes are told before it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from gradsync.machine import count_gpus

_RANKS_WITHOUT_GPU = 2


def bench_thresholds(
    *,
    model: str,
    nprocs: int | None,
    backend: str,
    thresholds: str | None,
    steps: int,
    limit_seconds: float,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Measures, prints and writes what the options ask for, which are those of the command.

    Raises:
        InvalidArgument, BackendUnavailable: before anything runs.
        RankFailed: a rank failed; nothing is written.
    """
    settings = dict(locals())
    ranks = _count_ranks(nprocs, backend)
    if backend == "local" and ranks != 1:
        raise InvalidArgument(f"backend 'local' is for one rank, got -n {ranks}")
    if backend == "nccl" and count_gpus() == 0:
        raise BackendUnavailable("backend 'nccl' cannot run here: no GPU is visible; use 'shm' on one host")
    check_outputs(json_path, plot_path)
    made = provenance(["gradsync", *sys.argv[1:]])
    specs = gradients_of(model)
    print(f"{Path(model).name}: {len(specs)} gradients, {megabytes(total_bytes(specs))}", flush=True)
    contenders = plan_sweep(specs, parse_megabytes(DEFAULT_MEGABYTES if thresholds is None else thresholds))
    sweep = Sweep(specs, contenders, steps, limit_seconds)
    measured = _measure(sweep, ranks, backend)
    rows = rows_of(contenders, measured.timings, total_bytes=sweep.total_bytes, ranks=ranks)
    where = f"{'1 rank' if ranks == 1 else f'{ranks} ranks'} over {measured.backend}"
    _report(where, sweep, measured, rows)
    if plot_path is not None:
        plot(rows, f"{Path(model).name}: {where}", plot_path)
        print(f"drawn in {plot_path}")
    settings |= {"gradients": len(specs), "total_bytes": sweep.total_bytes, "ranks": ranks}
    settings |= {"rounds": measured.rounds, "measured_backend": measured.backend, "device": measured.device}
    result = {
        "settings": settings,
        "rows": [as_dictionary(row) for row in rows],
        "recommended_threshold_bytes": recommend(rows).contender.threshold_bytes,
    }
    write_json(json_path, made, result)


def _count_ranks(nprocs: int | None, backend: str) -> int:
    """Returns how many ranks to start."""
    if nprocs is not None:
        return nprocs
    if backend == "local":
        return 1
    return (count_gpus() if backend != "shm" else 0) or _RANKS_WITHOUT_GPU


def _measure(sweep: Sweep, ranks: int, backend: str) -> Measured:
    try:
        by_rank: list[Measured] = launcher(run_sweep, n_gpus=ranks, backend=backend)(sweep)
    except RankFailed as error:
        # The command tells errors on one line, which a traceback is not made for.
        print(error.traceback_text, file=sys.stderr)
        raise GradsyncError(str(error).partition("\n")[0]) from None
    return by_rank[0]


def _report(where: str, sweep: Sweep, measured: Measured, rows: Sequence[Row]) -> None:
    place = "" if measured.device == "cpu" else f" on {measured.device} and its like"
    rounds = f"{measured.rounds} steps each"
    if measured.rounds < sweep.steps:
        rounds += f" of {sweep.steps}, for --time-limit {sweep.limit_seconds:g} s was reached"
    print(f"{where}{place}; medians of the slowest rank, {rounds}\n")
    print("\n\n".join(filter(None, (table(rows), notes(rows), bar_chart(rows), recommendation(rows)))))

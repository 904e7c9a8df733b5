"""`gradsync bench collectives`, from its options to what it prints and writes. Mistakes are told before it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence

from gradsync.bench.collectives.cases import Case, parse_dtype, parse_size, plan_cases, sizes_between
from gradsync.bench.collectives.kinds import kinds_of
from gradsync.bench.collectives.measuring import measure, start
from gradsync.bench.collectives.picture import plot
from gradsync.bench.collectives.report import average_bus_gigabytes, chart, heading, line_of, refusals
from gradsync.bench.collectives.rows import Row, as_dictionary, wrong_in_all
from gradsync.bench.crew import Crew, CrewFailed
from gradsync.bench.live_text import LiveText
from gradsync.bench.measurement import busy_machine, provenance
from gradsync.bench.outputs import check_outputs, write_json
from gradsync.bench.rank_starts import find_mpiexec
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument
from gradsync.machine import count_gpus, usable_cores
from gradsync.reduction import ReduceOp, check_operation, dtype_of

_RANKS_WITHOUT_GPU = 2


def bench_collectives(
    *,
    collectives: str,
    nprocs: int | None,
    backend: str,
    begin: str,
    end: str,
    factor: float,
    iterations: int,
    warm_up: int,
    blocks: int,
    op: str,
    dtype: str,
    checks: bool,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Measures, prints and writes what the options ask for, which are those of the command.

    Raises:
        InvalidArgument, BackendUnavailable: before anything runs.
        GradsyncError: a rank failed, or results are wrong.
    """
    settings = dict(locals())
    ranks = _count_ranks(nprocs, backend)
    _check(ranks, backend, op, dtype)
    check_outputs(json_path, plot_path)
    kinds = kinds_of(collectives)
    template = Case("", 0, parse_dtype(dtype), ReduceOp.parse(op).value, ranks, iterations, warm_up, checks)
    itemsize = dtype_of(template.dtype).itemsize
    if any(kind.reduces for kind in kinds):
        check_operation(ReduceOp.parse(op), dtype_of(template.dtype))
    sizes = sizes_between(parse_size(begin), parse_size(end), factor)
    cases = [plan_cases(kind, sizes, itemsize, template) for kind in kinds]
    made = provenance(["gradsync", *sys.argv[1:]])
    ranks_text = "1 rank" if ranks == 1 else f"{ranks} ranks"
    with (
        _told_in_full(),
        tempfile.TemporaryDirectory(prefix="gradsync-bench-") as folder,
        start(_resolved(backend), folder, ranks) as crew,
    ):
        settings |= {"ranks": ranks, "backends": {crew.system: crew.ask("backend")[0]}}
        made["versions"]["systems"] = {crew.system: crew.versions}
        print(f"# {crew.system}: {ranks_text} on this machine, {usable_cores()} cores")
        print(
            f"# a time is that of the slowest rank: the median of {blocks} blocks of {iterations} calls, "
            f"after {warm_up} to warm up"
        )
        if busy := busy_machine():
            print(f"# {busy}")
        rows = _measure_all(cases, itemsize, crew, blocks)
    _sum_up(rows)
    if plot_path is not None:
        operator = f", {op}" if any(kind.reduces for kind in kinds) else ""
        what = f"{ranks_text} on one machine, {template.dtype}{operator}"
        plot(rows, f"{what}; the faster of out-of-place and in-place; bars are quartiles", plot_path)
        print(f"drawn in {plot_path}")
    write_json(json_path, made, {"settings": settings, "rows": [as_dictionary(row) for row in rows]})
    if wrong := wrong_in_all(rows):
        raise GradsyncError(f"{wrong} elements are wrong: see the lines where #wrong is not 0")


def _resolved(backend: str) -> str:
    """Returns what carries the bytes, where "auto" leaves it open."""
    return ("nccl" if count_gpus() > 1 else "shm") if backend == "auto" else backend


def _count_ranks(nprocs: int | None, backend: str) -> int:
    """Returns how many ranks to start."""
    if nprocs is not None:
        return nprocs
    if backend == "local":
        return 1
    return count_gpus() if _resolved(backend) == "nccl" else _RANKS_WITHOUT_GPU


def _check(ranks: int, backend: str, op: str, dtype: str) -> None:
    """Refuses what cannot run.

    Raises:
        InvalidArgument, BackendUnavailable: the text says why.
    """
    ReduceOp.parse(op)
    if parse_dtype(dtype) == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
        raise InvalidArgument("NumPy knows bfloat16 with: pip install ml_dtypes")
    if backend == "local" and ranks != 1:
        raise InvalidArgument(f"backend 'local' is for one rank, got -p {ranks}")
    if backend == "nccl" and count_gpus() == 0:
        raise BackendUnavailable("backend 'nccl' cannot run here: no GPU is visible; use 'shm' on one host")
    if backend == "mpi" and find_mpiexec() is None:
        raise BackendUnavailable("backend 'mpi' needs mpiexec on the PATH: pip install mpi4py mpich")


@contextlib.contextmanager
def _told_in_full() -> Iterator[None]:
    """The command tells errors on one line, which a rank's traceback is not made for."""
    try:
        yield
    except CrewFailed as error:
        print(error, file=sys.stderr)
        raise GradsyncError(error.summary) from None


def _measure_all(cases: Sequence[Sequence[Case]], itemsize: int, crew: Crew, blocks: int) -> list[Row]:
    live = LiveText(sys.stderr)
    rows: list[Row] = []
    for of_collective in cases:
        print(f"#\n# {of_collective[0].collective}\n{heading()}", flush=True)
        mine: list[Row] = []
        for case in of_collective:
            live.show(f"{chart(mine)}\n{case.collective}: {case.count:,} elements ...".lstrip())
            mine.append(measure(case, itemsize, crew, blocks))
            live.clear()
            print(line_of(mine[-1]), flush=True)
        print(f"\n{chart(mine)}\n")
        rows += mine
    return rows


def _sum_up(rows: Sequence[Row]) -> None:
    for line in refusals(rows):
        print(f"# {line}")
    print(f"# Out of bounds values : {wrong_in_all(rows)} {'FAILED' if wrong_in_all(rows) else 'OK'}")
    if (gigabytes := average_bus_gigabytes(rows)) is not None:
        print(f"# Avg bus bandwidth    : {gigabytes:.4g} GB/s, {rows[0].contender}")

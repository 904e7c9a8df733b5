"""`gradsync bench collectives`, from its options to what it prints and writes. Mistakes are told before it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from gradsync.bench.collectives.cases import Case, parse_dtype, parse_size, plan_cases, sizes_between
from gradsync.bench.collectives.kinds import Kind, kinds_of
from gradsync.bench.collectives.measuring import measure, start
from gradsync.bench.collectives.picture import plot
from gradsync.bench.collectives.report import average_bus_gigabytes, chart, heading, line_of, refusals
from gradsync.bench.collectives.rows import Row, as_dictionary, wrong_in_all
from gradsync.bench.crew import Crew, CrewFailed
from gradsync.bench.live_text import LiveText
from gradsync.bench.measurement import busy_machine, provenance
from gradsync.bench.outputs import check_outputs, write_json
from gradsync.bench.rank_starts import find_mpiexec
from gradsync.cores import usable_cores
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument
from gradsync.reduction import ReduceOp, check_operation, dtype_of
from gradsync.visible_devices import count_gpus

_RANKS_WITHOUT_GPU = 2


@dataclass(frozen=True)
class CollectiveOptions:
    """The options of the command, as its help explains them."""

    collectives: str = "all_reduce"
    nprocs: int | None = None
    backend: str = "auto"
    begin: str = "1K"
    end: str = "32M"
    factor: float = 4.0
    iterations: int = 20
    warm_up: int = 5
    blocks: int = 3
    op: str = "sum"
    dtype: str = "float"
    checks: bool = True
    json_path: str | None = None
    plot_path: str | None = None

    @property
    def resolved_backend(self) -> str:
        """What carries gradsync's bytes, where "auto" leaves it open."""
        return ("nccl" if count_gpus() > 1 else "shm") if self.backend == "auto" else self.backend

    @property
    def ranks(self) -> int:
        """How many to start."""
        if self.nprocs is not None:
            return self.nprocs
        if self.backend == "local":
            return 1
        return count_gpus() if self.resolved_backend == "nccl" else _RANKS_WITHOUT_GPU

    def check(self) -> None:
        """Refuses what cannot run.

        Raises:
            InvalidArgument, BackendUnavailable: the text says why.
        """
        ReduceOp.parse(self.op)
        if parse_dtype(self.dtype) == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
            raise InvalidArgument("NumPy knows bfloat16 with: pip install ml_dtypes")
        if self.backend == "local" and self.ranks != 1:
            raise InvalidArgument(f"backend 'local' is for one rank, got -p {self.ranks}")
        if self.backend == "nccl" and count_gpus() == 0:
            raise BackendUnavailable("backend 'nccl' cannot run here: no GPU is visible; use 'shm' on one host")
        if self.backend == "mpi" and find_mpiexec() is None:
            raise BackendUnavailable("backend 'mpi' needs mpiexec on the PATH: pip install mpi4py mpich")
        check_outputs(self.json_path, self.plot_path)


def bench_collectives(options: CollectiveOptions) -> None:
    """Measures, prints and writes what the options ask for.

    Raises:
        InvalidArgument, BackendUnavailable: before anything runs.
        GradsyncError: a rank failed, or results are wrong.
    """
    options.check()
    kinds = kinds_of(options.collectives)
    cases = _cases(options, kinds)
    made = provenance(["gradsync", *sys.argv[1:]])
    with (
        _told_in_full(),
        tempfile.TemporaryDirectory(prefix="gradsync-bench-") as folder,
        start(options.resolved_backend, folder, options.ranks) as crew,
    ):
        backends = {crew.system: crew.ask("backend")[0]}
        made["versions"]["systems"] = {crew.system: crew.versions}
        _introduce(options, crew.system)
        rows = _measure_all(options, cases, crew)
    _sum_up(rows)
    if options.plot_path is not None:
        plot(rows, _title(options), options.plot_path)
        print(f"drawn in {options.plot_path}")
    settings = {**asdict(options), "ranks": options.ranks, "backends": backends}
    write_json(options.json_path, made, {"settings": settings, "rows": [as_dictionary(row) for row in rows]})
    if wrong := wrong_in_all(rows):
        raise GradsyncError(f"{wrong} elements are wrong: see the lines where #wrong is not 0")


@contextlib.contextmanager
def _told_in_full() -> Iterator[None]:
    """The command tells errors on one line, which a rank's traceback is not made for."""
    try:
        yield
    except CrewFailed as error:
        print(error, file=sys.stderr)
        raise GradsyncError(error.summary) from None


def _cases(options: CollectiveOptions, kinds: Sequence[Kind]) -> list[list[Case]]:
    """Returns the cases, collective by collective."""
    dtype = parse_dtype(options.dtype)
    if any(kind.reduces for kind in kinds):
        check_operation(ReduceOp.parse(options.op), dtype_of(dtype))
    sizes = sizes_between(parse_size(options.begin), parse_size(options.end), options.factor)
    op = ReduceOp.parse(options.op).value
    template = Case("", 0, dtype, op, options.ranks, options.iterations, options.warm_up, options.checks)
    return [plan_cases(kind, sizes, dtype_of(dtype).itemsize, template) for kind in kinds]


def _introduce(options: CollectiveOptions, name: str) -> None:
    print(f"# {name}: {_ranks_text(options)} on this machine, {usable_cores()} cores")
    print(
        f"# a time is that of the slowest rank: the median of {options.blocks} blocks of {options.iterations} calls, "
        f"after {options.warm_up} to warm up"
    )
    if busy := busy_machine():
        print(f"# {busy}")


def _measure_all(options: CollectiveOptions, cases: Sequence[Sequence[Case]], crew: Crew) -> list[Row]:
    live = LiveText(sys.stderr)
    itemsize = dtype_of(parse_dtype(options.dtype)).itemsize
    rows: list[Row] = []
    for of_collective in cases:
        print(f"#\n# {of_collective[0].collective}\n{heading()}", flush=True)
        mine: list[Row] = []
        for case in of_collective:
            live.show(f"{chart(mine)}\n{case.collective}: {case.count:,} elements ...".lstrip())
            mine.append(measure(case, itemsize, crew, options.blocks))
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


def _title(options: CollectiveOptions) -> str:
    operator = f", {options.op}" if any(kind.reduces for kind in kinds_of(options.collectives)) else ""
    what = f"{_ranks_text(options)} on one machine, {parse_dtype(options.dtype)}{operator}"
    return f"{what}; the faster of out-of-place and in-place; bars are quartiles"


def _ranks_text(options: CollectiveOptions) -> str:
    return "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"

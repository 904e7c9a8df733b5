"""`gradsync bench collectives`: measures collectives over a range of sizes.

Every rank runs this program. Either gradsync, mpiexec, srun or torchrun starts the ranks. Rank 0 prints the tables. The
meaning of a size, the in-place layouts of arrays and the factors for the bus bandwidth are the same as in nccl-tests.
So the results of both programs can be compared. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md, and the functions
*GetCollByteCount and *GetBw of src/*.cu.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.table import Table

from gradsync.bench.program import array_module, count_ranks, run_as_ranks
from gradsync.bench.report import (
    Panel,
    Seconds,
    busy_machine,
    check_outputs,
    plot,
    print_table,
    provenance,
    write_json,
)
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import group_or_world
from gradsync.diagnostics import seconds_text
from gradsync.errors import GradsyncError, InvalidArgument, size_text
from gradsync.machine import usable_cores
from gradsync.reduction import ReduceOp, check_operation, dtype_of

Array = npt.NDArray[Any]

ROOT = 0

ALL_REDUCE, REDUCE, REDUCE_SCATTER = "all_reduce", "reduce", "reduce_scatter"
BROADCAST, ALL_GATHER, GATHER, SCATTER = "broadcast", "all_gather", "gather", "scatter"
ALL_TO_ALL, EXCHANGE = "all_to_all", "exchange"

#: The two ways to run a collective. Variables called `form` hold one of these names.
SEPARATE, IN_PLACE = FORMS = "out-of-place", "in-place"

#: The names of dtypes that --dtype accepts (the names of nccl-tests and of NumPy), each with NumPy's name of the dtype.
DTYPES = {
    **{name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")},
    **{"half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16"},
    **{name: name for name in ("float16", "float32", "float64", "int16", "uint16")},
}
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_MOST_SIZES = 100
_BLOCKS = 3  # the reported time is the median over the blocks of timed calls
_WARM_UP = 5  # the largest number of untimed calls before the first block of timed calls
_LARGEST_SIZE = 1024**5


# Collectives and sizes.


@dataclass(frozen=True)
class Kind:
    """The description of one collective, such as all_reduce.

    Attributes:
        name: the name of the communicator's method.
        reduces: whether the collective takes a reduction operator.
        source_parts, target_parts: the number of parts in a rank's source array and in its target array: "1", or "n"
            for one part per rank.
        bus_ring: whether (n - 1) / n of the bytes cross each link, for n ranks; if False, all bytes cross each link.
        bus_passes: the number of times that the bytes cross each link: 2 for all_reduce, 1 for the other collectives.
        has_separate_target: whether the collective can run out of place.
        has_in_place: whether the collective can run in place.
    """

    name: str
    reduces: bool = False
    source_parts: str = "1"
    target_parts: str = "1"
    bus_ring: bool = False
    bus_passes: int = 1
    has_separate_target: bool = True
    has_in_place: bool = True

    @property
    def has_part_per_rank(self) -> bool:
        """Whether the larger of source and target consists of one part per rank."""
        return "n" in (self.source_parts, self.target_parts)

    def bus_factor(self, ranks: int) -> float:
        """Returns the bus bandwidth divided by the algorithm bandwidth, as nccl-tests defines both."""
        return self.bus_passes * ((ranks - 1) / ranks if self.bus_ring else 1.0)

    def count(self, size_bytes: int, itemsize: int, ranks: int) -> int:
        """Returns the number of elements in one part of the arrays, at least 1."""
        return max(size_bytes // itemsize // (ranks if self.has_part_per_rank else 1), 1)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(ALL_REDUCE, reduces=True, bus_ring=True, bus_passes=2),
        Kind(ALL_GATHER, target_parts="n", bus_ring=True),
        Kind(REDUCE_SCATTER, reduces=True, source_parts="n", bus_ring=True),
        Kind(ALL_TO_ALL, source_parts="n", target_parts="n", bus_ring=True),
        Kind(BROADCAST, has_separate_target=False),
        Kind(REDUCE, reduces=True),
        Kind(GATHER, target_parts="n", bus_ring=True),
        Kind(SCATTER, source_parts="n", bus_ring=True),
        Kind(EXCHANGE, has_in_place=False),
    )
}


def kinds_of(names: str) -> list[Kind]:
    """Parses the option --collectives: "all", or names separated by commas, such as "all_reduce,broadcast".

    Raises:
        InvalidArgument: the text contains an unknown name, or no name.
    """
    wanted = [name.strip().replace("-", "_") for name in names.split(",") if name.strip()]
    if wanted == ["all"]:
        return list(KINDS.values())
    for name in wanted:
        if name not in KINDS:
            raise InvalidArgument(
                f"no collective is called {name!r}: use `all` alone, or one or more of {', '.join(KINDS)}"
            )
    if not wanted:
        raise InvalidArgument(f"name at least one collective: `all`, or one or more of {', '.join(KINDS)}")
    return [KINDS[name] for name in dict.fromkeys(wanted)]


@dataclass(frozen=True)
class Case:
    """One collective to measure, at one array size.

    Attributes:
        collective: the name of the collective.
        count: the number of elements in one part of the arrays; see Kind.source_parts.
        dtype: NumPy's name of the dtype.
        op: the reduction operator; "" if the collective does not reduce.
        ranks: the number of ranks.
        iterations: the number of calls in each block; a block is a series of calls that is timed as a whole.
    """

    collective: str
    count: int
    dtype: str
    op: str
    ranks: int
    iterations: int

    @property
    def kind(self) -> Kind:
        """The description of this case's collective."""
        return KINDS[self.collective]

    @property
    def size_bytes(self) -> int:
        """The size in bytes of the larger of the source and target arrays."""
        return self.count * dtype_of(self.dtype).itemsize * (self.ranks if self.kind.has_part_per_rank else 1)


def parse_size(text: str) -> int:
    """Parses a size such as "8", "64K" or "1.5M" and returns it in bytes; K is 1024, as in nccl-tests.

    Raises:
        InvalidArgument: the text is not a size, or the size is below 1 byte or above 1024**5 bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not 1 <= size_bytes <= _LARGEST_SIZE:
        raise InvalidArgument(f"a size must be written as 8, 64K, 1M or 1G, from 1 byte to 1024**5; got {text!r}")
    return size_bytes


def sizes_between(begin: int, end: int, factor: float) -> list[int]:
    """Returns the sizes in bytes from `begin` to at most `end`, rounded; each is `factor` times the size before it.

    Raises:
        InvalidArgument: `end` is below `begin`, there are more than 100 sizes, or `end` is above `begin` and `factor`
            is not above 1.
    """
    if end < begin:
        raise InvalidArgument(f"-e (the largest size) must not be below -b, got -e {end} and -b {begin} bytes")
    if begin == end:
        return [begin]
    if not factor > 1:  # also refuses NaN
        raise InvalidArgument(f"-f (the factor between sizes) must be above 1, got {factor:g}")
    sizes: list[int] = []
    size = float(begin)
    while size <= end:
        sizes.append(round(size))
        size *= factor
        if len(sizes) > _MOST_SIZES:
            raise InvalidArgument(f"-b, -e and -f make more than {_MOST_SIZES} sizes: use a larger factor")
    return sorted(set(sizes))


def parse_dtype(text: str) -> str:
    """Returns NumPy's name of the dtype that the option --dtype names.

    Raises:
        InvalidArgument: no dtype has that name.
    """
    if text not in DTYPES:
        raise InvalidArgument(f"no dtype is called {text!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[text]


def plan_cases(kind: Kind, sizes: Sequence[int], template: Case) -> list[Case]:
    """Returns the cases to measure for one collective; sizes that give equal numbers of elements are one case.

    Args:
        kind: the collective.
        sizes: the array sizes in bytes, ascending.
        template: a case that gives the remaining fields: dtype, op, ranks and iterations.
    """
    itemsize = dtype_of(template.dtype).itemsize
    counts = dict.fromkeys(kind.count(size, itemsize, template.ranks) for size in sizes)
    op = template.op if kind.reduces else ""
    return [replace(template, collective=kind.name, count=count, op=op) for count in counts]


# Inputs and expected results.

# The input array repeats this number of values. This is a prime, so that the check also finds data at wrong offsets.
_PERIOD = 1009
_EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
_UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def source_of(case: Case, rank: int) -> Array:
    """Returns the input array of a rank: small pseudo-random integers, different on each rank, exact in every dtype."""
    return np.resize(_period(case, rank), case.count * (case.ranks if case.kind.source_parts == "n" else 1))


def _period(case: Case, rank: int) -> Array:
    """Returns the short array that source_of repeats. For products it has only 1 and 2, so that nothing is rounded."""
    most = 2 if case.op == "prod" else 8
    return np.random.default_rng(rank).integers(1, most + 1, _PERIOD).astype(dtype_of(case.dtype))


def expected_of(case: Case, rank: int) -> Array | None:
    """Returns the result that a rank should receive, computed with NumPy; None if the rank receives no result."""
    name = case.collective
    if name in (REDUCE, GATHER) and rank != ROOT:
        return None
    if case.kind.reduces:
        period = _reduced([_period(case, other) for other in range(case.ranks)], case.op)
        if name == REDUCE_SCATTER:
            part: Array = _part(np.resize(period, case.count * case.ranks), case, rank)
            return part
        return np.resize(period, case.count)
    senders = {BROADCAST: [ROOT], SCATTER: [ROOT], EXCHANGE: [(rank - 1) % case.ranks]}.get(name, range(case.ranks))
    sources = [source_of(case, sender) for sender in senders]
    if name in (SCATTER, ALL_TO_ALL):
        sources = [_part(source, case, rank) for source in sources]
    return np.concatenate(sources)


def _part(array: Any, case: Case, rank: int) -> Any:
    return array[rank * case.count : (rank + 1) * case.count]


def _reduced(sources: Sequence[Array], op: str) -> Array:
    """Reduces arrays with NumPy: floats in float64, and integers in their own dtype, in which overflow wraps around."""
    dtype = sources[0].dtype
    wide = dtype if dtype.kind in "iu" else np.dtype(np.float64)
    total = sources[0].astype(wide)
    for source in sources[1:]:
        total = _UFUNCS[op](total, source.astype(wide))
    if op == "mean":
        total = total / len(sources)
    return total.astype(dtype)


def count_wrong(case: Case, result: Array | None, rank: int) -> int:
    """Returns the number of wrong elements in a rank's result; all elements count as wrong if the result is missing.

    Averages, and reductions of 16-bit floats, may differ from NumPy's result by one rounding error per rank. All other
    results must be exact.
    """
    expected = expected_of(case, rank)
    if expected is None:
        return 0
    if result is None or result.shape != expected.shape or result.dtype != expected.dtype:
        return int(expected.size)
    if case.dtype not in _EPSILON or not case.op or (case.op != "mean" and expected.dtype.itemsize > 2):
        return int(np.count_nonzero(result != expected))
    tolerance = case.ranks * _EPSILON[case.dtype]
    found, wanted = result.astype(np.float64), expected.astype(np.float64)
    return int(np.count_nonzero(~(np.abs(found - wanted) <= tolerance * np.abs(wanted))))


# One case on one rank, out of place or in place.


def make_arrays(xp: Any, rank: int, case: Case, form: str) -> tuple[Any, Any]:
    """Returns a rank's source and target arrays, in the layout of nccl-tests; None for an array that is not needed.

    If the collective runs in place, the smaller of the two arrays is this rank's part of the larger one. In scatter
    only the root has a source array; in gather and reduce only the root has a target array.
    """
    count, kind, dtype, is_root = case.count, case.kind, dtype_of(case.dtype), rank == ROOT
    source_count = count * (case.ranks if kind.source_parts == "n" else 1)
    target_count = count * (case.ranks if kind.target_parts == "n" else 1)
    has_source = is_root or case.collective != SCATTER
    has_target = is_root or case.collective not in (REDUCE, GATHER)
    if form == SEPARATE or not (has_source and has_target):
        source = xp.zeros(source_count, dtype) if has_source else None
        return source, xp.zeros(target_count, dtype) if has_target else None
    whole = xp.zeros(max(source_count, target_count), dtype)
    part = _part(whole, case, rank)
    return whole if source_count >= target_count else part, whole if target_count >= source_count else part


def make_call(comm: Communicator, case: Case, source: Any, target: Any) -> Callable[[], object]:
    """Returns a function that runs the collective of the case once, on the given arrays."""
    op, after, before = case.op, (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    in_place = source is target  # then all_reduce and reduce get no out=
    return {
        ALL_REDUCE: lambda: comm.all_reduce(source, op) if in_place else comm.all_reduce(source, op, out=target),
        REDUCE: lambda: comm.reduce(source, op, ROOT, out=None if in_place else target),
        REDUCE_SCATTER: lambda: comm.reduce_scatter(source, op, out=target),
        BROADCAST: lambda: comm.broadcast(source, ROOT),
        ALL_GATHER: lambda: comm.all_gather(source, out=target),
        GATHER: lambda: comm.gather(source, ROOT, out=target),
        SCATTER: lambda: comm.scatter(source, ROOT, out=target),
        ALL_TO_ALL: lambda: comm.all_to_all(source, out=target),
        EXCHANGE: lambda: comm.exchange(source, dest=after, out=target, source=before),
    }[case.collective]


@dataclass(frozen=True)
class FormResult:
    """The measurement of one case, either out of place or in place.

    Attributes:
        seconds: the durations of a call. Each block gives one sample: the mean duration of its calls, on the slowest
            rank.
        wrong: the number of wrong elements, summed over all ranks.
    """

    seconds: Seconds
    wrong: int


@dataclass(frozen=True)
class Row:
    """One line of the printed table: the measurements of one case.

    Attributes:
        case: the collective and its size.
        forms: a mapping with the measurements; its keys are "out-of-place" and "in-place", or one of them.
    """

    case: Case
    forms: Mapping[str, FormResult]

    def algorithm_bytes_per_second(self, form: str) -> float:
        """Returns the algorithm bandwidth of nccl-tests: the size divided by the median time."""
        return self.case.size_bytes / self.forms[form].seconds.median

    def bus_bytes_per_second(self, form: str) -> float:
        """Returns the bus bandwidth of nccl-tests. Source: nccl-tests, doc/PERFORMANCE.md."""
        return self.algorithm_bytes_per_second(form) * self.case.kind.bus_factor(self.case.ranks)


def as_dictionary(row: Row) -> dict[str, Any]:
    """Returns a row as a dictionary for JSON; times are in seconds, bandwidths in bytes per second."""
    return {
        "collective": row.case.collective,
        "size_bytes": row.case.size_bytes,
        "count": row.case.count,
        "dtype": row.case.dtype,
        "op": row.case.op or None,
        "ranks": row.case.ranks,
        "forms": {
            name: {
                "seconds": vars(form.seconds),
                "algorithm_bytes_per_second": row.algorithm_bytes_per_second(name),
                "bus_bytes_per_second": row.bus_bytes_per_second(name),
                "wrong": form.wrong,
            }
            for name, form in row.forms.items()
        },
    }


# The ranks' program.


class Wanted(NamedTuple):
    """The settings of a measurement, equal on all ranks.

    Attributes:
        cases: one list of cases for each collective.
        verbose: whether rank 0 prints all columns.
    """

    cases: list[list[Case]]
    verbose: bool


class Measured(NamedTuple):
    """The results of a measurement.

    Attributes:
        rows: the lines of the table.
        backend: the name of the backend that the ranks used.
        cupy: the version of CuPy; "" if the arrays were NumPy's.
    """

    rows: list[Row]
    backend: str
    cupy: str


def measure(wanted: Wanted) -> Measured:
    """Measures all cases. Every rank calls this function in an initialised process group.

    Rank 0 prints a table for each collective. If stderr is a terminal, rank 0 shows the unfinished table there.
    """
    comm = group_or_world(None, "a measurement of collectives")
    xp, _ = array_module(comm)
    if comm.rank == 0:
        iterations = wanted.cases[0][0].iterations
        of_blocks = f"the median of {_BLOCKS} blocks of {iterations} calls"
        ranks = "1 rank" if comm.world_size == 1 else f"{comm.world_size} ranks"
        print(f"gradsync/{comm.backend}: {ranks}, {usable_cores()} cores on this machine")
        print(f"times are those of the slowest rank: {of_blocks}, after {min(iterations, _WARM_UP)} warm-up calls")
        if busy := busy_machine():
            print(busy)
        sys.stdout.flush()
    rows: list[Row] = []
    for of_collective in wanted.cases:
        measured: list[Row] = []
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            for case in of_collective:
                measured.append(_measure_case(comm, case))
                if comm.rank == 0 and live.console.is_terminal:
                    live.update(table(measured, verbose=wanted.verbose), refresh=True)
        if comm.rank == 0:
            print()
            print_table(table(measured, verbose=wanted.verbose))
        rows += measured
    return Measured(rows, comm.backend, "" if xp is np else str(xp.__version__))


def _measure_case(comm: Communicator, case: Case) -> Row:
    exists = {SEPARATE: case.kind.has_separate_target, IN_PLACE: case.kind.has_in_place}
    timers = {form: _Timer(comm, case, form) for form in FORMS if exists[form]}
    wrong = {form: timer.count_wrong() for form, timer in timers.items()}
    samples: dict[str, list[float]] = {form: [] for form in timers}
    for block in range(_BLOCKS):
        for form, timer in timers.items():
            samples[form].append(timer.time(min(case.iterations, _WARM_UP) if block == 0 else 1))
    return Row(case, {form: FormResult(Seconds.of(samples[form]), wrong[form]) for form in timers})


class _Timer:
    """Times one case, out of place or in place. All ranks must call the same methods in the same order."""

    def __init__(self, comm: Communicator, case: Case, form: str) -> None:
        self._comm, self._case = comm, case
        self._xp, self._wait = array_module(comm)
        self._source, self._target = make_arrays(self._xp, comm.rank, case, form)
        self._run = make_call(comm, case, self._source, self._target)

    def count_wrong(self) -> int:
        """Counts the wrong elements on all ranks. Runs the call twice: only the second run has a cached plan."""
        return sum(self._comm.objects.all_gather(max(self._count_wrong() for _ in range(2))))

    def _count_wrong(self) -> int:
        target = self._target
        self._clear()
        if self._source is not None:
            self._source[...] = self._xp.asarray(source_of(self._case, self._comm.rank))
        self._wait()
        self._comm.barrier()
        self._run()
        self._wait()
        on_host = target if target is None or self._xp is np else self._xp.asnumpy(target)
        return count_wrong(self._case, on_host, self._comm.rank)

    def time(self, warm_up: int) -> float:
        """Times one block of calls; returns the mean duration of one call in seconds, on the slowest rank."""
        self._clear()  # zeros, because repeated in-place reductions of other values would overflow
        for _ in range(warm_up):
            self._run()
        self._wait()
        self._comm.barrier()
        began = time.perf_counter()
        for _ in range(self._case.iterations):
            self._run()
        self._wait()
        seconds = (time.perf_counter() - began) / self._case.iterations
        return float(max(self._comm.objects.all_gather(seconds)))

    def _clear(self) -> None:
        for array in (self._target, self._source):  # in place, the two arrays share memory
            if array is not None:
                array[...] = 0


# The command.


def bench_collectives(
    *,
    collectives: str,
    nprocs: int | None,
    backend: str,
    begin: str,
    end: str,
    factor: float,
    iterations: int,
    op: str,
    dtype: str,
    verbose: bool,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Runs `gradsync bench collectives`; the arguments are the options that cli.py declares.

    Raises:
        InvalidArgument, UnsupportedDtype, BackendUnavailable: an option is wrong, the operator is not defined for the
            dtype, or the backend cannot run here. The command raises this error before it starts ranks.
        GradsyncError: a rank failed, results are wrong, or the JSON file cannot be written.
    """
    settings = dict(locals())
    kinds = kinds_of(collectives)
    operation, name = ReduceOp.parse(op), parse_dtype(dtype)
    if name == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
        raise InvalidArgument("bfloat16 needs the package ml_dtypes: pip install ml_dtypes")
    ranks = count_ranks(nprocs, backend)
    check_outputs(json_path, plot_path)
    if any(kind.reduces for kind in kinds):
        check_operation(operation, dtype_of(name))
    template = Case("", 0, name, operation.value, ranks, iterations)
    sizes = sizes_between(parse_size(begin), parse_size(end), factor)
    made = provenance(["gradsync", *sys.argv[1:]])
    cases = [plan_cases(kind, sizes, template) for kind in kinds]
    measured = run_as_ranks(measure, Wanted(cases, verbose), nprocs=nprocs, backend=backend)
    if measured is None:  # another process prints the result
        return
    rows = measured.rows
    wrong = sum(form.wrong for row in rows for form in row.forms.values())
    print(f"\n{f'{wrong} elements are wrong' if wrong else 'All results are right.'}")
    if plot_path is not None:
        operator = f", {op}" if any(kind.reduces for kind in kinds) else ""
        what = f"gradsync/{measured.backend}, {ranks} ranks, {name}{operator}"
        plot(panels(rows), f"{what}; the faster of out of place and in place; bars are quartiles", "size", plot_path)
        print(f"drawn in {plot_path}")
    if measured.cupy:
        made["versions"]["cupy"] = measured.cupy
    settings |= {"ranks": ranks, "measured_backend": measured.backend}
    write_json(json_path, made, {"settings": settings, "rows": [as_dictionary(row) for row in rows]})
    if wrong:
        where = next(row.case for row in rows if any(form.wrong for form in row.forms.values()))
        raise GradsyncError(
            f"{wrong} elements are wrong, the first ones in {where.collective} of {size_text(where.size_bytes)}"
        )


# The table and the picture.


def table(rows: Sequence[Row], *, verbose: bool) -> Table:
    """Returns a table with the measurements of one collective; if `verbose`, with the columns of nccl-tests."""
    found = Table(title=rows[0].case.collective, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    of_form = ("GB/s", "bus GB/s", "quartiles") if verbose else ("GB/s",)
    for name in ("size", *(("count",) if verbose else ()), "out of place", *of_form, "in place", *of_form):
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [size_text(row.case.size_bytes), *([f"{row.case.count:,}"] if verbose else [])]
        for form in FORMS:
            if form not in row.forms:  # the collective cannot run this way
                cells += ["-"] * (1 + len(of_form))
                continue
            seconds = row.forms[form].seconds
            cells += [seconds_text(seconds.median), f"{row.algorithm_bytes_per_second(form) / 1e9:.2f}"]
            if verbose:
                quartiles = f"{seconds_text(seconds.lower_quartile)} to {seconds_text(seconds.upper_quartile)}"
                cells += [f"{row.bus_bytes_per_second(form) / 1e9:.2f}", quartiles]
        found.add_row(*cells)
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Returns a plot panel for each collective; for each size it has the form with the shorter median time."""
    found = []
    for collective in dict.fromkeys(row.case.collective for row in rows):
        of_collective = [row for row in rows if row.case.collective == collective]
        times = [min((f.seconds for f in row.forms.values()), key=lambda s: s.median) for row in of_collective]
        sizes = [row.case.size_bytes for row in of_collective]
        found.append(Panel(collective, sizes, times, is_logarithmic=True))
    return found

"""`gradsync bench thresholds`: measures which threshold_bytes synchronises a model's gradients fastest.

Every rank runs this program. Each round times one step with every threshold, so that a change of the machine's speed
affects all thresholds. Every second round measures the thresholds in reverse order, so that a threshold is not always
measured after the same other threshold. The time of a step is measured on the slowest rank. The program reports the
median over the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradsync.bench.models import gradients_of, total_bytes
from gradsync.bench.program import array_module, count_ranks, run_as_ranks
from gradsync.bench.report import (
    Panel,
    Seconds,
    check_outputs,
    milliseconds,
    plot,
    print_table,
    provenance,
    write_json,
)
from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES, GradientSpec, plan_buckets
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, size_text
from gradsync.reduction import dtype_of

MEGABYTE = 1024**2
DEFAULT_MEGABYTES = "0.25,0.5,1,2,5,10,25,50,100"
# Thresholds whose times differ by less than this fraction count as equally fast. A larger threshold must gain more,
# because it costs memory and delays the first all-reduce.
TOLERANCE = 0.03
WARM_UP_ROUNDS = 2
_FEWEST_ROUNDS = 3  # the time limit does not end the measurement earlier: a median of fewer rounds is not reliable
_SURE_ROUNDS = 8  # the quartiles of fewer rounds do not show the noise
_FLOATING = ("float", "bfloat", "complex")


# The thresholds to measure, and the results.


@dataclass(frozen=True)
class Candidate:
    """One threshold to measure.

    Attributes:
        threshold_bytes: the bucket threshold in bytes.
        all_reduces: the number of buckets in a step; each bucket needs one all-reduce.
        same_buckets: the larger thresholds that produce the same buckets; they are not measured.
    """

    threshold_bytes: int
    all_reduces: int
    same_buckets: tuple[int, ...] = ()


class Sweep(NamedTuple):
    """The settings of a measurement, equal on all ranks.

    Attributes:
        specs: the descriptions of a step's gradients, in the order in which the backward pass produces them.
        candidates: the thresholds to measure.
        steps: the largest number of rounds; each round measures the time of one step with each threshold.
        limit_seconds: the time limit; after 3 rounds, the measurement stops if the next round would exceed the limit.
    """

    specs: Sequence[GradientSpec]
    candidates: Sequence[Candidate]
    steps: int
    limit_seconds: float


class Measured(NamedTuple):
    """The result of a measurement.

    Attributes:
        steps: one list per candidate, with the duration of its step in each round, in seconds.
        backend, device: the backend and the device of the communicator on this rank.
    """

    steps: list[list[float]]
    backend: str
    device: str


@dataclass(frozen=True)
class Row:
    """One line of the printed table: the measurement of one threshold.

    Attributes:
        candidate: the measured threshold.
        seconds: the durations of a step.
    """

    candidate: Candidate
    seconds: Seconds

    def has(self, threshold_bytes: int) -> bool:
        """Whether this row measured the given threshold, or a threshold that produces the same buckets."""
        return threshold_bytes in (self.candidate.threshold_bytes, *self.candidate.same_buckets)

    def as_dictionary(self) -> dict[str, object]:
        """Returns the row as a dictionary for JSON; times are in seconds."""
        return {
            "threshold_bytes": self.candidate.threshold_bytes,
            "same_buckets_threshold_bytes": self.candidate.same_buckets,
            "all_reduces": self.candidate.all_reduces,
            "seconds": vars(self.seconds),
            "spread": self.seconds.spread,
        }


def parse_megabytes(text: str) -> list[int]:
    """Parses thresholds in MB such as "0.25,1,10"; returns them in bytes, sorted, without duplicates.

    Raises:
        InvalidArgument: the text has no threshold, or a threshold is not a number or is below 1 byte.
    """
    thresholds = set()
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            size_bytes = round(float(part) * MEGABYTE)
        except (ValueError, OverflowError):
            raise InvalidArgument(f"--thresholds needs numbers of MB, such as 0.25,1,10; got {part!r}") from None
        if size_bytes < 1:
            raise InvalidArgument(f"each number of --thresholds must be at least one byte, got {part} MB")
        thresholds.add(size_bytes)
    if not thresholds:
        raise InvalidArgument(f"--thresholds needs at least one number of MB, got {text!r}")
    return sorted(thresholds)


def plan_sweep(specs: Sequence[GradientSpec], thresholds: Sequence[int]) -> list[Candidate]:
    """Returns the thresholds to measure. If several thresholds produce the same buckets, only the smallest is measured.

    Args:
        specs: the descriptions of a step's gradients, in the order in which the backward pass produces them.
        thresholds: the thresholds in bytes, ascending.
    """
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for threshold in thresholds:
        buckets = plan_buckets(specs, threshold)
        found.setdefault(tuple(tuple(slot.position for slot in b.slots) for b in buckets), []).append(threshold)
    return [Candidate(same[0], len(buckets), tuple(same[1:])) for buckets, same in found.items()]


def rows_of(sweep: Sweep, steps: Sequence[Sequence[float]]) -> list[Row]:
    """Returns one row for each measured threshold.

    Args:
        sweep: the settings of the measurement.
        steps: for each measured threshold, the durations of its step in one or more rounds, in seconds.
    """
    return [Row(candidate, Seconds.of(each)) for candidate, each in zip(sweep.candidates, steps, strict=True)]


# The ranks' program.


def run_sweep(sweep: Sweep) -> Measured:
    """Measures all thresholds. Every rank calls this function in an initialised process group.

    If stderr is a terminal, rank 0 shows the table there after each round.
    """
    comm = group_or_world(None, "a sweep over thresholds")
    operations = _operations(sweep, comm)
    times: list[list[float]] = [[] for _ in operations]
    console = Console(stderr=True)
    began = time.perf_counter()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for number in range(WARM_UP_ROUNDS + sweep.steps):
            slowest, elapsed_seconds = _round(operations, comm, began, backwards=number % 2 == 1)
            measured = number + 1 - WARM_UP_ROUNDS
            if measured > 0:
                for samples, seconds in zip(times, slowest, strict=True):
                    samples.append(seconds)
                if comm.rank == 0 and console.is_terminal:
                    shown = table(rows_of(sweep, times))
                    live.update(Group(shown, Text(f"round {measured} of {sweep.steps}")), refresh=True)
            per_round = elapsed_seconds / (number + 1)
            if measured >= _FEWEST_ROUNDS and elapsed_seconds + per_round > sweep.limit_seconds:
                break
    return Measured(times, comm.backend, comm.device)


def _round(
    operations: Sequence[Callable[[], None]], comm: Communicator, began: float, *, backwards: bool
) -> tuple[list[float], float]:
    """Times each operation once.

    Returns:
        The duration of each operation on the slowest rank, and the time since `began` on rank 0; all in seconds.
    """
    seconds = [0.0] * len(operations)
    order = range(len(operations))
    for number in reversed(order) if backwards else order:
        comm.barrier()
        started = time.perf_counter()
        operations[number]()
        seconds[number] = time.perf_counter() - started
    # All ranks use rank 0's clock for the time limit, so that they stop after the same round.
    by_rank = comm.objects.all_gather((seconds, time.perf_counter() - began))
    return [max(each) for each in zip(*(seconds for seconds, _ in by_rank), strict=True)], by_rank[0][1]


def _operations(sweep: Sweep, comm: Communicator) -> list[Callable[[], None]]:
    """Returns one function per threshold; each function synchronises all gradients once with its threshold."""
    xp, wait = array_module(comm)
    method = "mean" if all(spec.dtype.startswith(_FLOATING) for spec in sweep.specs) else "sum"
    # Gradients are reduced in place, step after step. A mean stays bounded; a sum does so only if the values are 0.
    value = comm.rank if method == "mean" else 0
    gradients = [_gradient(xp, spec, value) for spec in sweep.specs]
    return [
        _step(AllreduceCallback(method, comm, threshold_bytes=candidate.threshold_bytes), gradients, wait)
        for candidate in sweep.candidates
    ]


def _step(callback: AllreduceCallback, gradients: Sequence[Any], wait: Callable[[], None]) -> Callable[[], None]:
    def step() -> None:
        with callback.backward():
            futures = [callback(number, gradient) for number, gradient in enumerate(gradients)]
        for future in futures:
            future.result()
        wait()

    return step


def _gradient(xp: Any, spec: GradientSpec, value: int) -> Any:
    """Creates a gradient whose elements all have the given value."""
    return xp.full(spec.shape, value, dtype_of(spec.dtype))


# The command.


def bench_thresholds(
    *,
    model: str,
    nprocs: int | None,
    backend: str,
    thresholds: str | None,
    steps: int,
    limit_seconds: float,
    verbose: bool,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Runs `gradsync bench thresholds`; the arguments are the options that cli.py declares.

    Raises:
        InvalidArgument, BackendUnavailable: an option is wrong, or the backend cannot run here. The command raises this
            error before it starts ranks.
        GradsyncError: a rank failed, and no file is written; or the JSON file cannot be written.
    """
    settings = dict(locals())
    ranks = count_ranks(nprocs, backend)
    check_outputs(json_path, plot_path)
    made = provenance(["gradsync", *sys.argv[1:]])
    specs = gradients_of(model)
    candidates = plan_sweep(specs, parse_megabytes(DEFAULT_MEGABYTES if thresholds is None else thresholds))
    sweep = Sweep(specs, candidates, steps, limit_seconds)
    measured = run_as_ranks(run_sweep, sweep, nprocs=nprocs, backend=backend)
    if measured is None:  # another process prints the result
        return
    rows, rounds = rows_of(sweep, measured.steps), len(measured.steps[0])
    name = Path(model).name
    where = f"{'1 rank' if ranks == 1 else f'{ranks} ranks'} over {measured.backend}"
    print(f"{name}: {len(specs)} gradients, {size_text(total_bytes(specs))}")
    on = "" if measured.device == "cpu" else f" on {measured.device} (rank 0)"
    number = str(steps)
    if rounds < steps:
        number = f"because of --time-limit {limit_seconds:g} s only {rounds} of {steps}"
    print(f"{where}{on}; median times of the slowest rank, {number} steps with each threshold\n")
    print_table(table(rows, verbose=verbose))
    print("\n" + "\n".join(filter(None, (same_buckets(rows), rising_counts(rows), recommendation(rows, steps)))))
    if plot_path is not None:
        plot([panel(rows)], f"{name}: {where}", "threshold of a bucket", plot_path)
        print(f"drawn in {plot_path}")
    settings |= {"gradients": len(specs), "total_bytes": total_bytes(specs), "ranks": ranks}
    settings |= {"rounds": rounds, "measured_backend": measured.backend, "device": measured.device}
    chosen = recommended(rows).candidate.threshold_bytes
    result = {"rows": [row.as_dictionary() for row in rows], "recommended_threshold_bytes": chosen}
    write_json(json_path, made, {"settings": settings, **result})


# The printed text.


def alike(rows: Sequence[Row]) -> Sequence[Row]:
    """Returns the fastest row and the neighbouring rows whose medians exceed its median by no more than the noise."""
    fastest = _fastest(rows)
    limit = fastest.seconds.median + _noise_seconds(fastest)
    first = last = rows.index(fastest)
    while first > 0 and rows[first - 1].seconds.median <= limit:
        first -= 1
    while last + 1 < len(rows) and rows[last + 1].seconds.median <= limit:
        last += 1
    return rows[first : last + 1]


def _fastest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.seconds.median)


def _noise_seconds(row: Row) -> float:
    """Returns the largest difference that counts as noise: TOLERANCE, or the distance between quartiles if larger."""
    return row.seconds.median * max(TOLERANCE, row.seconds.spread)


def is_sure(rows: Sequence[Row]) -> bool:
    """Whether enough rounds were measured to compare thresholds."""
    return rows[0].seconds.samples >= _SURE_ROUNDS


def recommended(rows: Sequence[Row]) -> Row:
    """Returns the row of the recommended threshold.

    The rows that alike() returns are equally fast. Of these rows, this function returns the row of the default
    threshold, or the row of the smallest threshold if there is no row of the default. If too few rounds were measured,
    this function returns the fastest row.
    """
    if not is_sure(rows):
        return _fastest(rows)
    found = alike(rows)
    return next((row for row in found if row.has(DEFAULT_THRESHOLD_BYTES)), found[0])


def recommendation(rows: Sequence[Row], wanted_steps: int) -> str:
    """Returns the recommendation as text: the fastest thresholds, the noise, and the code that sets the threshold.

    Args:
        rows: one row per measured threshold.
        wanted_steps: the value of --steps; the time limit may have ended the measurement earlier.
    """
    fastest = _fastest(rows)
    if len(rows) == 1:
        count = fastest.candidate.all_reduces
        buckets = "1 bucket" if count == 1 else f"{count} buckets"
        return (
            f"All tested thresholds give the same {buckets}, so there is nothing to choose. A step takes "
            f"{fastest.seconds}."
        )
    if not is_sure(rows):
        more = "a longer --time-limit" if fastest.seconds.samples < wanted_steps else "--steps 20"
        name = size_text(fastest.candidate.threshold_bytes)
        return (
            f"{name} was fastest, {milliseconds(fastest.seconds.median)} a step. This result is not reliable, because "
            f"the command measured too few steps: use {more}."
        )
    found = alike(rows)
    low, high = (size_text(row.candidate.threshold_bytes) for row in (found[0], found[-1]))
    if len(found) == 1:
        which = f"{low} is fastest, {milliseconds(fastest.seconds.median)} a step."
    else:
        times = [row.seconds.median for row in found]
        names = "All these thresholds" if len(found) == len(rows) else f"Thresholds from {low} to {high}"
        took = f"{milliseconds(min(times))} to {milliseconds(max(times))} a step"
        which = f"{names} are equally fast, {took}."
    limit = milliseconds(_noise_seconds(fastest))
    if fastest.seconds.spread > TOLERANCE:
        noise = f"Differences below {limit} are noise: the quartiles of the fastest threshold are {limit} apart."
    else:
        noise = f"Differences below {limit} ({TOLERANCE:.0%}) do not count."
    chosen = recommended(rows)
    if chosen.has(DEFAULT_THRESHOLD_BYTES):
        todo = f"So the default ({size_text(DEFAULT_THRESHOLD_BYTES)}) is right."
    else:
        todo = f"Use gs.AllreduceCallback(threshold_bytes={_as_code(chosen.candidate.threshold_bytes)})."
    return f"{which} {noise}\n{todo}"


def table(rows: Sequence[Row], *, verbose: bool = False) -> Table:
    """Returns the rows as a table; if `verbose`, with a column for the quartiles."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("threshold", "step", "all-reduces", *(["quartiles"] if verbose else []), ""):
        found.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    chosen, mark = recommended(rows), "<- recommended" if is_sure(rows) else "<- fastest"
    for row in rows:
        cells = [size_text(row.candidate.threshold_bytes), milliseconds(row.seconds.median)]
        cells.append(str(row.candidate.all_reduces))
        if verbose:
            lower = milliseconds(row.seconds.lower_quartile).removesuffix(" ms")
            cells.append(f"{lower}-{milliseconds(row.seconds.upper_quartile)}")
        found.add_row(*cells, mark if row is chosen and len(rows) > 1 else "")
    return found


def same_buckets(rows: Sequence[Row]) -> str:
    """Returns a note about thresholds that produce the same buckets as a smaller threshold; "" if there are none."""
    return "\n".join(
        f"Not measured: {', '.join(map(size_text, row.candidate.same_buckets))} "
        f"(same buckets as {size_text(row.candidate.threshold_bytes)})."
        for row in rows
        if row.candidate.same_buckets
    )


def rising_counts(rows: Sequence[Row]) -> str:
    """Returns a note if a larger threshold produces more buckets than a smaller threshold; else ""."""
    counts = [row.candidate.all_reduces for row in rows]
    if counts == sorted(counts, reverse=True):
        return ""
    return "A larger threshold can make more all-reduces, because a gradient that does not fit begins a new bucket."


def _as_code(size_bytes: int) -> str:
    for unit, factor in (("1024**2", MEGABYTE), ("1024", 1024)):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} * {unit}"
    return str(size_bytes)


def panel(rows: Sequence[Row]) -> Panel:
    """Returns a plot panel with the thresholds on the horizontal axis and the times of a step on the vertical axis."""
    thresholds = [row.candidate.threshold_bytes for row in rows]
    chosen = recommended(rows).candidate.threshold_bytes
    return Panel("time per step; bars are quartiles", thresholds, [row.seconds for row in rows], chosen=chosen)

"""`gradsync doctor`, from its options to its exit code: checks, an all-reduce over each backend, and a screen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsync.bench.report import print_table
from gradsync.doctor.checks import CHECKS, Check, Finding, Status, warning
from gradsync.doctor.facts import Facts, look_around
from gradsync.doctor.probes import call
from gradsync.environment import BACKEND
from gradsync.machine import count_gpus

BACKENDS = ("local", "shm", "mpi", "nccl")
_OPTIONS = ("-b", "16M", "-e", "16M", "--iters", "5", "-w", "2", "--blocks", "3")


@dataclass(frozen=True)
class Trial:
    """What came of trying a backend.

    Attributes:
        backend: its name.
        works: whether an all-reduce gave the right result; None where it was not tried.
        ranks: that took part.
        text: what was found, for a person.
        advice: what to do; "" where there is nothing to do.
        bus_bytes_per_second: of 16 MB, the bus bandwidth; None where it was not tried, or for one rank.
        seconds: that it took, start of the ranks included.
    """

    backend: str
    works: bool | None
    ranks: int
    text: str
    advice: str = ""
    bus_bytes_per_second: float | None = None
    seconds: float = 0.0


def try_backend(backend: str, here: Facts, findings: Sequence[Finding], deadline_seconds: float) -> Trial:
    """Runs an all-reduce over a backend, where nothing says that it cannot work; never longer than about the deadline.

    Args:
        backend: one of BACKENDS.
        here: the facts.
        findings: of the checks.
        deadline_seconds: for all of it; then its processes are killed.
    """
    reason = why_not(backend, here, findings)
    if reason is not None:
        return Trial(backend, None, 0, reason)
    ranks = _ranks(backend, here)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradsync-doctor-") as folder:
        trial = _run(backend, ranks, f"{folder}/result.json", deadline_seconds)
    return replace(trial, seconds=time.monotonic() - began)


def why_not(backend: str, here: Facts, findings: Sequence[Finding]) -> str | None:
    """Returns why a backend need not be tried; None where it has to be."""
    if backend == "nccl" and not here.has_gpu:
        return "no NVIDIA GPU is here"
    wanted = {"nccl": ("GPUs", "CuPy", "NCCL"), "mpi": ("MPI",), "shm": ("Python",)}.get(backend, ())
    for finding in findings:
        if finding.what in wanted and finding.status is Status.UNUSABLE:
            return f"see {finding.what}"
    return None


def _ranks(backend: str, here: Facts) -> int:
    """Returns two, but for what has place for one only."""
    if backend == "nccl":
        return min(2, max(count_gpus(here.environ), 1))
    return 1 if backend == "local" else 2


def _run(backend: str, ranks: int, output: str, deadline_seconds: float) -> Trial:
    """Has `gradsync bench collectives` time 16 MB in a process of its own: what is broken may crash or hang."""
    options = ["--backend", backend, "-n", str(ranks), "--json", output, *_OPTIONS]
    try:
        done = call([sys.executable, "-m", "gradsync", "bench", "collectives", *options], deadline_seconds)
    except OSError as error:
        return Trial(backend, False, ranks, f"{type(error).__name__}: {error}")
    except subprocess.TimeoutExpired:
        return Trial(backend, False, ranks, f"no answer within {deadline_seconds:.0f} s", _advice(backend))
    if done.returncode and not os.path.exists(output):
        return Trial(backend, False, ranks, _cause(done), _advice(backend))
    with open(output, encoding="utf-8") as file:
        [row] = json.load(file)["rows"]
    forms = row["forms"].values()
    if wrong := sum(form["wrong"] or 0 for form in forms):
        return Trial(backend, False, ranks, f"{wrong:,} elements of the result are wrong", "please report this")
    if ranks == 1:
        alone = "" if backend == "local" else "; there is one GPU, and each rank needs its own"
        return Trial(backend, True, ranks, f"works with one rank{alone}")
    seconds = min(form["seconds"]["median"] for form in forms)
    bus = max(form["bus_bytes_per_second"] for form in forms)
    text = f"works: 16 MB in {1e3 * seconds:.3g} ms between {ranks} ranks, {bus / 1e9:.3g} GB/s"
    return Trial(backend, True, ranks, text, bus_bytes_per_second=bus)


def _advice(backend: str) -> str:
    return f"see all of it: gradsync bench collectives --backend {backend} -e 1K"


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what the ranks say of their end: the last line of a traceback, or the command's own error."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    of_ranks = [line for line in lines[:-1] if re.match(r"[\w.]*(?:Error|Exception|[A-Z]\w+): ", line)]
    return (of_ranks or lines)[-1].removeprefix("gradsync: error: ").replace("gradsync.errors.", "")


@dataclass(frozen=True)
class Report:
    """What came out.

    Attributes:
        findings: of the checks, in the order of the screen.
        trials: of the backends.
        asked_for: the backend that has to work; None: any beyond local.
        seconds: that all of it took.
    """

    findings: Sequence[Finding]
    trials: Sequence[Trial]
    asked_for: str | None
    seconds: float

    @property
    def working(self) -> list[str]:
        """The backends over which an all-reduce was right."""
        return [trial.backend for trial in self.trials if trial.works]

    @property
    def is_well(self) -> bool:
        """Whether ranks can do here what was asked for, as far as it was tried."""
        if any(finding.status is Status.BROKEN for finding in self.findings):
            return False
        if not self.trials:  # nothing was to be tried
            return True
        return self.asked_for in self.working if self.asked_for else bool(set(self.working) - {"local"})

    def verdict(self) -> str:
        """Returns the last line."""
        names = ", ".join(self.working)
        if self.is_well and not self.trials:
            return "Nothing is broken; no backend was tried."
        if self.is_well:
            return f"Ready: {names} can be used here." if not self.asked_for else f"Ready: {self.asked_for} works here."
        broken = [finding.what for finding in self.findings if finding.status is Status.BROKEN]
        if broken:
            return f"Not ready: mend {', '.join(broken)} first."
        if self.asked_for:
            return f"Not ready: {self.asked_for} was asked for, and does not work here."
        return f"Not ready: {names or 'nothing'} works here, which is not enough for two ranks."


def examine(here: Facts, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Runs all checks; one that fails itself is a line with its error."""
    findings: list[Finding] = []
    for what, check in checks.items():
        try:
            findings += check(here)
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {error}"
            findings.append(warning(what, text, "please report this; the other lines stand"))
    return findings


def as_dictionary(report: Report) -> dict[str, Any]:
    """Returns a report for JSON."""
    return {
        "ready": report.is_well,
        "verdict": report.verdict(),
        "asked_for": report.asked_for,
        "working": report.working,
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in report.findings],
        "trials": [asdict(trial) for trial in report.trials],
        "seconds": report.seconds,
    }


_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.UNUSABLE: "dim", Status.BROKEN: "bold red"}


def show(report: Report, *, verbose: bool) -> None:
    """Prints a report; what is fine only where `verbose`."""
    console = Console(highlight=False, soft_wrap=False)
    lines = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    shown = [finding for finding in report.findings if verbose or finding.status is not Status.OK]
    for finding in shown:
        lines.add_row(
            Text(finding.status.value, _STYLES[finding.status]),
            finding.what,
            _with_advice(finding.text, finding.advice),
        )
    if report.trials:
        lines.add_section()
        for row in _trial_rows(report.trials):
            lines.add_row(*row)
    print_table(lines, console)
    fine = len(report.findings) - len(shown)
    console.print(f"\n{fine} more {'line is' if fine == 1 else 'lines are'} fine: -v shows them." if fine else "")
    console.print(
        Text(report.verdict(), "bold green" if report.is_well else "bold red"), Text(f"({report.seconds:.1f} s)", "dim")
    )


def _trial_rows(trials: Sequence[Trial]) -> list[tuple[Text, str, Text]]:
    statuses = {True: Status.OK, False: Status.BROKEN, None: Status.UNUSABLE}
    return [
        (
            Text(statuses[trial.works].value, _STYLES[statuses[trial.works]]),
            f"backend {trial.backend}",
            _with_advice(trial.text, trial.advice),
        )
        for trial in trials
    ]


def _with_advice(text: str, advice: str) -> Text:
    line = Text(text)
    return line if not advice else line.append("\n-> ", "cyan").append(advice, "cyan")


_PROBE_SECONDS = 6.0


def doctor(*, backend: str | None, as_json: bool, deadline_seconds: float, tries: bool, verbose: bool) -> int:
    """Looks, tries and prints, with the options of the command; returns the exit code."""
    began = time.monotonic()
    here = look_around(_PROBE_SECONDS)
    findings = examine(here)
    asked_for = backend or _asked_for_in(here.environ.get(BACKEND, ""))
    backends = (backend,) if backend else BACKENDS
    trials = [try_backend(each, here, findings, deadline_seconds) for each in backends] if tries else []
    report = Report(findings, trials, asked_for, time.monotonic() - began)
    if as_json:
        print(json.dumps(as_dictionary(report), indent=2))
    else:
        show(report, verbose=verbose)
    return 0 if report.is_well else 1


def _asked_for_in(value: str) -> str | None:
    """Returns the backend that the environment asks for by name."""
    return value if value in BACKENDS else None

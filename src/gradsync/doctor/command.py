"""The command `gradsync doctor`: runs the checks, tries an all-reduce with each backend, and prints the report."""

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

from gradsync.backends import TABLE
from gradsync.bench.report import print_table
from gradsync.doctor.checks import CHECKS, Check, Finding, Status, warning
from gradsync.doctor.facts import Facts, call, collect_facts, in_parallel
from gradsync.environment import BACKEND
from gradsync.machine import count_gpus

_OPTIONS = ("-b", "16M", "-e", "16M", "--iters", "1", "-w", "0", "--blocks", "1")


@dataclass(frozen=True)
class Trial:
    """The result of one backend's trial, an all-reduce of 16 MB.

    Attributes:
        backend: the name of the backend.
        works: whether the all-reduce gave the right result; None if the backend was not tried.
        ranks: the number of ranks.
        text: the result in words.
        advice: the next step for the user; "" if there is none.
        seconds: the duration of the trial, including the start of the ranks.
    """

    backend: str
    works: bool | None
    ranks: int
    text: str
    advice: str = ""
    seconds: float = 0.0


def try_backend(backend: str, here: Facts, findings: Sequence[Finding], deadline_seconds: float) -> Trial:
    """Tries an all-reduce with one backend, unless the checks have found that it cannot work.

    Args:
        backend: the name of the backend, a key of TABLE.
        here: the facts about this machine.
        findings: the findings of the checks.
        deadline_seconds: the time limit of the trial, after which the doctor kills its processes.
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
    """Returns the reason why a backend is not tried; None if it can be tried."""
    row = TABLE[backend]
    if row.on_gpus and not here.has_gpu:
        return "this machine has no NVIDIA GPU"
    for finding in findings:
        if finding.what in row.doctor_lines and finding.status is Status.UNUSABLE:
            return f'see the line "{finding.what}"'
    return None


def _ranks(backend: str, here: Facts) -> int:
    """Returns the number of ranks of a trial: 2, but 1 for backend "local" and on a single GPU."""
    if TABLE[backend].on_gpus:
        return min(2, max(count_gpus(here.environ), 1))
    return 1 if TABLE[backend].single_rank else 2


def _run(backend: str, ranks: int, output: str, deadline_seconds: float) -> Trial:
    """Runs `gradsync bench collectives`, which checks its results, in a subprocess: a backend may crash or hang."""
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
    if wrong := sum(form["wrong"] or 0 for form in row["forms"].values()):
        return Trial(backend, False, ranks, f"{wrong:,} elements of the result are wrong", "please report this error")
    if ranks == 1:
        alone = "" if TABLE[backend].single_rank else "; this machine has one GPU, and each rank needs its own GPU"
        return Trial(backend, True, ranks, f"works with one rank{alone}")
    return Trial(backend, True, ranks, f"works: {ranks} ranks summed arrays of 16 MB")


def _advice(backend: str) -> str:
    return f"see the whole error: gradsync bench collectives --backend {backend} -e 1K"


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error of a failed trial: the last exception in a rank's traceback, or the last line of stderr."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    of_ranks = [line for line in lines[:-1] if re.match(r"[\w.]*[A-Z]\w+: ", line)]
    return (of_ranks or lines)[-1].removeprefix("gradsync: error: ").replace("gradsync.errors.", "")


@dataclass(frozen=True)
class Report:
    """The result of `gradsync doctor`.

    Attributes:
        findings: the findings of the checks, in the order of the report.
        trials: the results of the backends' trials.
        asked_for: the backend that must work; if None, any backend that supports several ranks.
        seconds: the duration of the whole command.
    """

    findings: Sequence[Finding]
    trials: Sequence[Trial]
    asked_for: str | None
    seconds: float

    @property
    def working(self) -> list[str]:
        """The names of the backends whose trial gave the right result."""
        return [trial.backend for trial in self.trials if trial.works]

    @property
    def is_well(self) -> bool:
        """Whether no finding is BROKEN, and the trials, if any ran, found a working backend.

        This must be the backend `asked_for`; if that is None, any backend for several ranks.
        """
        if any(finding.status is Status.BROKEN for finding in self.findings):
            return False
        if not self.trials:  # --no-try
            return True
        if self.asked_for:
            return self.asked_for in self.working
        return any(not TABLE[name].single_rank for name in self.working)

    def verdict(self) -> str:
        """Returns the last line of the report."""
        names = ", ".join(self.working)
        if self.is_well and not self.trials:
            return "Nothing is broken; no backend was tried."
        if self.is_well:
            return f"Ready: {names} can be used here." if not self.asked_for else f"Ready: {self.asked_for} works here."
        broken = [finding.what for finding in self.findings if finding.status is Status.BROKEN]
        if broken:
            return f"Not ready: fix {', '.join(broken)} first."
        if self.asked_for:
            return f"Not ready: {self.asked_for} was requested, but does not work here."
        return "Not ready: no backend for two or more ranks works here."


def examine(here: Facts, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Runs all checks. If a check raises an exception, a finding reports the exception."""
    findings: list[Finding] = []
    for what, check in checks.items():
        try:
            found = check(here)
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {error}"
            found = warning(text, "please report this error; the other lines are not affected")
        lines = found if isinstance(found, list) else [] if found is None else [found]
        findings += [replace(finding, what=finding.what or what) for finding in lines]
    return findings


def as_dictionary(report: Report) -> dict[str, Any]:
    """Returns a report as a dictionary for JSON."""
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
    """Prints a report. Without `verbose`, it leaves out the findings that report no problem."""
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
    """Runs `gradsync doctor` with its options; returns the exit code."""
    began = time.monotonic()
    here = collect_facts(_PROBE_SECONDS)
    findings = examine(here)
    asked_for = backend or _asked_for_in(here.environ.get(BACKEND, ""))
    backends = (backend,) if backend else tuple(TABLE)
    trials: list[Trial] = []
    if tries:
        # Trials run in parallel, because most of their time is spent on starting processes.
        trials = in_parallel(lambda each: try_backend(each, here, findings, deadline_seconds), backends)
    report = Report(findings, trials, asked_for, time.monotonic() - began)
    if as_json:
        print(json.dumps(as_dictionary(report), indent=2))
    else:
        show(report, verbose=verbose)
    return 0 if report.is_well else 1


def _asked_for_in(value: str) -> str | None:
    """Returns the value of GRADSYNC_BACKEND if it is the name of a backend; else None."""
    return value if value in TABLE else None

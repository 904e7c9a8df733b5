"""The command `gradsync doctor`: runs the checks, tries an all-reduce with each backend, and prints the report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsync.backends import TABLE
from gradsync.doctor.checks import BROKEN, CHECKS, OK, UNUSABLE, WARNING, Check, Finding
from gradsync.doctor.facts import Facts, call, collect_facts, in_parallel
from gradsync.environment import BACKEND
from gradsync.machine import count_gpus

# Without these variables Open MPI refuses to run as root (the usual user in a container), and to start more ranks than
# there are cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def try_backend(backend: str, here: Facts, findings: Sequence[Finding], deadline_seconds: float) -> Finding:
    """Tries an all-reduce of 16 MB with one backend, unless the checks have found that the backend cannot work.

    Args:
        backend: the name of the backend, a key of TABLE.
        here: the facts about this machine.
        findings: the findings of the checks.
        deadline_seconds: the time limit of the trial, after which this function kills the processes of the trial.

    Returns:
        A finding. Its status is OK if the backend works, BROKEN if it does not work, and UNUSABLE if it was not tried.
    """
    reason = why_not(backend, here, findings)
    if reason is not None:
        return Finding(UNUSABLE, reason)
    return _run(backend, here, deadline_seconds)


def why_not(backend: str, here: Facts, findings: Sequence[Finding]) -> str | None:
    """Returns the reason why a backend is not tried; None if it can be tried."""
    row = TABLE[backend]
    if row.on_gpus and not here.has_gpu:
        return "this machine has no NVIDIA GPU"
    for finding in findings:
        if finding.what in row.doctor_lines and finding.status is UNUSABLE:
            return f'see the line "{finding.what}"'
    return None


def _ranks(backend: str, here: Facts) -> int:
    """Returns the number of ranks of a trial: 2, but 1 for the backend "local", and for "nccl" with only one GPU."""
    if TABLE[backend].on_gpus:
        return min(2, max(count_gpus(here.environ), 1))
    return 1 if TABLE[backend].single_rank else 2


def _run(backend: str, here: Facts, deadline_seconds: float) -> Finding:
    """Starts the ranks of trial.py, in processes of their own, because a backend may crash."""
    ranks = _ranks(backend, here)
    trial = ["-m", "gradsync.doctor.trial", backend]
    if TABLE[backend].under_mpiexec:
        words = ["mpiexec", "-n", str(ranks), "python", *trial]
        command = [str(here.mpiexec), "-n", str(ranks), sys.executable, *trial]
    else:
        words = ["gradsync", "run", "-n", str(ranks), "--backend", backend, *trial]
        command = [sys.executable, "-m", *words]
    advice = f"see the whole error: {' '.join(words)}"
    try:
        done = call(command, deadline_seconds, _OPEN_MPI)
    except OSError as error:
        return Finding(BROKEN, f"{type(error).__name__}: {error}")
    except subprocess.TimeoutExpired:
        return Finding(BROKEN, f"no answer within {deadline_seconds:.0f} s", advice)
    if done.returncode:
        return Finding(BROKEN, _cause(done), advice)
    if ranks == 1:
        alone = "" if TABLE[backend].single_rank else "; this machine has one GPU, and each rank needs its own GPU"
        return Finding(OK, f"works with one rank{alone}")
    return Finding(OK, f"works: {ranks} ranks summed arrays of 16 MB")


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error of a failed trial: a rank's last exception, else what gradsync run says, else the exit code."""
    lines = [line.strip() for line in done.stderr.splitlines()]
    of_ranks = [line for line in lines if re.match(r"[\w.]*[A-Z]\w+: ", line)]
    of_launcher = [line for line in lines if re.match(r"gradsync: (error|rank)", line)]
    cause = (of_ranks[-1:] or of_launcher or [f"the command ended with exit code {done.returncode}"])[0]
    return re.sub(r"^gradsync(\.errors\.|: error: |: )", "", cause).rstrip(":")


@dataclass(frozen=True)
class Report:
    """The result of `gradsync doctor`.

    Attributes:
        findings: the findings of the checks, in the order of the report.
        trials: by backend: the result of its trial; empty with --no-try.
        asked_for: the backend that must work, if backends were tried. If this is None, any tried backend is enough.
        seconds: the duration of the whole command.
    """

    findings: Sequence[Finding]
    trials: Mapping[str, Finding]
    asked_for: str | None
    seconds: float

    @property
    def working(self) -> list[str]:
        """The names of the backends whose trial gave the right result."""
        return [backend for backend, trial in self.trials.items() if trial.status is OK]

    @property
    def is_well(self) -> bool:
        """Whether no finding is BROKEN and, if backends were tried, the needed backend works; see `asked_for`."""
        if any(finding.status is BROKEN for finding in self.findings):
            return False
        if not self.trials:  # --no-try
            return True
        return self.asked_for in self.working if self.asked_for else bool(self.working)

    def verdict(self) -> str:
        """Returns the last line of the report."""
        names = ", ".join(self.working)
        if self.is_well and not self.trials:
            return "Nothing is broken; no backend was tried."
        if self.is_well:
            return f"Ready: {names} can be used here." if not self.asked_for else f"Ready: {self.asked_for} works here."
        broken = [finding.what for finding in self.findings if finding.status is BROKEN]
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
            found = Finding(WARNING, text, "please report this error; the other lines are not affected")
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
        "findings": list(map(asdict, report.findings)),
        "trials": {backend: asdict(trial) for backend, trial in report.trials.items()},
        "seconds": report.seconds,
    }


_LOG_WIDTH = 120  # the width of the report if standard output is not a terminal
_STYLES = {OK: "green", WARNING: "yellow", UNUSABLE: "dim", BROKEN: "bold red"}


def show(report: Report, *, verbose: bool) -> None:
    """Prints a report. Without `verbose`, this function leaves out the findings that report no problem."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _LOG_WIDTH)
    lines = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    shown = [finding for finding in report.findings if verbose or finding.status is not OK]
    for each in [*shown, *(replace(trial, what=f"backend {name}") for name, trial in report.trials.items())]:
        text = Text(each.text)
        if each.advice:
            text.append(f"\n-> {each.advice}", "cyan")
        lines.add_row(Text(each.status.value, _STYLES[each.status]), each.what, text)
    console.print(lines)
    fine = len(report.findings) - len(shown)
    console.print(f"\n{fine} more {'line is' if fine == 1 else 'lines are'} fine: -v shows them." if fine else "")
    console.print(
        Text(report.verdict(), "bold green" if report.is_well else "bold red"), Text(f"({report.seconds:.1f} s)", "dim")
    )


_PROBE_SECONDS = 6.0


def doctor(*, backend: str | None, as_json: bool, deadline_seconds: float, tries: bool, verbose: bool) -> int:
    """Runs `gradsync doctor` with its options; returns the exit code: 0 if the machine is ready, otherwise 1."""
    began = time.monotonic()
    here = collect_facts(_PROBE_SECONDS)
    findings = examine(here)
    asked_for = backend or (here.environ[BACKEND] if here.environ.get(BACKEND) in TABLE else None)
    # The backend for one rank works wherever NumPy works, so the doctor tries this backend only if the user names it.
    tried = tuple(name for name, row in TABLE.items() if name == asked_for or not row.single_rank)
    backends = (backend,) if backend else tried
    trials: dict[str, Finding] = {}
    if tries:
        # Trials run in parallel, because most of their time is spent on starting processes.
        results = in_parallel(lambda each: try_backend(each, here, findings, deadline_seconds), backends)
        trials = dict(zip(backends, results, strict=True))
    report = Report(findings, trials, asked_for, time.monotonic() - began)
    if as_json:
        print(json.dumps(as_dictionary(report), indent=2))
    else:
        show(report, verbose=verbose)
    return 0 if report.is_well else 1

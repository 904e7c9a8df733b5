"""All that the doctor found: the lines, the trials, and what follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.doctor.checks import CHECKS, Check
from gradsync.doctor.finding import Finding, Status, warning
from gradsync.doctor.surroundings import Surroundings
from gradsync.doctor.trials import Trial


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


def examine(here: Surroundings, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
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

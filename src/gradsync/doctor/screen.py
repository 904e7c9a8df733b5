"""A report as one screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsync.bench.report import print_table
from gradsync.doctor.finding import Status
from gradsync.doctor.report import Report
from gradsync.doctor.trials import Trial

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.UNUSABLE: "dim", Status.BROKEN: "bold red"}


def show(report: Report, console: Console | None = None) -> None:
    """Prints a report."""
    console = console or Console(highlight=False, soft_wrap=False)
    lines = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for finding in report.findings:
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
    console.print()
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

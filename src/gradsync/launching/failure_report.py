"""What a person reads when a run has failed: everything else first, and last the cause."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from gradsync.launching.outcome import Outcome, RankOutcome

_LAST_LINES = 8
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FAULTHANDLER_SAYS = "Fatal Python error"


def failure_text(outcome: Outcome) -> str:
    """Tells why a run failed: what else failed, a line for equal errors, and last the cause with its traceback.

    Returns:
        Whole lines; none where nothing failed, or ranks only ended as they were asked to.
    """
    root = outcome.root_cause
    if root is None:
        return ""
    others = [rank for rank in outcome.ranks if rank is not root]
    hanging = [f"gradsync: {rank.describe()}\n" for rank in others if rank.exit_code is None]
    if outcome.signal_number is not None and root.was_stopped and root.exit_code is not None:
        return "".join(hanging)  # ranks that end because they were asked to are no news
    lines = [f"gradsync: {line}\n" for line in _also_failed(others)] + hanging
    lines += [
        f"gradsync: rank {rank.rank} (pid {rank.pid}) had ended with exit code 0\n"
        for rank in others
        if rank.exit_code == 0 and rank.rank in _missed_ranks(outcome)
    ]
    lines += [
        f"gradsync: rank {rank.rank} (pid {rank.pid}) stood still, stopped by a signal (SIGSTOP?)\n"
        for rank in others
        if rank.was_found_stopped
    ]
    text = root.error.text if root.error else ""
    if others:  # the output of a single rank stands right above
        lines += _last_output(root)
    how = _how_to_see_where(root) + _on_whose_account(root)
    lines.append(f"gradsync: {root.describe()}{how}{':' if text else ''}\n{text}")
    return "".join(lines)


def lines_on_others(outcome: Outcome) -> str:
    """Tells what failed here of a run whose cause was on another machine: whole lines, without tracebacks."""
    hanging = [f"gradsync: {rank.describe()}\n" for rank in outcome.ranks if rank.exit_code is None]
    return "".join([f"gradsync: {line}\n" for line in _also_failed(outcome.ranks)] + hanging)


def _last_output(rank: RankOutcome) -> list[str]:
    """Gives the end of a rank's output, which may stand far above among that of other ranks."""
    if not rank.last_lines:
        return []
    shown = [f"    {line}\n" for line in rank.last_lines[-_LAST_LINES:]]
    return [f"gradsync: the last output of rank {rank.rank}:\n", *shown]


def _how_to_see_where(rank: RankOutcome) -> str:
    """Tells what shows the Python stack of a fault in machine code, which has no traceback, unless it was shown."""
    is_fault = rank.exit_code is not None and -rank.exit_code in _FAULTS
    was_shown = any(_FAULTHANDLER_SAYS in line for line in rank.last_lines)
    return "; with PYTHONFAULTHANDLER=1 Python tells where" if is_fault and not was_shown else ""


def _on_whose_account(rank: RankOutcome) -> str:
    """Names the rank whose absence this one failed of, when no other failure tells more."""
    if rank.error is None or not rank.error.is_consequence or rank.error.missed_rank in (None, rank.rank):
        return ""
    return f", because of rank {rank.error.missed_rank}"


def _also_failed(ranks: Iterable[RankOutcome]) -> list[str]:
    """Gives a line for each different error, with all ranks that it ended."""
    by_text: dict[str, list[RankOutcome]] = {}
    for rank in ranks:
        if rank.error is not None:
            text = re.sub(rf"\brank {rank.rank}/\d+: ", "", rank.error.summary, count=1).rstrip(": ")
            by_text.setdefault(text, []).append(rank)
    return [
        f"rank{'s' * several} {_ranges(rank.rank for rank in group)} "
        f"(pid{'s' * several} {_ranges(rank.pid for rank in group)}) also failed: {text}"
        for text, group in by_text.items()
        for several in [len(group) > 1]
    ]


def _missed_ranks(outcome: Outcome) -> set[int | None]:
    """Gives the ranks whose absence others failed of."""
    return {rank.error.missed_rank for rank in outcome.ranks if rank.error is not None}


def _ranges(numbers: Iterable[int]) -> str:
    """Gives "0, 2-15" for these numbers."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

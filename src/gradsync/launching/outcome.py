"""How a run ended: how each rank ended, which rank was the cause, and the report for the user."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from typing import NamedTuple

from gradsync.errors import name_ranks, size_text
from gradsync.launching.out_of_memory import kind_of_memory
from gradsync.launching.rank_report import ErrorReport, ReturnValue

_LAST_LINES = 8
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_FAULTHANDLER_SAYS = "Fatal Python error"


class RankOutcome(NamedTuple):
    """How one rank ended.

    Attributes:
        rank: the number of the rank.
        pid: the rank's process id.
        exit_code: the rank's exit code; -n if signal n killed the rank; None if it could not be killed.
        result: the return value, if the rank ran a function.
        error: the exception that ended the rank, if it reported one.
        order: the rank's position among the failures, in the order of their detection; None if it did not fail.
        was_asked_to_end: whether the rank failed only after the supervisor had asked it to end.
        memory_kill: the reason, in words, if the kernel's out-of-memory killer ended the rank; else None.
        was_paused: whether a signal such as SIGSTOP had paused the rank when the first rank failed.
        peak_bytes: the rank's peak memory, in bytes.
        last_lines: the last lines of the rank's output, if the launcher shows the output.
    """

    rank: int
    pid: int
    exit_code: int | None
    result: ReturnValue | None = None
    error: ErrorReport | None = None
    order: int | None = None
    was_asked_to_end: bool = False
    memory_kill: str | None = None
    was_paused: bool = False
    peak_bytes: int = 0
    last_lines: tuple[str, ...] = ()

    @property
    def is_unsendable(self) -> bool:
        """Whether the rank's function ended well, and only the return value could not be sent."""
        return self.error is not None and self.error.is_unsendable

    @property
    def name(self) -> str:
        """The rank and its process, in words."""
        return f"rank {self.rank} (pid {self.pid} on {os.uname().nodename})"

    def describe(self) -> str:
        """Returns the rank, its process and how it ended, in words."""
        name = self.name
        if self.exit_code is None:
            return f"{name} could not be killed; it may hang in the kernel"
        if self.memory_kill is not None:
            return f"{name} was killed by SIGKILL: {self.memory_kill}; it had used {size_text(self.peak_bytes)}"
        if self.exit_code < 0:
            return f"{name} was killed by {signal_name(-self.exit_code)}"
        return f"{name} failed with exit code {self.exit_code}{self.out_of_memory}"

    @property
    def out_of_memory(self) -> str:
        """The text ", out of host memory" or ", out of GPU memory" if the rank lacked memory; else ""."""
        lack = None if self.error is None else kind_of_memory(self.error.summary)
        return "" if lack is None else f", out of {lack}"


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        ranks: how each rank ended, in the order of the ranks.
        signal_number: the number of the signal that the launcher received, and that ended the run; None without a
            signal.
    """

    ranks: tuple[RankOutcome, ...]
    signal_number: int | None = None

    @property
    def root_cause(self) -> RankOutcome | None:
        """The rank whose failure came first and did not follow from another rank's failure; None if no rank failed."""
        failed = [rank for rank in self.ranks if rank.order is not None]
        return min(failed, key=distance_from_cause, default=None)

    @property
    def failed_alike(self) -> list[RankOutcome]:
        """The root cause, and the ranks that raised the same error independently, such as PlanMismatch."""
        root = self.root_cause
        return [rank for rank in self.ranks if root is not None and (rank is root or _raised_the_same(rank, root))]

    def describe_cause(self) -> str:
        """Returns the ranks that failed first, and how they ended, in words; "" if no rank failed."""
        root, alike = self.root_cause, self.failed_alike
        if root is None:
            return ""
        if len(alike) > 1:
            ranks = name_ranks([rank.rank for rank in alike])
            return f"{ranks} failed with the same error{root.out_of_memory}; this is the error of {root.name}"
        return root.describe() + _how_to_see_where(root) + _because_of(root)

    @property
    def may_be_tried_again(self) -> bool:
        """Whether a restart is possible: a rank failed, and all ranks have ended, so that none still holds a GPU."""
        root = self.root_cause
        return self.signal_number is None and root is not None and all(r.exit_code is not None for r in self.ranks)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: 128 + n after signal n, else the root cause's exit code; 0 if no rank failed."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        root = self.root_cause
        if root is None:
            return 0
        if root.exit_code is None:
            return 1
        return root.exit_code if root.exit_code >= 0 else 128 - root.exit_code


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def distance_from_cause(rank: RankOutcome) -> tuple[int, int]:
    """Returns the sort key of a failure: failures nearest to the cause come first.

    Returns:
        The level, and the rank's position among the failures, in the order of their detection. The levels are:
        0: the rank itself failed.
        1: the rank itself failed, after the launcher had asked the ranks to end.
        2: the rank failed because another rank had failed.
        3: the rank ended because the launcher had asked it to end.
        4: the rank's result could not be sent.
    """
    if rank.is_unsendable:
        return 4, rank.order or 0
    is_own_error = rank.error is not None and not rank.error.is_consequence
    if not rank.was_asked_to_end:
        level = 0 if rank.error is None or is_own_error else 2
    else:
        level = 1 if is_own_error else 3
    return level, rank.order or 0


def failure_text(outcome: Outcome) -> str:
    """Returns the report of a failed run: one line per error of other ranks, then the cause with its traceback.

    Returns:
        The report; "" if no rank failed, or if the ranks ended only because the launcher received a signal.
    """
    root = outcome.root_cause
    if root is None:
        return ""
    alike = outcome.failed_alike
    others = [rank for rank in outcome.ranks if rank not in alike]
    hanging = [f"gradsync: {rank.describe()}\n" for rank in others if rank.exit_code is None]
    if outcome.signal_number is not None and root.was_asked_to_end and root.exit_code is not None:
        return "".join(hanging)  # the ranks ended because the launcher asked them to
    lines = [f"gradsync: {line}\n" for line in _also_failed(others)] + hanging
    lines += [
        f"gradsync: rank {rank.rank} (pid {rank.pid}) ended with exit code 0 before this failure\n"
        for rank in others
        if rank.exit_code == 0 and rank.rank in _missed_ranks(outcome)
    ]
    lines += [
        f"gradsync: rank {rank.rank} (pid {rank.pid}) was paused by a signal (SIGSTOP?)\n"
        for rank in others
        if rank.was_paused
    ]
    text = root.error.text if root.error else ""
    if len(outcome.ranks) > 1:  # a single rank's output is right above the report
        missed = root.error.missed_rank if root.error is not None and root.error.is_consequence else None
        lines += _last_output(next((rank for rank in outcome.ranks if rank.rank == missed), root))
    lines.append(f"gradsync: {outcome.describe_cause()}{':' if text else ''}\n{text}")
    return "".join(lines)


def _raised_the_same(rank: RankOutcome, root: RankOutcome) -> bool:
    if rank.error is None or root.error is None or rank.error.is_consequence or root.error.is_consequence:
        return False
    return rank.exit_code is not None and _error_text(rank, rank.error) == _error_text(root, root.error)


def _error_text(rank: RankOutcome, error: ErrorReport) -> str:
    """Returns an error's type and message, without the number of the rank that raised it."""
    return re.sub(rf"\brank {rank.rank}/\d+: ", "", error.summary, count=1).rstrip(": ")


def lines_on_others(outcome: Outcome) -> str:
    """Returns lines about this machine's failed ranks, without tracebacks; the cause is on another machine."""
    hanging = [f"gradsync: {rank.describe()}\n" for rank in outcome.ranks if rank.exit_code is None]
    return "".join([f"gradsync: {line}\n" for line in _also_failed(outcome.ranks)] + hanging)


def _last_output(rank: RankOutcome) -> list[str]:
    """Returns a rank's last lines of output, for the report: other ranks may have printed many lines after them."""
    if not rank.last_lines:
        return []
    shown = [f"    {line}\n" for line in rank.last_lines[-_LAST_LINES:]]
    return [f"gradsync: the last output of rank {rank.rank}:\n", *shown]


def _how_to_see_where(rank: RankOutcome) -> str:
    """Returns advice to see the Python stack of a crash in native code; "" if faulthandler has printed the stack."""
    is_fault = rank.exit_code is not None and -rank.exit_code in _FAULTS
    was_shown = any(_FAULTHANDLER_SAYS in line for line in rank.last_lines)
    return "; with PYTHONFAULTHANDLER=1 Python prints the stack at the crash" if is_fault and not was_shown else ""


def _because_of(rank: RankOutcome) -> str:
    """Returns a text such as ", because of rank 1" if the absence of rank 1 made this rank fail; "" otherwise."""
    if rank.error is None or not rank.error.is_consequence or rank.error.missed_rank in (None, rank.rank):
        return ""
    return f", because of rank {rank.error.missed_rank}"


def _also_failed(ranks: Iterable[RankOutcome]) -> list[str]:
    """Returns a line for each different error, with the ranks that raised this error."""
    by_text: dict[str, list[RankOutcome]] = {}
    for rank in ranks:
        if rank.error is not None:
            by_text.setdefault(_error_text(rank, rank.error), []).append(rank)
    return [
        f"rank{'s' * several} {_ranges(rank.rank for rank in group)} "
        f"(pid{'s' * several} {_ranges(rank.pid for rank in group)}) also failed: {text}"
        for text, group in by_text.items()
        for several in [len(group) > 1]
    ]


def _missed_ranks(outcome: Outcome) -> set[int | None]:
    """Returns the ranks whose absence made others fail."""
    return {rank.error.missed_rank for rank in outcome.ranks if rank.error is not None}


def _ranges(numbers: Iterable[int]) -> str:
    """Returns numbers as text with ranges, such as "0, 2-15"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

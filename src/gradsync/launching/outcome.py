"""How a run ended: how each rank ended, which rank was the cause, and the report for the user."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gradsync.errors import name_ranks, size_text
from gradsync.launching.in_rank.result import ErrorReport, ReturnValue
from gradsync.machine import memory_groups, numbered_line

_LAST_LINES = 8
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


@dataclass(eq=False)
class RankOutcome:
    """How one rank ended, as far as the launcher knows.

    Attributes:
        rank: the number of the rank.
        pid: the rank's process id, which is also the id of its session and process group; 0 until the rank has begun.
        exit_code: the rank's exit code; -n if signal n killed the rank; None if the rank still runs, or could not be
            killed. If the rank has reported an error, exit_code is 1, whatever the exit code of its process is.
        result: the return value, if the rank ran a function.
        error: the exception that ended the rank, if the rank reported an exception.
        order: the rank's position among the failures, in the order of their detection; None if the rank did not fail.
        was_asked_to_end: whether the rank failed only after the supervisor had asked the rank to end.
        memory_kill: whether the kernel's out-of-memory killer ended the rank.
        was_paused: whether a signal such as SIGSTOP had paused the rank when the first rank failed.
        peak_bytes: the peak memory in bytes of the rank, or of a child process of the rank with a larger peak; 0 until
            the rank has ended.
        last_lines: the last lines of the rank's output, if the launcher shows the output.
    """

    rank: int
    pid: int = 0
    exit_code: int | None = None
    result: ReturnValue | None = None
    error: ErrorReport | None = None
    order: int | None = None
    was_asked_to_end: bool = False
    memory_kill: bool = False
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
        if self.exit_code < 0:
            return f"{name} was killed by {signal_name(-self.exit_code)}{self.out_of_memory}"
        return f"{name} failed with exit code {self.exit_code}"

    @property
    def out_of_memory(self) -> str:
        """The end of a sentence about a rank that the kernel's out-of-memory killer ended; "" for other ranks."""
        if not self.memory_kill:
            return ""
        return f": the kernel's out-of-memory killer ended it; it had used {size_text(self.peak_bytes)}"


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        ranks: how each rank ended, in the order of the ranks.
        signal_number: the number of the signal that the launcher received, and that ended the run; None without a
            signal.
        has_joined: whether a rank has joined the rendezvous, as far as this launcher knows.
    """

    ranks: tuple[RankOutcome, ...]
    signal_number: int | None = None
    has_joined: bool = True

    @property
    def root_cause(self) -> RankOutcome | None:
        """The rank whose failure is nearest to the cause, see `distance_from_cause`; None if no rank failed."""
        failed = [rank for rank in self.ranks if rank.order is not None]
        return min(failed, key=distance_from_cause, default=None)

    @property
    def failed_alike(self) -> list[RankOutcome]:
        """The root cause, and the ranks that raised the same error independently, such as PlanMismatch."""
        root = self.root_cause
        return [rank for rank in self.ranks if root is not None and (rank is root or _raised_the_same(rank, root))]

    def describe_cause(self) -> str:
        """Returns the root cause (all ranks of `failed_alike`) and how it ended, in words; "" if no rank failed."""
        root, alike = self.root_cause, self.failed_alike
        if root is None:
            return ""
        if len(alike) > 1:
            ranks = name_ranks([rank.rank for rank in alike])
            return f"{ranks} failed with the same error; this is the error of {root.name}"
        return root.describe() + _how_to_see_where(root) + _because_of(root)

    @property
    def may_be_tried_again(self) -> bool:
        """Whether a restart is possible: a rank failed, no signal came, and no rank still runs and holds a GPU."""
        root = self.root_cause
        return self.signal_number is None and root is not None and all(r.exit_code is not None for r in self.ranks)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code.

        0 without a failure. 128 + n if signal n came to the launcher or killed the root cause. 1 if gradsync could not
        kill the root cause. Otherwise the root cause's exit code.
        """
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
    """Returns the report of a failed run: lines about the other ranks, then the cause with its traceback.

    Returns:
        The report; "" if no rank failed. If the ranks ended only because the launcher received a signal, the report
        contains only the ranks that could not be killed.
    """
    root = outcome.root_cause
    if root is None:
        return ""
    alike = outcome.failed_alike
    others = [rank for rank in outcome.ranks if rank not in alike]
    if outcome.signal_number is not None and root.was_asked_to_end and root.exit_code is not None:
        return "".join(_hanging(others))  # the ranks ended because the launcher asked them to end
    missed = {rank.error.missed_rank for rank in outcome.ranks if rank.error is not None}
    lines = _lines_on_others(others)
    for rank in others:
        name = f"gradsync: rank {rank.rank} (pid {rank.pid})"
        if rank.exit_code == 0 and rank.rank in missed:
            lines.append(f"{name} ended with exit code 0 before this failure\n")
        if rank.was_paused:
            lines.append(f"{name} was paused by a signal (SIGSTOP?)\n")
    return "".join(lines) + _cause_text(outcome, root)


def _cause_text(outcome: Outcome, root: RankOutcome) -> str:
    """Returns the last part of the report of a failed run: the cause, and its traceback."""
    text = root.error.text if root.error else ""
    missed = root.error.missed_rank if root.error is not None and root.error.is_consequence else None
    shown = next((rank for rank in outcome.ranks if rank.rank == missed), root)
    lines = ""
    # The last output of a single rank is right above the report. With several ranks, others may have printed later.
    if len(outcome.ranks) > 1 and shown.last_lines:
        last_lines = "".join(f"    {line}\n" for line in shown.last_lines[-_LAST_LINES:])
        lines = f"gradsync: the last output of rank {shown.rank}:\n{last_lines}"
    return f"{lines}gradsync: {outcome.describe_cause()}{':' if text else ''}\n{text}"


def _lines_on_others(ranks: Iterable[RankOutcome]) -> list[str]:
    """Returns lines about failed ranks, without tracebacks: one for each different error, and for each hanging rank."""
    by_text: dict[str, list[RankOutcome]] = {}
    for rank in ranks:
        if rank.error is not None:
            by_text.setdefault(_error_text(rank, rank.error), []).append(rank)
    lines = [
        f"gradsync: {name_ranks([rank.rank for rank in group])} also failed: {text}\n"
        for text, group in by_text.items()
    ]
    return lines + _hanging(ranks)


def _hanging(ranks: Iterable[RankOutcome]) -> list[str]:
    return [f"gradsync: {rank.describe()}\n" for rank in ranks if rank.exit_code is None]


def _raised_the_same(rank: RankOutcome, root: RankOutcome) -> bool:
    if rank.error is None or root.error is None or rank.error.is_consequence or root.error.is_consequence:
        return False
    return rank.exit_code is not None and _error_text(rank, rank.error) == _error_text(root, root.error)


def _error_text(rank: RankOutcome, error: ErrorReport) -> str:
    """Returns an error's type and message, without the number of the rank that raised it."""
    return re.sub(rf"\brank {rank.rank}/\d+: ", "", error.summary, count=1).rstrip(": ")


def _how_to_see_where(rank: RankOutcome) -> str:
    """Returns advice to see the Python stack of a crash in native code; "" if Python prints the stack already."""
    is_fault = rank.exit_code is not None and -rank.exit_code in _FAULTS
    has_handler = bool(os.environ.get("PYTHONFAULTHANDLER"))
    return "; with PYTHONFAULTHANDLER=1 Python prints the stack at the crash" if is_fault and not has_handler else ""


def _because_of(rank: RankOutcome) -> str:
    """Returns a text such as ", because of rank 1" if the absence of rank 1 made this rank fail; "" otherwise."""
    if rank.error is None or not rank.error.is_consequence or rank.error.missed_rank in (None, rank.rank):
        return ""
    return f", because of rank {rank.error.missed_rank}"


class OomWatch:
    """Tells whether a SIGKILL came from the kernel's out-of-memory killer.

    The kernel counts the processes that the killer has ended in this process's control group, which ranks share
    (memory.events, in version 2 of cgroups). A program may survive the end of one of its processes, and a SIGKILL of
    hours later has another cause. So call `look` from time to time.

    Args:
        root: a folder that tests use instead of "/".
    """

    def __init__(self, root: str = "") -> None:
        groups = memory_groups(root)
        self._events = f"{groups[0]}/memory.events" if groups else os.devnull
        self._before = self._last = self._count()

    def look(self) -> None:
        """Reads the count."""
        self._before, self._last = self._last, self._count()

    def has_killed(self) -> bool:
        """Returns whether the killer has ended a process since the last look but one.

        A process with much memory may end seconds after the killer has chosen it, and the last look may be in between.
        """
        return self._count() > self._before

    def _count(self) -> int:
        return numbered_line(self._events, "oom_kill") or 0

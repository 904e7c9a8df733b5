"""How a run ended: how each rank ended, which rank was the cause, and the report for the user."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gradsync.errors import count, name_ranks, size_text
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
        exit_code: the rank's exit code; -n if signal n killed it; None if it still runs, or could not be killed; 1 if
            it has reported an error.
        result: the return value, if the rank ran a function.
        error: the exception that ended the rank, if it has reported one.
        order: the rank's position among the failures, as they were found; None if it did not fail.
        was_asked_to_end: whether it failed only after it had been asked to end.
        memory_kill: whether the kernel's out-of-memory killer ended it.
        was_paused: whether a signal such as SIGSTOP had paused it when the first rank failed.
        peak_bytes: the peak memory of the rank, or of the largest process that it started; 0 until it has ended.
        last_lines: the last lines of its output, if the launcher shows that.
        given_up: why the others gave the rank up, so that the launcher killed it; "" if they did not.
        ended_after: the seconds from the start of the run to the failure.
        is_replaced: whether the rank was to be started again, see `Outcome.earlier`.
        is_awaited: whether the process that was started in its place has not joined the others.
        went_on_after: the seconds from the failure until the other ranks had formed a new world; None if they have not,
            as far as this launcher knows.
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
    given_up: str = ""
    ended_after: float = 0.0
    is_replaced: bool = False
    is_awaited: bool = False
    went_on_after: float | None = None

    @property
    def is_unsendable(self) -> bool:
        """Whether the rank's function ended well, and only the return value could not be sent."""
        return self.error is not None and self.error.is_unsendable

    @property
    def name(self) -> str:
        """The rank and its process, in words."""
        process = f"pid {self.pid} " if self.pid else ""  # none: it was killed before it was there
        return f"rank {self.rank} ({process}on {os.uname().nodename})"

    def describe(self) -> str:
        """Returns the rank, its process and how it ended, in words."""
        name = self.name
        if self.exit_code is None:
            return f"{name} could not be killed; it may hang in the kernel"
        return f"{name} {self.describe_end()}"

    def describe_end(self) -> str:
        """Returns how a rank that has failed did so, in words."""
        if self.given_up:
            why, _, _ = self.given_up.partition("\n")
            return f"was killed, as the others gave it up: {why}"
        if self.exit_code is not None and self.exit_code < 0:
            return f"was killed by {signal_name(-self.exit_code)}{self.out_of_memory}"
        return f"failed with exit code {self.exit_code}"

    @property
    def text(self) -> str:
        """The traceback of the rank's error, or where it was when the others gave it up; "" if neither is known."""
        if self.error is not None:
            return self.error.text
        where = re.search(r"^missing: (.*?\n)\n", self.given_up, re.DOTALL | re.MULTILINE)
        return where[1] if where else ""

    @property
    def out_of_memory(self) -> str:
        """The end of a sentence about a rank that the kernel's out-of-memory killer ended; "" for other ranks."""
        if not self.memory_kill:
            return ""
        return f": the kernel's out-of-memory killer ended it; it had used {size_text(self.peak_bytes)}"


class FormedWorld(NamedTuple):
    """A world that ranks have formed.

    Attributes:
        number: counted from 1, which is the world that all ranks have formed at their start.
        ranks: its ranks, by their numbers at the launch.
        seconds: how long it took since the failure.
    """

    number: int
    ranks: tuple[int, ...]
    seconds: float


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        ranks: how each rank ended, in the order of the ranks; the last process of a rank that was started again.
        signal_number: the number of the signal that the launcher received, and that ended the run; None without a
            signal.
        has_joined: whether a rank has joined the rendezvous, as far as this launcher knows.
        earlier: how the earlier processes of ranks that were started again ended.
        needed: how many ranks of this launcher have to end well; None means all.
        min_ranks: how many ranks of the run have to end well; None means all.
        worlds: those that the ranks have formed, as far as this launcher knows.
        is_state_lost: whether all ranks have failed that had the state of the training, though new ones were there.
    """

    ranks: tuple[RankOutcome, ...]
    signal_number: int | None = None
    has_joined: bool = True
    earlier: tuple[RankOutcome, ...] = ()
    needed: int | None = None
    min_ranks: int | None = None
    worlds: tuple[FormedWorld, ...] = ()
    is_state_lost: bool = False

    @property
    def rebuilt(self) -> list[FormedWorld]:
        """The worlds that the ranks have formed after that of their start."""
        return [world for world in self.worlds if world.number > 1]

    @property
    def failures(self) -> list[RankOutcome]:
        """All failures, in the order of their detection."""
        failed = [rank for rank in (*self.earlier, *self.ranks) if rank.order is not None]
        return sorted(failed, key=lambda rank: rank.order or 0)

    @property
    def root_cause(self) -> RankOutcome | None:
        """The rank whose failure is nearest to the cause, see `distance_from_cause`; None if no rank failed.

        A failure that the other ranks have survived is not why a run ended later.
        """
        failures = self.failures
        fatal = [rank for rank in failures if rank.went_on_after is None]
        return min(fatal or failures, key=distance_from_cause, default=None)

    @property
    def failed_alike(self) -> list[RankOutcome]:
        """The root cause, and the ranks that raised the same error independently, such as PlanMismatch."""
        root = self.root_cause
        ranks = (*self.earlier, *self.ranks)
        return [rank for rank in ranks if root is not None and (rank is root or _raised_the_same(rank, root))]

    def describe_cause(self) -> str:
        """Returns the root cause (all ranks of `failed_alike`) and how it ended, in words; "" if no rank failed."""
        root, alike = self.root_cause, sorted({rank.rank for rank in self.failed_alike})
        if root is None:
            return ""
        if len(alike) > 1:
            return f"{name_ranks(alike)} failed with the same error; this is the error of {root.name}"
        return root.describe() + _how_to_see_where(root) + _because_of(root)

    @property
    def may_be_tried_again(self) -> bool:
        """Whether a restart is possible: a rank failed, no signal came, and no rank still runs and holds a GPU."""
        root = self.root_cause
        is_over = root is not None and all(rank.exit_code is not None for rank in self.ranks)
        return self.signal_number is None and is_over and not self.has_enough

    @property
    def ended_well(self) -> int:
        """The number of ranks that ended with exit code 0."""
        return sum(rank.exit_code == 0 for rank in self.ranks)

    @property
    def has_enough(self) -> bool:
        """Whether so many ranks ended well that the run did."""
        return self.ended_well >= (len(self.ranks) if self.needed is None else self.needed)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code.

        0 without a failure, or if enough ranks ended well. 128 + n if signal n came to the launcher or killed the root
        cause. 1 if gradsync could not kill the root cause. Otherwise the root cause's exit code.
        """
        if self.signal_number is not None:
            return 128 + self.signal_number
        root = self.root_cause
        if root is None or self.has_enough:
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
        The level, and the rank's position among the failures, as they were found. The levels are:
        0: it failed itself.
        1: it failed itself, after the launcher had asked the ranks to end.
        2: it failed because another rank had failed.
        3: it ended because the launcher had asked it to.
        4: its result could not be sent.
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
    """Returns the report of a run with failed ranks: lines about the other ranks, then the cause with its traceback.

    Returns:
        The report; "" if no rank failed. If the run went on without those that failed, it has these, and what they
        cost. If a signal to the launcher ended the run, only those that could not be killed, or had failed before.
    """
    root = outcome.root_cause
    if root is None:
        return ""
    if outcome.signal_number is None and outcome.has_enough:
        return "".join(map(_death_text, outcome.failures)) + _summary(outcome)
    survived = "".join(_death_text(rank) for rank in outcome.failures if rank.went_on_after is not None)
    alike = outcome.failed_alike
    others = [rank for rank in outcome.ranks if rank not in alike and rank.went_on_after is None]
    if outcome.signal_number is not None and root.was_asked_to_end and root.exit_code is not None:
        return survived + "".join(_hanging(others))  # the ranks ended because the launcher asked them to end
    missed = {rank.error.missed_rank for rank in outcome.ranks if rank.error is not None}
    lines = _lines_on_others(others)
    for rank in others:
        name = f"gradsync: rank {rank.rank} (pid {rank.pid})"
        if rank.exit_code == 0 and rank.rank in missed:
            lines.append(f"{name} ended with exit code 0 before this failure\n")
        if rank.was_paused:
            lines.append(f"{name} was paused by a signal (SIGSTOP?)\n")
    return survived + "".join(lines) + _too_few(outcome) + _cause_text(outcome, root)


def _death_text(rank: RankOutcome) -> str:
    """Returns the part of the report about a rank without which the others went on."""
    again = "; it was started again" if rank.is_replaced else ""
    again += ", but has not joined" if rank.is_awaited else ""
    later = "" if rank.went_on_after is None else f"; the others went on {rank.went_on_after:.2f} s later"
    died = f"gradsync: after {rank.ended_after:.1f} s {rank.describe()}{again}{later}"
    return f"{_last_output(rank)}{died}{':' if rank.text else ''}\n{rank.text}"


def _summary(outcome: Outcome) -> str:
    """Returns the last line of the report of a run that ended well without some ranks."""
    seconds = [world.seconds for world in outcome.rebuilt]
    cost = f" and {count(len(seconds), 'rebuild')} of {sum(seconds):.2f} s" if seconds else ""
    cost += " in all" if len(seconds) > 1 else ""
    well = f"{outcome.ended_well} of {count(len(outcome.ranks), 'rank')} ended well"
    return f"gradsync: {well}, after {count(len(outcome.failures), 'failure')}{cost}\n"


def _too_few(outcome: Outcome) -> str:
    """Returns the lines that say why the other ranks did not go on, if they were to."""
    if outcome.signal_number is not None:
        return ""
    if outcome.min_ranks is None:
        sizes = [len(world.ranks) for world in outcome.worlds]
        if not sizes or sizes[-1] >= sizes[0]:
            return ""
        them, option = count(sizes[-1], "rank"), f"gradsync run --min-ranks {sizes[-1]}"
        return f"gradsync: gs.rebuild() had made a new world of {them}: with {option} they would have gone on\n"
    dead = [rank for rank in outcome.failures if not rank.was_asked_to_end and rank.went_on_after is None]
    lines = [f"gradsync: {rank.describe()}\n" for rank in dead if rank.error is None and rank is not outcome.root_cause]
    if not outcome.rebuilt and any(rank.error is not None and rank.error.is_consequence for rank in dead):
        lines.append(
            "gradsync: to go on without a rank, the others need to catch gs.RankFailed and gs.CollectiveTimeout, and "
            "to call gs.rebuild()\n"
        )
    default = ", by default all" if outcome.min_ranks == len(outcome.ranks) else ""
    enough = f"fewer than {count(outcome.min_ranks, 'rank')} are left (--min-ranks{default})"
    if outcome.is_state_lost:
        enough = "no rank is left that has the state of the training, and new ones would begin at the start"
    elif outcome.needed == 1:
        enough = "no rank is left here"
    return "".join(lines) + f"gradsync: {enough}\n"


def _last_output(rank: RankOutcome) -> str:
    if not rank.last_lines:
        return ""
    last_lines = "".join(f"    {line}\n" for line in rank.last_lines[-_LAST_LINES:])
    return f"gradsync: the last output of rank {rank.rank}:\n{last_lines}"


def _cause_text(outcome: Outcome, root: RankOutcome) -> str:
    """Returns the last part of the report of a failed run: the cause, and its traceback."""
    missed = root.error.missed_rank if root.error is not None and root.error.is_consequence else None
    shown = next((rank for rank in (*outcome.failures, *outcome.ranks) if rank.rank == missed), root)
    # The last output of a single rank is right above the report. With several ranks, others may have printed later.
    lines = _last_output(shown) if len(outcome.ranks) > 1 else ""
    return f"{lines}gradsync: {outcome.describe_cause()}{':' if root.text else ''}\n{root.text}"


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

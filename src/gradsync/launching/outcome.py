"""How a run ended: per rank, and which rank's failure was the cause of the others'."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from gradsync.launching.out_of_memory import kind_of_memory
from gradsync.launching.rank_process import ErrorReport
from gradsync.launching.return_value import ReturnValue


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: the rank.
        pid: its process id.
        exit_code: its exit code; negative: the signal that killed it; None: it could not be killed.
        result: the return value, for functions.
        error: the exception that ended it, where it told one.
        order: position among the failures, in the order of their detection; None when it did not fail.
        was_stopped: whether it failed only after the supervisor had told it to stop.
        memory_kill: how the kernel's out-of-memory killer ended it, where that is what happened.
        was_found_stopped: whether a signal such as SIGSTOP held it when the first rank failed.
        peak_bytes: the most memory that it had in use.
        last_lines: the end of its output, where the launcher shows it.
    """

    rank: int
    pid: int
    exit_code: int | None
    result: ReturnValue | None = None
    error: ErrorReport | None = None
    order: int | None = None
    was_stopped: bool = False
    memory_kill: str | None = None
    was_found_stopped: bool = False
    peak_bytes: int = 0
    last_lines: tuple[str, ...] = ()

    @property
    def is_unsendable(self) -> bool:
        """Whether it did its work, and only what its function returned could not be sent."""
        return self.error is not None and self.error.is_unsendable

    def describe(self) -> str:
        """Names the rank, its process and how it ended."""
        name = f"rank {self.rank} (pid {self.pid} on {os.uname().nodename})"
        if self.exit_code is None:
            return f"{name} could not be killed; it may hang in the kernel"
        if self.memory_kill is not None:
            return f"{name} was killed by SIGKILL: {self.memory_kill}; it had used {self.peak_bytes / 2**30:.2f} GiB"
        if self.exit_code < 0:
            return f"{name} was killed by {signal_name(-self.exit_code)}"
        lack = None if self.error is None else kind_of_memory(self.error.summary)
        return f"{name} failed with exit code {self.exit_code}" + ("" if lack is None else f", out of {lack}")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        ranks: each rank's end, by rank.
        signal_number: the signal that ended the run, when one was sent to the launcher.
    """

    ranks: tuple[RankOutcome, ...]
    signal_number: int | None = None

    @property
    def root_cause(self) -> RankOutcome | None:
        """The rank whose failure came first and was not caused by another's; None when none failed."""
        failed = [rank for rank in self.ranks if rank.order is not None]
        return min(failed, key=distance_from_cause, default=None)

    @property
    def may_be_tried_again(self) -> bool:
        """Whether a rank failed, and all have ended: one that cannot be killed would still hold what it holds."""
        root = self.root_cause
        return self.signal_number is None and root is not None and all(r.exit_code is not None for r in self.ranks)

    @property
    def exit_code(self) -> int:
        """Exit code for the launcher: 128 + n for a signal, the failing rank's, or 0."""
        if self.signal_number is not None:
            return 128 + self.signal_number
        root = self.root_cause
        if root is None:
            return 0
        if root.exit_code is None:
            return 1
        return root.exit_code if root.exit_code >= 0 else 128 - root.exit_code


def signal_name(number: int) -> str:
    """Gives "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def distance_from_cause(rank: RankOutcome) -> tuple[int, int]:
    """Sorts failures: own ones, own ones told late, consequences of others, ends that we caused, unsendable results.

    Returns:
        0 to 4 for these, and the position among the failures.
    """
    if rank.is_unsendable:
        return 4, rank.order or 0
    is_own_error = rank.error is not None and not rank.error.is_consequence
    if not rank.was_stopped:
        level = 0 if rank.error is None or is_own_error else 2
    else:
        level = 1 if is_own_error else 3
    return level, rank.order or 0

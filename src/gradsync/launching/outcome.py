"""How a run ended: per rank, and which rank's failure was the cause of the others'."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from gradsync.errors import InvalidArgument
from gradsync.launching.rank_process import ErrorReport


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: the rank.
        pid: its process id.
        exit_code: its exit code; negative: the signal that killed it; None: it could not be killed.
        result: the pickled return value, for functions.
        error: the exception that ended it, where it told one.
        order: position among the failures, in the order of their detection; None when it did not fail.
        was_stopped: whether it failed only after the supervisor had told it to stop.
    """

    rank: int
    pid: int
    exit_code: int | None
    result: bytearray | None = None
    error: ErrorReport | None = None
    order: int | None = None
    was_stopped: bool = False

    def describe(self) -> str:
        """Names the rank, its process and how it ended."""
        if self.exit_code is None:
            return f"rank {self.rank} (pid {self.pid}) could not be killed; it may hang in the kernel"
        if self.exit_code < 0:
            return f"rank {self.rank} (pid {self.pid}) was killed by {signal_name(-self.exit_code)}"
        return f"rank {self.rank} (pid {self.pid}) failed with exit code {self.exit_code}"


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
        return min(failed, key=_distance_from_cause, default=None)

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


def print_failure(outcome: Outcome, stream: TextIO) -> None:
    """Tells why a run failed: what else failed, a line for equal errors, and last the cause with its traceback."""
    root = outcome.root_cause
    if root is None:
        return
    if outcome.signal_number is not None and root.was_stopped and root.exit_code is not None:
        return  # ranks that end because they were asked to are no news
    others = [rank for rank in outcome.ranks if rank is not root]
    lines = [f"gradsync: {line}\n" for line in _also_failed(others)]
    lines += [f"gradsync: {rank.describe()}\n" for rank in others if rank.exit_code is None]
    lines += [
        f"gradsync: rank {rank.rank} (pid {rank.pid}) had ended with exit code 0\n"
        for rank in others
        if rank.exit_code == 0 and rank.rank in _missed_ranks(outcome)
    ]
    text = root.error.text if root.error else ""
    lines.append(f"gradsync: {root.describe()}{':' if text else ''}\n{text}")
    stream.write("".join(lines))
    stream.flush()


def load_results(outcome: Outcome) -> list[Any]:
    """Gives what the function returned on each rank, by rank, after a run in which none failed.

    Returns:
        The values; None, with a RuntimeWarning, for a rank that exited without returning one.

    Raises:
        InvalidArgument: a value does not unpickle here.
    """
    import pickle

    results: list[Any] = []
    for rank in outcome.ranks:
        if rank.result is None:
            warnings.warn(
                f"rank {rank.rank} exited with code 0 before its function returned; its result is None",
                RuntimeWarning,
                stacklevel=3,
            )
            results.append(None)
            continue
        try:
            results.append(pickle.loads(rank.result))
        except Exception as error:
            raise InvalidArgument(
                f"the return value of rank {rank.rank} does not unpickle in the launching process: {error!r}"
            ) from None
    return results


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


def _distance_from_cause(rank: RankOutcome) -> tuple[int, int]:
    """Sorts failures: own ones, own ones told late, consequences of others, and ends that we caused."""
    is_own_error = rank.error is not None and not rank.error.is_consequence
    if not rank.was_stopped:
        level = 0 if rank.error is None or is_own_error else 2
    else:
        level = 1 if is_own_error else 3
    return level, rank.order or 0

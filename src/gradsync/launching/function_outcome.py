"""How a run of a function reaches its caller: what it returned on each rank, or why there is nothing to return."""

from __future__ import annotations

import signal
import warnings
from typing import Any

from gradsync.errors import InvalidArgument, RankFailed
from gradsync.launching.outcome import Outcome, RankOutcome
from gradsync.launching.return_value import ReturnValue


def load_result(rank: int, value: ReturnValue) -> Any:
    """Gives what the function returned on one rank.

    Raises:
        InvalidArgument: it does not unpickle here.
    """
    try:
        return value.load()
    except Exception as error:
        raise InvalidArgument(
            f"the return value of rank {rank} does not unpickle in the launching process: {error!r}"
        ) from None


def take_results(outcome: Outcome, *, stacklevel: int) -> list[Any]:
    """Gives what the function returned on each rank, by rank, after a run in which none failed; once.

    Args:
        outcome: loses the results one by one, so that large ones are not held twice.
        stacklevel: of the warning, as seen from the caller.

    Returns:
        The values; None, with a RuntimeWarning, for a rank that exited without returning one.

    Raises:
        InvalidArgument: a value does not unpickle here.
    """
    results: list[Any] = []
    for rank in outcome.ranks:
        if rank.result is None:
            _warn_of_no_result(rank, stacklevel + 1)
            results.append(None)
        else:
            results.append(load_result(rank.rank, rank.result))
            rank.result.forget()
    return results


def returned_values(outcome: Outcome) -> dict[int, Any]:
    """Gives what the function returned on the ranks on which it did, for the error that tells of another one.

    A value that does not unpickle here is left out: the error is about something else.
    """
    values = {}
    for rank in outcome.ranks:
        if rank.result is not None:
            try:
                values[rank.rank] = rank.result.load()
            except Exception:
                continue
    return values


def failure(outcome: Outcome, root: RankOutcome, message: str) -> RankFailed:
    """Gives the error for a run in which a rank failed.

    Args:
        outcome: of the run.
        root: the rank whose failure it was.
        message: the error's first line; the rank's traceback follows.
    """
    text = traceback_of(root)
    return RankFailed(
        f"{message}\n\n{text}" if text else message,
        rank=root.rank,
        phase="function",
        exit_code=root.exit_code,
        traceback_text=text,
        results=returned_values(outcome),
    )


def traceback_of(rank: RankOutcome) -> str:
    """Gives a rank's traceback, or "" where it has told none."""
    return rank.error.text.rstrip() if rank.error else ""


def what_became_of_others(root: RankOutcome) -> str:
    """Tells what the failure of a rank meant for the other ones."""
    return "the other ranks ended in order" if root.is_unsendable else "all other ranks were ended"


def raise_for_signal(outcome: Outcome) -> None:
    """Does what the signal that ended a run would have done.

    Raises:
        KeyboardInterrupt: it was SIGINT.
        SystemExit: it was another one; with 128 and its number.
    """
    if outcome.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal_number is not None:
        raise SystemExit(outcome.exit_code)


def _warn_of_no_result(rank: RankOutcome, stacklevel: int) -> None:
    warnings.warn(
        f"rank {rank.rank} exited with code 0 before its function returned; its result is None",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )

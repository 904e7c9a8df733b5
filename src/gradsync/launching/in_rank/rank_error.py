"""What a rank tells its launcher of the exception that ended it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from gradsync.launching.in_rank import report_pipe

if TYPE_CHECKING:
    from traceback import StackSummary

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")

# Modules between the interpreter and the user's code: in a traceback they only hide the user's own lines.
_SHIM_MODULES = frozenset(
    {
        "gradsync.launching.in_rank.rank_main",
        "gradsync.launching.in_rank.group_call",
        "importlib._bootstrap",
        "multiprocessing.spawn",
        "runpy",
    }
)
# What the surviving ranks raise when another one is gone: shown only where no rank tells more.
_CONSEQUENCES = (
    "RankFailed",
    "CommunicatorClosed",
    "GradientCancelled",
    "CollectiveTimeout",
    "RendezvousTimeout",
)


def report_error(descriptor: int, error: BaseException, *, is_unsendable: bool = False) -> None:
    """Sends an error as text: an exception that does not unpickle must not hide itself.

    Args:
        descriptor: the report pipe.
        error: its traceback loses the frames between the interpreter and the user's code.
        is_unsendable: whether only the function's result could not be sent.
    """
    import json
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _SHIM_MODULES:
        trace = trace.tb_next
    error.__traceback__ = trace
    shown = traceback.TracebackException(type(error), error, trace)
    if _is_told_by_gradsync(error):
        del shown.stack[_outer_frames(shown.stack) :]
    text = "".join(shown.format())
    summary = traceback.format_exception_only(type(error), error)[-1].split("\n")[0]
    consequence = _consequence_in(error)
    body = {
        "text": text,
        "summary": summary,
        "is_consequence": consequence is not None,
        "missed_rank": _missed_rank(consequence),
        "is_unsendable": is_unsendable,
        "is_of_silence": isinstance(consequence, TimeoutError) or getattr(consequence, "was_silent", False),
    }
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)  # the user's crash reporter still runs
    try:
        report_pipe.write_frame(descriptor, report_pipe.ERROR, json.dumps(body).encode())
    except OSError:
        sys.stderr.write(text)  # nobody is left to show it


def _is_told_by_gradsync(error: BaseException) -> bool:
    errors = sys.modules.get("gradsync.errors")
    return errors is not None and isinstance(error, errors.GradsyncError)


def _outer_frames(stack: StackSummary) -> int:
    """Counts the frames to the last one of the user's: where gradsync raises on purpose, its own say nothing."""
    ours = (_PACKAGE, contextlib.__file__)
    count = len(stack)
    while count and stack[count - 1].filename.startswith(ours):
        count -= 1
    return count or len(stack)


def _consequence_in(error: BaseException | None) -> BaseException | None:
    """Gives the error, or the one among those that led to it, that says that another rank is gone."""
    errors = sys.modules.get("gradsync.errors")
    kinds: tuple[type[BaseException], ...] = tuple(getattr(errors, name) for name in _CONSEQUENCES) if errors else ()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _missed_rank(consequence: BaseException | None) -> int | None:
    """Gives the rank that a RankFailed names, or the first that a timeout does."""
    missing = getattr(consequence, "missing_ranks", ())
    rank: int | None = missing[0] if missing else getattr(consequence, "rank", None)
    return rank

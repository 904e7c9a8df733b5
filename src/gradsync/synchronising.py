"""Functions after which the ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from gradsync.process_group import group_barrier, is_distributed

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def synchronized(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes all ranks wait for one another after a function: for downloading data, or writing a checkpoint.

    Every rank must call it. Where there is one rank, or no process group, the function is called and that is all.
    When it raises, this rank does not wait: the others learn of it when the process group ends.

    Args:
        func: any function.

    Returns:
        The function that waits, and returns what `func` does.

    Raises:
        PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: from the barrier.
    """

    @wraps(func)
    def call_and_wait(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result = func(*args, **kwargs)
        if is_distributed():
            group_barrier()
        return result

    return call_and_wait

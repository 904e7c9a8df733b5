"""Inside a rank that `launcher` has started: the user's function in an initialised process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.launching.in_rank.named_function import NamedFunction


def call_in_group(
    function: NamedFunction | Callable[..., Any], backend: str, meets_others: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function as one rank of a group, which has ended when this returns.

    Args:
        function: the function, or where to find it.
        backend: what `init_process_group` is given.
        meets_others: whether other machines take part: then no rank begins before all of them are there, and none
            leaves before all have done their work.
        args, kwargs: for the function.

    Returns:
        What the function returns.
    """
    from gradsync.process_group import destroy_process_group, group_barrier, init_process_group, is_initialized

    if isinstance(function, NamedFunction):
        function = function.find()
    try:
        with init_process_group(backend):
            if meets_others:
                group_barrier()
            result = function(*args, **kwargs)
            if meets_others:
                group_barrier()  # nothing, where the function has destroyed the group itself
        return result
    finally:
        if is_initialized():  # the function has made another one
            destroy_process_group()

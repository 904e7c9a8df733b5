"""Which start method ranks get where a call names none; kept by the process, for the faces that call functions."""

from __future__ import annotations

from gradsync.errors import InvalidArgument
from gradsync.launching.start_methods import START_METHODS

_default = "spawn"


def set_start_method(method: str) -> None:
    """Sets how `gs.launch` starts its processes, and `gs.launcher` and `gs.spawn` where they are not told.

    Args:
        method: "spawn" (at first): fresh interpreters; the function and its arguments pickle, and a script needs the
            `if __name__ == "__main__":` guard. "forkserver": forks of a small process that has imported little; the
            same holds. "fork": copies of this process, with all that it has in memory: closures and notebook
            functions work, CUDA must not have been touched, and locks that other threads hold stay held.

    Raises:
        InvalidArgument: there is no such method.
    """
    global _default
    _default = _checked("set_start_method", method)


def chosen_start_method(who: str, method: str | None) -> str:
    """Gives the start method of a call: its own, or what `set_start_method` has set.

    Args:
        who: the caller, for the error.
        method: what the call names.

    Raises:
        InvalidArgument: there is no such method.
    """
    return _default if method is None else _checked(who, method)


def _checked(who: str, method: object) -> str:
    if isinstance(method, str) and method in START_METHODS:
        return method
    names = ", ".join(map(repr, START_METHODS))
    raise InvalidArgument(f"{who} needs a start method of {names}, got {method!r}")

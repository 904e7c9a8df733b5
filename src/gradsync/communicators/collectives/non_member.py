"""What a rank gets of a group that it is not in."""

from __future__ import annotations

from typing import Any, Literal


class NonMember:
    """Stands where a member has its communicator, and counts as false: `if group: group.all_reduce(array)`.

    It is not None: that means the world wherever a communicator may be passed, and who is no member must not take part
    in the world's collectives by mistake. Passed on as a communicator it is refused.

    Args:
        label: how messages name this rank.
        group: what it is no member of, e.g. "the group of ranks 0,2".
    """

    def __init__(self, label: str, group: str) -> None:
        self._label = label
        self._group = group

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"{self._label} is no member of {self._group}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's own questions, of copy and pickle for example
            raise AttributeError(name)
        raise AttributeError(f"{self}, and has no {name!r} there: ask `if group:` first")

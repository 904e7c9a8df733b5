"""A function by its module and name, for ranks that find it again: also where the name is bound to something else.

A decorator leaves the name to what it has made of the function, so that pickle refuses the function itself. The
launching process makes a `NamedFunction`, and a rank takes the decorators off again. A script's decorated functions
are made in every rank, so this file imports next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from gradsync.errors import InvalidArgument

_MARK = "_gradsync_launcher"


def mark_as_launcher(wrapper: Callable[..., Any]) -> None:
    """Marks what `launcher` has made of a function, which its `__wrapped__` gives."""
    setattr(wrapper, _MARK, True)


class NamedFunction(NamedTuple):
    """Where a rank finds a function.

    Attributes:
        module: the module.
        name: the name in it, with dots for what lies in a class.
    """

    module: str
    name: str

    def find(self) -> Callable[..., Any]:
        """Imports the module, and gives the function that `launcher` was given there.

        Raises:
            InvalidArgument: this rank has no such name.
        """
        importlib.import_module(self.module)
        try:
            return self._look_up()
        except AttributeError:
            from gradsync.launching.in_rank.conventions import HOW_TO_DEFINE

            raise InvalidArgument(f"{self.name} is not found in {self.module} of this rank; {HOW_TO_DEFINE}") from None

    def is_found_as(self, function: Callable[..., Any]) -> bool:
        """Tells whether the name leads to this function in the process at hand."""
        try:
            return self._look_up() is function
        except (AttributeError, KeyError):
            return False

    def _look_up(self) -> Callable[..., Any]:
        found: Any = sys.modules[self.module]
        for part in self.name.split("."):
            found = getattr(found, part)
        layer = found
        while layer is not None and _MARK not in getattr(layer, "__dict__", {}):
            layer = getattr(layer, "__wrapped__", None)
        # Not marked at all: `run = launcher(function)` leaves the name to the plain function.
        function: Callable[..., Any] = found if layer is None else layer.__wrapped__
        return function

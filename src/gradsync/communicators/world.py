"""The communicator of all ranks (the world), as a variable that the layers below process_group.py can read.

Bucketing is a layer below process_group.py, so it cannot import that module. Bucketing reads the variable `current` of
this module; only calls from process_group.py change `current`. Within `with gs.override_backend(name)`, `current` is
the communicator of all ranks over the backend `name`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.communicators.communicator import Communicator
from gradsync.communicators.groups import NonMember
from gradsync.errors import InvalidArgument


class _Override:
    """One `with gs.override_backend(...)` block.

    Attributes:
        backend: the backend's name.
        communicator: the communicator that replaces the world's communicator. None if there was no world when the
            block began, or if the world has been replaced or has ended since then.
    """

    def __init__(self, backend: str, communicator: Communicator | None) -> None:
        self.backend = backend
        self.communicator = communicator


_world: Communicator | None = None
_overrides: list[_Override] = []
#: The result of get_world(). This is a variable, not a function, because callbacks read it for each gradient.
current: Communicator | None = None


def set_world(communicator: Communicator | None) -> None:
    """Sets the world's communicator. Only process_group.py calls this function."""
    global _world
    _world = communicator
    for override in _overrides:
        override.communicator = None  # it belonged to the world that has been replaced
    _update()


def get_initial_world() -> Communicator | None:
    """Returns the communicator that init_process_group() has made; None if there is no process group."""
    return _world


def get_world() -> Communicator | None:
    """Returns the communicator that `group=None` means; None if there is no process group."""
    return current


def overriding_backend() -> str | None:
    """Returns the name of the backend of the innermost override_backend block; None outside of such a block."""
    return _overrides[-1].backend if _overrides else None


@contextmanager
def overriding(backend: str, communicator: Communicator | None) -> Iterator[Communicator | None]:
    """Replaces the world's communicator within a `with` block. Only process_group.py calls this function."""
    override = _Override(backend, communicator)
    _overrides.append(override)
    _update()
    try:
        yield communicator
    finally:
        _overrides.remove(override)
        _update()


def _update() -> None:
    global current
    replacement = _overrides[-1].communicator if _overrides else None
    current = _world if replacement is None else replacement


def group_or_world(group: Communicator | None, what: str, argument: str = "group") -> Communicator:
    """Returns `group`, or the world's communicator if `group` is None.

    Args:
        group: the argument of a public function.
        what: the name of the public function in errors.
        argument: the name of the argument in errors.

    Raises:
        InvalidArgument: `group` is neither a Communicator nor None, this rank is not a member of `group`, or `group` is
            None and the process group is not initialised.
    """
    if isinstance(group, Communicator):
        return group
    world = get_world()
    who = what if world is None else f"{world.label}: {what}"
    if isinstance(group, NonMember):
        raise InvalidArgument(f"{group}: call {what} within `if group:`, on the members only")
    if group is not None:
        raise InvalidArgument(f"{who} needs {argument} to be a Communicator or None, got {type(group).__name__}")
    if world is None:
        raise InvalidArgument(
            f"{what}: the process group is not initialised: call gs.init_process_group() first, or pass a communicator"
        )
    return world

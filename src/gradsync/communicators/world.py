"""The world's communicator, as a variable that the layers below process_group.py can read.

Imports go down only, and bucketing is below process_group.py, so only process_group.py sets it. Within `with
gs.override_backend(...)` it is another communicator of the same ranks.
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
        communicator: replaces the world's communicator; None if there was no world when the block began.
    """

    def __init__(self, backend: str, communicator: Communicator | None) -> None:
        self.backend = backend
        self.communicator = communicator


_world: Communicator | None = None
_overrides: list[_Override] = []
#: The result of get_world(). A variable, because callbacks read it for each gradient.
current: Communicator | None = None


def set_world(communicator: Communicator | None) -> None:
    """Sets the world's communicator. For process_group.py."""
    global _world
    _world = communicator
    for override in _overrides:
        override.communicator = None  # it replaced the world's communicator before this one
    _update()


def get_initial_world() -> Communicator | None:
    """Returns the communicator that init_process_group() has made, or None outside init/destroy."""
    return _world


def get_world() -> Communicator | None:
    """Returns the communicator for `group=None`, or None outside init/destroy."""
    return current


def overriding_backend() -> str | None:
    """Returns the backend's name in the innermost override_backend block, or None outside."""
    return _overrides[-1].backend if _overrides else None


@contextmanager
def overriding(backend: str, communicator: Communicator | None) -> Iterator[Communicator | None]:
    """Replaces the world's communicator within a block. For process_group.py."""
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
    """Returns `group`, or the world's communicator for None.

    Args:
        group: the caller's argument.
        what: the function that was called, for errors.
        argument: the argument's name, for errors.

    Raises:
        InvalidArgument: not a communicator, a group that this rank is not in, or the process group is not initialised.
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

"""Where the layers below process_group.py find the world's communicator.

Imports go down only, and the bucketing layer sits below process_group.py; so that file, and nobody else, fills this
slot. Within `with gs.override_backend(...)` another communicator of the world's ranks stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.communicators.communicator import Communicator
from gradsync.communicators.groups import NonMember
from gradsync.errors import InvalidArgument


class _Override:
    """One block with another backend.

    Attributes:
        backend: its name.
        communicator: what stands in for the world; None where there is no world, or was none when the block began.
    """

    def __init__(self, backend: str, communicator: Communicator | None) -> None:
        self.backend = backend
        self.communicator = communicator


_world: Communicator | None = None
_overrides: list[_Override] = []
#: What get_world() returns: not behind a function for callbacks, which look here for each gradient.
current: Communicator | None = None


def set_world(communicator: Communicator | None) -> None:
    """Names the world's communicator. For process_group.py."""
    global _world
    _world = communicator
    for override in _overrides:
        override.communicator = None  # it stood in for the one before
    _update()


def get_initial_world() -> Communicator | None:
    """Returns what init_process_group() has made, or None outside init/destroy."""
    return _world


def get_world() -> Communicator | None:
    """Returns the communicator that `group=None` means, or None outside init/destroy."""
    return current


def overriding_backend() -> str | None:
    """Returns the backend of the innermost block that overrides it."""
    return _overrides[-1].backend if _overrides else None


@contextmanager
def overriding(backend: str, communicator: Communicator | None) -> Iterator[Communicator | None]:
    """Lets a communicator stand in for the world within a block. For backend_override.py."""
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
    stand_in = _overrides[-1].communicator if _overrides else None
    current = _world if stand_in is None else stand_in


def group_or_world(group: Communicator | None, what: str, argument: str = "group") -> Communicator:
    """Returns `group`, or the world's communicator for None.

    Args:
        group: what a caller has passed.
        what: the function that was called, for errors.
        argument: how that function calls the communicator.

    Raises:
        InvalidArgument: no communicator, that of a group which this rank is not in, or the process group is not
            initialised.
    """
    if isinstance(group, Communicator):
        return group
    world = get_world()
    who = what if world is None else f"{world.label}: {what}"
    if isinstance(group, NonMember):
        raise InvalidArgument(f"{group}: call {what} within `if group:`, on the members only")
    if group is not None:
        raise InvalidArgument(f"{who}: {argument} must be a Communicator or None, got {type(group).__name__}")
    if world is None:
        raise InvalidArgument(
            f"{what}: the process group is not initialised: call gs.init_process_group() first, or pass a communicator"
        )
    return world

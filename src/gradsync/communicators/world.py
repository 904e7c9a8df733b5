"""The communicator of all ranks (the world), where the rooms below process_group.py can read it: `current`.

Only process_group.py changes it. Within `with gs.override_backend(name)` it is the communicator over that backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.communicators.communicator import Communicator
from gradsync.communicators.groups import NonMember
from gradsync.errors import InvalidArgument
from gradsync.launchers import read_environment


class _Override:
    """One `with gs.override_backend(...)` block.

    Attributes:
        backend: the backend's name.
        communicator: what replaces the world's communicator; None if there was no world when the block began, or the
            world has been replaced or has ended since.
    """

    def __init__(self, backend: str, communicator: Communicator | None) -> None:
        self.backend = backend
        self.communicator = communicator


_world: Communicator | None = None
_overrides: list[_Override] = []
#: What get_world() returns: a variable, because callbacks read it for each gradient.
current: Communicator | None = None


def set_world(communicator: Communicator | None) -> None:
    """Sets the world's communicator, for process_group.py only."""
    global _world
    _world = communicator
    for override in _overrides:
        override.communicator = None  # it belonged to the world that has been replaced
    _update()


def get_initial_world() -> Communicator | None:
    """Returns the communicator that init_process_group() has made; None without a process group."""
    return _world


def get_world() -> Communicator | None:
    """Returns the communicator that `group=None` means; None without a process group."""
    return current


def overriding_backend() -> str | None:
    """Returns the backend of the innermost override_backend block; None outside of one."""
    return _overrides[-1].backend if _overrides else None


@contextmanager
def overriding(backend: str, communicator: Communicator | None) -> Iterator[Communicator | None]:
    """Replaces the world's communicator within a `with` block, for process_group.py only."""
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
    """Returns `group`, or the world if it is None.

    Args:
        group: the argument of a public function.
        what: that function's name in errors.
        argument: the argument's name in errors.

    Raises:
        InvalidArgument: `group` is neither a Communicator nor None, this rank is not a member of it, or there is no
            process group.
    """
    if isinstance(group, Communicator):
        return group
    world = get_world()
    who = what if world is None else f"{world.label}: {what}"
    if isinstance(group, NonMember):
        raise InvalidArgument(f"{group}: call {what} within `if group:`, on the members only")
    if group is not None:
        advice = ": pass comm.communicator" if hasattr(group, "communicator") else ""  # of gradsync.mpi
        if type(group).__module__.startswith("mpi4py"):
            advice = ": of mpi4py's communicator pass gs.from_mpi(comm)"
        raise InvalidArgument(
            f"{who} needs {argument} to be a Communicator or None, got {type(group).__name__}{advice}"
        )
    if world is None:
        raise InvalidArgument(
            f"{what}: the process group is not initialised: call gs.init_process_group() first, or pass a communicator"
        )
    return world


def refuse_alone(what: str, would: str) -> None:
    """Refuses a call in one of several ranks that has no process group: in silence, each would be a world of its own.

    Args:
        what: the public function.
        would: what it would do.

    Raises:
        InvalidArgument: a launcher has started several ranks.
    """
    place = read_environment()
    if place is not None and place.world_size > 1:
        raise InvalidArgument(
            f"rank {place.rank}/{place.world_size}: {what} without a process group would {would}: call "
            "gs.init_process_group() first"
        )

"""Where the layers below process_group.py find the world's communicator.

Imports go down only, and the bucketing layer sits below process_group.py; so that file, and nobody else, fills this
slot.
"""

from __future__ import annotations

from gradsync.communicators.base import Communicator
from gradsync.errors import InvalidArgument

_world: Communicator | None = None


def set_world(communicator: Communicator | None) -> None:
    """Names the communicator that `group=None` means. For process_group.py."""
    global _world
    _world = communicator


def get_world() -> Communicator | None:
    """Returns the world's communicator, or None outside init/destroy."""
    return _world


def group_or_world(group: Communicator | None) -> Communicator:
    """Returns `group`, or the world's communicator for None.

    Raises:
        InvalidArgument: not a communicator, or the process group is not initialised.
    """
    if group is None:
        group = _world
        if group is None:
            raise InvalidArgument(
                "the process group is not initialised: call gs.init_process_group() first, or pass a communicator"
            )
    if not isinstance(group, Communicator):
        raise InvalidArgument(f"group must be a Communicator or None, got {type(group).__name__}")
    return group

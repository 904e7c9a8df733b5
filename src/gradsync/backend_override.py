"""A backend other than the one that the process group would take, or has taken, for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.communicators.base import Communicator
from gradsync.communicators.world import overriding
from gradsync.environment import BACKENDS
from gradsync.errors import InvalidArgument
from gradsync.process_group import world_over

_NAMES = tuple(name for name in BACKENDS if name != "auto")


@contextmanager
def override_backend(name: str) -> Iterator[Communicator | None]:
    """Lets the ranks of the world communicate over another backend within a `with` block.

    Before init_process_group() it decides what "auto" means there. Afterwards every rank must enter the block; inside
    it, gs.WORLD, gs.get_communicator() and `group=None` mean the world's ranks over that backend. That communicator is
    made when the first such block is entered, and kept until destroy_process_group(); for the backend that the world
    has, it is the world. Blocks may be nested.

    Args:
        name: "nccl", "shm", "mpi" or "local".

    Returns:
        What gives the communicator to `as`, or None before init_process_group().

    Raises:
        InvalidArgument: no backend has that name, or "local" for several ranks.
        BackendUnavailable: it cannot join these ranks; raised on all of them, which can go on as they were.
        CommunicatorClosed: the communicator that an earlier block has made was closed, aborted, or has failed.
        BackendUnavailable, NcclError, RendezvousTimeout, RankFailed: from the connection, once the ranks had agreed
            that it is possible; then the process group has failed.
    """
    if name not in _NAMES:
        raise InvalidArgument(f"unknown backend {name!r}: use one of {', '.join(_NAMES)}")
    with overriding(name, world_over(name)) as communicator:
        yield communicator

"""What the collectives on many named arrays share: who takes part, what may be written to, and the broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.groups import NonMember
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


def communicator_and_root(what: str, communicator: Communicator | None, root: int) -> tuple[Communicator, int]:
    """Returns the communicator that a caller means, and `root` as an int, once it is known to be one of its ranks."""
    if isinstance(root, (Communicator, NonMember)):
        raise InvalidArgument(
            f"{what} got a communicator ({root!r}) in the place of the root's number: pass it by name, communicator=..."
        )
    communicator = group_or_world(communicator, what, "communicator")
    number = integer_of(root)
    if number is None or not 0 <= number < communicator.world_size:
        within = "" if communicator.ranks == tuple(range(communicator.world_size)) else ", numbered within the group"
        raise InvalidArgument(
            f"{communicator.label}: {what}: root must be 0 to {communicator.world_size - 1}{within}, got {root!r}"
        )
    return communicator, number


def check_writable(what: str, named: Sequence[tuple[str, Array]], communicator: Communicator) -> None:
    """Refuses arrays, with their names, that a broadcast could not write into."""
    for name, native in named:
        writeable = communicator.arrays.writeable(native)
        if not writeable or overlaps_itself(native):
            kind = "overlaps itself" if writeable else "is read-only"
            raise InvalidArgument(f"{communicator.label}: {what} writes in place; {name or 'the tree'} {kind}")


def broadcast_named(what: str, named: Sequence[tuple[str, Array]], root: int, communicator: Communicator) -> None:
    """Broadcasts arrays once the ranks have agreed on their names, shapes and dtypes."""
    lines = [f"{name}: {native.dtype}{list(native.shape)}" for name, native in named]

    def describe() -> str:
        return "\n".join([f"{what} of {len(lines)} arrays from root {root}", *lines])

    agreement = Agreement(digest_of(what, root, lines), describe, item="array {} of the list")
    communicator.broadcast_list([native for _, native in named], root, agreement)

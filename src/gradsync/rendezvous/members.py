"""The members of a group: ranks in ascending order. All ranks together are a `range`.

Part of the server's core. A range is compared, hashed and searched at the cost of one rank, however many there are;
with a tuple each of n ranks that ask for the same would cost the server the time of n.
"""

from __future__ import annotations

Members = tuple[int, ...] | range


def members_of(ranks: list[int] | None, world_size: int) -> Members:
    """Returns the members that a request names.

    Args:
        ranks: distinct, in ascending order; None for all.
        world_size: how many ranks there are; a request may name others, see `are_known`.
    """
    if ranks is None or (len(ranks) == world_size and ranks[-1] == world_size - 1):
        return range(world_size)
    return tuple(ranks)


def are_known(members: Members, world_size: int) -> bool:
    """Returns whether there are any, and all of them exist."""
    return bool(members) and members[-1] < world_size


def list_members(members: Members) -> str:
    """Returns them as messages show them, e.g. "(0, 1, 2)"."""
    return str(tuple(members))

"""Finds the first collective in which ranks differ, and ranks that wait for each other in a circle.

The rendezvous server calls these functions while ranks wait; they do no I/O and read no clocks. A rank remembers only
its last collectives, so first_divergence compares only collectives that at least two ranks remember. A rank that has
begun fewer collectives does not differ for that reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gradsync.errors import name_ranks


class Call(NamedTuple):
    """A collective that a rank has begun.

    Attributes:
        digest: a number that is equal on ranks that call the same collective.
        what: the description of the collective.
    """

    digest: int
    what: str


#: The last collectives that one rank has begun in a group, by number; the first collective of a group has number 1.
#: Messages are left out.
History = Mapping[int, Call]


class Divergence(NamedTuple):
    """The first collective of a group in which ranks differ.

    Attributes:
        group: the name of the group.
        number: the number of the collective.
        sides: the different collectives that ranks called under this number, each with its ranks. The collective that
            most ranks called comes last.
        is_certainly_first: whether the ranks cannot have differed earlier. This is False if a rank that remembers this
            collective no longer remembers the previous collective.
    """

    group: str
    number: int
    sides: tuple[tuple[Call, tuple[int, ...]], ...]
    is_certainly_first: bool

    def text(self) -> str:
        """Returns a sentence that describes the difference."""
        *few, (most, most_ranks) = self.sides
        first, *later = few
        told = f"{name_ranks(first[1])} called {first[0].what} as #{self.number} of group {self.group!r}"
        told += "".join(f", {name_ranks(ranks)} called {call.what}" for call, ranks in later)
        others = "the others" if len(most_ranks) > 1 else name_ranks(most_ranks)
        told += f", where {others} called {most.what}"
        if not self.is_certainly_first:
            told += " (earlier collectives are not remembered: the ranks may have differed before)"
        return told


def first_divergence(group: str, histories: Mapping[int, History]) -> Divergence | None:
    """Returns the first collective in which ranks differ; None if the ranks differ in no remembered collective.

    Args:
        group: the name of the group.
        histories: by world rank: the rank's last collectives in this group.
    """
    for number in sorted({number for history in histories.values() for number in history}):
        sides: dict[int, list[int]] = {}
        calls: dict[int, Call] = {}
        for rank, history in sorted(histories.items()):
            if number in history:
                call = calls.setdefault(history[number].digest, history[number])
                sides.setdefault(call.digest, []).append(rank)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (len(side[1]), [-rank for rank in side[1]]))
            is_first = number == 1 or all(number - 1 in history for history in histories.values() if number in history)
            return Divergence(
                group, number, tuple((calls[digest], tuple(ranks)) for digest, ranks in ordered), is_first
            )
    return None


class Wait(NamedTuple):
    """A rank that waits inside a collective.

    Attributes:
        rank: the world rank.
        group: the name of the group.
        number: the number of the collective in the group; 0 if the rank waits in a send or receive.
        what: the description of the collective.
        for_ranks: the members that have not begun the collective; empty if all members have begun the collective, or if
            the late members are unknown.
    """

    rank: int
    group: str
    number: int
    what: str
    for_ranks: tuple[int, ...]


def circle(waits: Iterable[Wait]) -> list[Wait] | None:
    """Returns the ranks that wait for each other in a circle, each as a Wait; None if there is no circle.

    Each returned rank waits for the next rank, and the last rank waits for the first rank. The first rank is the lowest
    rank of the circle.
    """
    by_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, []).append(wait)
    for start in sorted(by_rank):
        came_by: dict[int, Wait] = {}  # by rank: the wait by which the search first found this rank
        left = [start]
        for rank in left:
            for wait in by_rank.get(rank, ()):
                for after in wait.for_ranks:
                    if after not in came_by:
                        came_by[after] = wait
                        left.append(after)
        if start in came_by:
            way = [came_by[start]]
            while way[0].rank != start:
                way.insert(0, came_by[way[0].rank])
            return way
    return None


def _place(wait: Wait) -> str:
    return f" (#{wait.number} of group {wait.group!r})" if wait.number else ""


def circle_text(waits: Sequence[Wait]) -> str:
    """Returns a sentence that names ranks that wait for each other in a circle, and their collectives."""
    steps = [
        f"rank {wait.rank} waits in {wait.what}{_place(wait)} for rank {after.rank}"
        for wait, after in zip(waits, [*waits[1:], waits[0]], strict=True)
    ]
    return "ranks wait for each other in a circle: " + ", ".join(steps)

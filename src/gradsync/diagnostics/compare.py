"""Finds the first difference between the collectives of several ranks, and ranks that wait in a circle.

The functions have no I/O and no clocks: the server uses them while ranks wait, and `gradsync trace` uses them on dumps.
A rank remembers only its last collectives, so only collectives that at least two ranks remember are compared. A rank
that is only behind the others does not differ from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gradsync.errors import name_ranks


class Call(NamedTuple):
    """One collective that a rank has begun.

    Attributes:
        digest: a number that is equal on ranks that call the same collective.
        what: the description of the collective.
    """

    digest: int
    what: str


class History(NamedTuple):
    """The collectives of a group that one rank remembers.

    Attributes:
        rank: the rank's number in the world.
        begun: the number of collectives of the group that the rank has begun.
        calls: the collectives by their number, from 1, without messages.
    """

    rank: int
    begun: int
    calls: Mapping[int, Call]


class Divergence(NamedTuple):
    """The first collective of a group in which ranks differ.

    Attributes:
        group: the name of the group.
        number: the number of the collective.
        sides: the different calls, each with its ranks; the call of most ranks comes last.
        is_certainly_first: whether all of these ranks remember the collective before, and called the same one; else
            they may have differed in collectives that they no longer remember.
    """

    group: str
    number: int
    sides: tuple[tuple[Call, tuple[int, ...]], ...]
    is_certainly_first: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that remember this collective, ascending."""
        return tuple(sorted(rank for _, ranks in self.sides for rank in ranks))

    def text(self, where: str = "") -> str:
        """Returns the difference in a sentence.

        Args:
            where: text that follows the group's name.
        """
        *few, (most, most_ranks) = self.sides
        first, *later = few
        told = f"{name_ranks(first[1])} called {first[0].what} as #{self.number} of group {self.group!r}{where}"
        told += "".join(f", {name_ranks(ranks)} called {call.what}" for call, ranks in later)
        others = "the others" if len(most_ranks) > 1 else name_ranks(most_ranks)
        told += f", where {others} called {most.what}"
        if not self.is_certainly_first:
            told += " (earlier collectives are not remembered: the ranks may have differed before)"
        return told


def first_divergence(group: str, histories: Iterable[History]) -> Divergence | None:
    """Returns the first collective in which ranks of a group differ; None if all remembered collectives agree."""
    known = list(histories)
    numbers = compared(known)
    for number in numbers:
        sides: dict[int, list[int]] = {}
        calls: dict[int, Call] = {}
        for history in known:
            call = history.calls.get(number)
            if call is not None:
                calls.setdefault(call.digest, call)
                sides.setdefault(call.digest, []).append(history.rank)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (len(side[1]), [-rank for rank in side[1]]))
            told = tuple((calls[digest], tuple(sorted(ranks))) for digest, ranks in ordered)
            before = [h for h in known if number in h.calls]
            is_first = number == 1 or all(number - 1 in history.calls for history in before)
            return Divergence(group, number, told, is_first)
    return None


def compared(histories: Sequence[History]) -> list[int]:
    """Returns the numbers of the collectives that at least two ranks remember, ascending."""
    seen: dict[int, int] = {}
    for history in histories:
        for number in history.calls:
            seen[number] = seen.get(number, 0) + 1
    return sorted(number for number, ranks in seen.items() if ranks > 1)


class Wait(NamedTuple):
    """A rank that is inside a collective.

    Attributes:
        rank: the rank's number in the world.
        group, number: the group and the number of the collective; the number of a send or receive is 0.
        what: the description of the collective.
        for_ranks: the members that have not begun the collective; empty if all have begun it, or if this is unknown.
    """

    rank: int
    group: str
    number: int
    what: str
    for_ranks: tuple[int, ...]


def circle(waits: Iterable[Wait]) -> list[Wait] | None:
    """Returns ranks that wait in a circle, each for the next and the last for the first; None if there is none.

    The circle begins with its lowest rank.
    """
    by_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, []).append(wait)
    for start in sorted(by_rank):
        came_by: dict[int, Wait] = {}  # for each rank, the wait that leads to it on the shortest way
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
    """Returns a circle in a sentence."""
    steps = [
        f"rank {wait.rank} waits in {wait.what}{_place(wait)} for rank {after.rank}"
        for wait, after in zip(waits, [*waits[1:], waits[0]], strict=True)
    ]
    return "ranks wait for each other in a circle: " + ", ".join(steps)

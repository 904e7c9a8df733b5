"""Finds the first collective in which ranks differ, and ranks that wait for each other in a circle.

The rendezvous server asks while ranks wait; nothing here does I/O, or reads a clock. A rank remembers only its last
collectives, so only those that two ranks remember are compared. To have begun fewer is no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gradsync.errors import name_ranks


class Call(NamedTuple):
    """A collective that a rank has begun.

    Attributes:
        digest: equal on ranks that call the same collective.
        what: the collective in words.
    """

    digest: int
    what: str


#: The last collectives that one rank has begun in a group, by number from 1. Messages are left out.
History = Mapping[int, Call]


class Divergence(NamedTuple):
    """The first collective of a group in which ranks differ.

    Attributes:
        group: the group's name.
        number: the collective's.
        sides: what ranks called under this number, each with its ranks; what most called comes last.
        is_certainly_first: whether they cannot have differed before: who remembers this one remembers the one before.
    """

    group: str
    number: int
    sides: tuple[tuple[Call, tuple[int, ...]], ...]
    is_certainly_first: bool

    def text(self) -> str:
        """Returns the difference as a sentence."""
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
    """Returns the first collective in which ranks differ; None if they differ in none that is remembered.

    Args:
        group: the group's name.
        histories: the last collectives in it, by world rank.
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
        group: the group's name.
        number: the collective's number in it; 0 for a send or receive.
        what: the collective in words.
        for_ranks: the members that have not begun it; empty if all have, or if they are not known.
    """

    rank: int
    group: str
    number: int
    what: str
    for_ranks: tuple[int, ...]


def circle(waits: Iterable[Wait]) -> list[Wait] | None:
    """Returns the ranks that wait for each other in a circle, each for the next; None if there is none.

    The first is the lowest rank of the circle.
    """
    by_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, []).append(wait)
    for start in sorted(by_rank):
        came_by: dict[int, Wait] = {}  # the wait by which each rank was first found
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
    """Returns a circle as a sentence."""
    steps = [
        f"rank {wait.rank} waits in {wait.what}{_place(wait)} for rank {after.rank}"
        for wait, after in zip(waits, [*waits[1:], waits[0]], strict=True)
    ]
    text = "ranks wait for each other in a circle: " + ", ".join(steps)
    if all(wait.what.startswith(f"message(rank {wait.rank} to ") for wait in waits):
        text += ". Each sends first: use exchange, in gradsync.mpi Sendrecv or Isend"
    return text

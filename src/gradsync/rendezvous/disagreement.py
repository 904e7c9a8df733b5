"""What the ranks' histories say about a collective that does not end: where they differ, and who waits in a circle.

Part of the server's core, without I/O, used by `absence` on what the ranks have answered to an inquiry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradsync.diagnostics.compare import Call, History, Wait, circle, circle_text, first_divergence
from gradsync.rendezvous.members import Members

#: What one rank tells of its last collectives: by group, number, digest, what it is, and whether the rank is inside.
Told = Mapping[str, Sequence[tuple[int, int, str, bool]]]


def disagreements(told: Mapping[int, Told], members: Mapping[str, Members]) -> list[str]:
    """Returns a line for each group whose ranks differ, and one for ranks that wait for each other in a circle.

    Args:
        told: by rank.
        members: of the groups, as far as they are known.
    """
    groups = sorted({group for of_rank in told.values() for group in of_rank})
    by_group = {
        group: [_history(rank, of_rank[group]) for rank, of_rank in sorted(told.items()) if group in of_rank]
        for group in groups
    }
    found = [first_divergence(group, histories) for group, histories in by_group.items()]
    lines = [divergence.text() for divergence in found if divergence is not None]
    waits = [
        Wait(rank, group, number, what, _behind(rank, number, by_group[group], members.get(group, ())))
        for rank, of_rank in sorted(told.items())
        for group, calls in of_rank.items()
        for number, _, what, is_inside in calls
        if is_inside
    ]
    round_about = circle(waits)
    return lines if round_about is None else [*lines, circle_text(round_about)]


def _history(rank: int, calls: Sequence[tuple[int, int, str, bool]]) -> History:
    known = {number: Call(digest, what) for number, digest, what, _ in calls}
    return History(rank, max(known, default=0), known)


def _behind(rank: int, number: int, histories: Sequence[History], members: Members) -> tuple[int, ...]:
    """Returns the members that have not begun the collective of this number, where that is known."""
    begun = {history.rank: history.begun for history in histories}
    return tuple(other for other in members if other != rank and begun.get(other, 0) < number and other in begun)

"""What is played: the ranks' programs, and the mishaps that may come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exploration.steps import Step

Move = tuple[str, int]


@dataclass(frozen=True)
class Configuration:
    """What the ranks do, and what may happen to them.

    Attributes:
        name, about: for those who read the results.
        programs: each rank's steps once its generation has formed; they begin anew when it joins again.
        rare: how often each of the rare moves may come in one run; what is not named never comes.
        attempts: how often a rank may try to join.
        host: the rank that hosts the server.
        listens: whether ranks name their process, so that their silence counts.
        has_frames: whether messages travel as frames, each of which arrives in a move of its own.
        is_formed: whether all have joined, in the order of their ranks, in the state that it begins in.
    """

    name: str
    about: str
    programs: tuple[tuple[Step, ...], ...]
    rare: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 1
    host: int | None = None
    listens: bool = False
    has_frames: bool = False
    is_formed: bool = True

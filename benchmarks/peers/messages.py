"""What a rank tells the controller beside the answers to its requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hello:
    """The first message of a rank."""

    rank: int
    pid: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Failure:
    """The last message of a rank that failed."""

    traceback_text: str

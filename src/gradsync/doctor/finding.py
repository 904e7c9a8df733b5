"""What a check has found: a line of the doctor's."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(str, enum.Enum):
    """How a finding counts."""

    OK = "ok"
    WARNING = "warning"
    UNUSABLE = "not usable here"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """A line.

    Attributes:
        what: was looked at, in a word or two.
        status: BROKEN where ranks cannot start or meet at all, whatever the backend.
        text: what was found.
        advice: what to do; "" where there is nothing to do.
    """

    what: str
    status: Status
    text: str
    advice: str = ""


def ok(what: str, text: str) -> Finding:
    """Returns a line on what is in order."""
    return Finding(what, Status.OK, text)


def warning(what: str, text: str, advice: str) -> Finding:
    """Returns a line on what works badly, or only partly."""
    return Finding(what, Status.WARNING, text, advice)


def unusable(what: str, text: str, advice: str = "") -> Finding:
    """Returns a line on what some backend needs and is not here."""
    return Finding(what, Status.UNUSABLE, text, advice)


def broken(what: str, text: str, advice: str) -> Finding:
    """Returns a line on what keeps every run from working."""
    return Finding(what, Status.BROKEN, text, advice)

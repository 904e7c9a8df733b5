"""What this rank can tell the others when a collective does not end: how far it has come, and where it is."""

from __future__ import annotations

from gradsync.communicators.lifetime import usable_communicators
from gradsync.flight_recorder import FlightRecorder
from gradsync.stack_report import stack_report

_LAST_COLLECTIVES = 8


def positions() -> dict[str, int]:
    """Returns how many collectives this rank has begun, by group. Any thread may ask, at any time."""
    recorders = [c.recorder for c in usable_communicators() if c.world_size > 1]
    return {recorder.group: recorder.begun for recorder in recorders}


def report() -> str:
    """Returns the last collectives of each group, and the Python stacks of this process. Any thread may ask."""
    told = [_collectives(c.recorder) for c in usable_communicators() if c.world_size > 1]
    return "\n".join([*told, stack_report()])


def _collectives(recorder: FlightRecorder) -> str:
    if not recorder.begun:
        return f"no collective of group {recorder.group!r} yet"
    last = recorder.describe(_LAST_COLLECTIVES).replace("\n", "\n  ")
    return f"collectives of group {recorder.group!r}, newest first:\n  {last}"

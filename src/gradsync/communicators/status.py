"""The status of this rank, for the report when a collective does not end: its last collectives and Python stacks."""

from __future__ import annotations

import math

from gradsync.communicators.lifetime import usable_recorders
from gradsync.diagnostics import FlightRecorder, stack_report
from gradsync.rendezvous.frames import MAX_CALL_BYTES, MAX_STATUS_CALLS, MAX_STATUS_GROUPS, clip_text

_LAST_COLLECTIVES = 8


def positions() -> dict[str, int]:
    """Returns, for each group, the number of collectives that this rank has begun. Any thread may call it."""
    return {recorder.group: recorder.begun for recorder in _reported_recorders()}


def report() -> str:
    """Returns, as text, the last collectives of each group and the Python stacks of this process.

    Any thread may call it.
    """
    return "\n".join([*map(_collectives, _reported_recorders()), stack_report()])


def history() -> dict[str, list[tuple[int, int, str, bool]]]:
    """Returns, for each group, this rank's last collectives, so that they can be compared with those of other ranks.

    A collective is a tuple of its number, its digest, its title, and whether it is still running.
    """
    recorders = _reported_recorders()
    return {recorder.group: _calls(recorder, MAX_STATUS_CALLS // len(recorders)) for recorder in recorders}


def _calls(recorder: FlightRecorder, last: int) -> list[tuple[int, int, str, bool]]:
    collectives = [entry for entry in recorder.entries() if not entry.what.is_message][-last:]
    return [
        (entry.number, entry.what.digest, clip_text(entry.what.headline(), MAX_CALL_BYTES), entry.ended is None)
        for entry in collectives
    ]


def _reported_recorders() -> list[FlightRecorder]:
    """Returns the flight recorders of groups with several ranks.

    If there are more groups than a message to the server has room for, the most recently used groups are chosen.
    """
    recorders = [r for r in usable_recorders() if r.place is not None and len(r.place.ranks) > 1]
    if len(recorders) <= MAX_STATUS_GROUPS:
        return recorders
    return sorted(recorders, key=_last_used, reverse=True)[:MAX_STATUS_GROUPS]


def _last_used(recorder: FlightRecorder) -> float:
    """Returns when the group's last collective ended; infinity if it is still running, -infinity if there was none."""
    last = recorder.last
    if last is None:
        return -math.inf
    return math.inf if last.ended is None else last.ended


def _collectives(recorder: FlightRecorder) -> str:
    if recorder.last is None:
        return f"no collective of group {recorder.group!r} yet"
    last = recorder.describe(_LAST_COLLECTIVES).replace("\n", "\n  ")
    return f"collectives of group {recorder.group!r}, newest first:\n  {last}"

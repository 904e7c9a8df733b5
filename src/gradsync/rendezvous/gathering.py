"""How long the event loop lets heartbeats come together before it wakes for them."""

from __future__ import annotations

# Most of what a heartbeat costs is to wake for it. Where many ranks live quietly, the loop lets some come together;
# where they are few that is not worth the delay to whoever asks something meanwhile.
_SECONDS_PER_RANK = 40e-6
_SHORTEST_SECONDS, _LONGEST_SECONDS = 5e-3, 40e-3


def gather_seconds(ranks: int) -> float:
    """Returns how long to let the heartbeats of so many ranks come together; 0 where they are few."""
    seconds = min(ranks * _SECONDS_PER_RANK, _LONGEST_SECONDS)
    return seconds if seconds >= _SHORTEST_SECONDS else 0.0

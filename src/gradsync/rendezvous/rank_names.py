"""Several ranks in words, for the texts of both ends."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED_RANKS = 16


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 2", "ranks 0, 1 and 3", or the first sixteen "and 40 more"."""
    named = [str(rank) for rank in ranks[:MAX_NAMED_RANKS]]
    more = len(ranks) - len(named)
    if more:
        named.append(f"{more} more")
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"

"""All failures, with their expected reports and the times for these.

Targets are for one host. A target of None is not judged: there the time does not depend on detection.
"""

from __future__ import annotations

from failures import rows_of_others, rows_of_ranks
from failures.observation import Row


def rows() -> list[Row]:
    """Returns all rows, in the order of the table."""
    return [
        *rows_of_ranks.before_init(),
        *rows_of_ranks.deaths(),
        *rows_of_ranks.silences(),
        *rows_of_ranks.exceptions(),
        *rows_of_ranks.memory(),
        *rows_of_others.signals(),
        *rows_of_others.abandoned(),
        *rows_of_others.refusals(),
        *rows_of_others.values(),
    ]

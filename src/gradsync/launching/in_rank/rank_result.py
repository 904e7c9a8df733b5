"""Inside a rank process: what the user's function returned, as bytes for the launcher.

By pickle, and by cloudpickle where pickle refuses: a class that a notebook has defined came to the rank by value, and
goes back that way. Imported by every rank at start-up, so it imports next to nothing.
"""

from __future__ import annotations

import os
from typing import Any


class UnsendableResult(Exception):
    """The function did its work, and only its result cannot reach the launcher."""

    def __init__(self, refusal: Exception) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def pickle_result(result: Any) -> bytes:
    """Pickles what the function returned.

    Raises:
        UnsendableResult: it does not pickle.
    """
    import pickle

    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        pickled = _pickle_by_value(result)
        if pickled is not None:
            return pickled
        from gradsync.errors import InvalidArgument

        refusal = InvalidArgument(
            f"the return value of rank {os.environ['RANK']} needs to pickle to reach the launcher, "
            f"got {type(result).__name__}: {error}"
        )
        raise UnsendableResult(refusal) from None


def _pickle_by_value(result: Any) -> bytes | None:
    try:
        import cloudpickle

        pickled: bytes = cloudpickle.dumps(result)
    except Exception:  # not installed, or it refuses too: what pickle said is the news
        return None
    return pickled

"""The warning of gradients that were handed over and never reduced."""

from __future__ import annotations

import logging
import sys

from gradsync.bucketing.backward_pass import BackwardPass

_log = logging.getLogger("gradsync")


def tell_forgotten(backward: BackwardPass) -> None:
    """Warns when a callback goes, or the program ends, with gradients that were never reduced, and unlocks those."""
    waiting = backward.waiting()
    backward.unlock_waiting()
    if waiting and getattr(sys, "last_value", None) is None:  # after an exception there is better to tell
        _log.warning(
            "warning: %s handed over and never reduced, beginning with that of %s: end each backward pass with flush() "
            "or `with callback.backward()`",
            "1 gradient was" if len(waiting) == 1 else f"{len(waiting)} gradients were",
            waiting[0].spec.name,
        )

"""The callbacks that are alive: no two of them may look alike, and gs.rebuild() has all of the world begin anew.

For gradients that were handed over but never reduced destroy_process_group() raises, and the program's exit logs an
error.

The process group imports this file, so this file imports almost nothing.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from gradsync.errors import GradientCancelled

if TYPE_CHECKING:
    from gradsync.bucketing.events import CallbackIdentity
    from gradsync.bucketing.step import Step

_watched: dict[Step, None] = {}  # the steps of the callbacks that are alive, oldest first
_lost: dict[str, None] = {}  # the error texts of callbacks that were garbage-collected with such gradients


def watch(callback: object, step: Step) -> None:
    """Watches a callback for gradients that nobody reduces."""
    _watched[step] = None
    weakref.finalize(callback, _collected, step).atexit = False


def identities() -> list[CallbackIdentity]:
    """Returns those of the callbacks that are alive."""
    return [step.identity for step in list(_watched)]


def take_forgotten() -> list[str]:
    """Returns the errors for gradients that still wait for a flush, each once; cancels their futures."""
    texts = list(_lost)
    _lost.clear()
    for step in list(_watched):
        text = step.forgotten()
        if text is not None:
            texts.append(text)
            step.fail(GradientCancelled("the process group ended before the end of the backward pass"))
    return texts


def begin_anew() -> None:
    """Has all callbacks of the world forget their steps, for gs.rebuild()."""
    for step in list(_watched):
        step.begin_anew()


def _collected(step: Step) -> None:
    """Keeps the error text of a garbage-collected callback."""
    text = step.forgotten()
    if step not in _watched:  # the step belongs to the parent of this forked process
        return
    del _watched[step]
    if text is not None:
        _lost[text] = None


def _forget_after_fork() -> None:
    """Forgets the parent's gradients in a forked child: the parent will reduce them."""
    for step in list(_watched):
        step.disown()
    _watched.clear()
    _lost.clear()


os.register_at_fork(after_in_child=_forget_after_fork)

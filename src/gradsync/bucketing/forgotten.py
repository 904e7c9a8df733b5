"""Gradients that were handed over and never reduced: an error where their group is left, and the program's exit code 1.

The process group asks here when it ends, and at the program's exit; a rank that a function was started in asks when
that has returned. Imported by the process group, so it imports next to nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from gradsync.errors import GradientCancelled, InvalidArgument, uncaught_error

if TYPE_CHECKING:
    from gradsync.bucketing.step import Step
    from gradsync.communicators.communicator import Communicator

_log = logging.getLogger("gradsync")


class _Lost(NamedTuple):
    """What a callback that has been collected has left behind."""

    text: str
    communicator: weakref.ref[Communicator]


_watched: dict[Step, None] = {}  # of the callbacks that are alive, oldest first
_lost: list[_Lost] = []
exit_code = 0  # of the program, from its exit on; for a rank that does not end as the interpreter does


def watch(callback: object, step: Step) -> None:
    """Has the gradients of a callback found where they are never reduced."""
    _watched[step] = None
    weakref.finalize(callback, _collected, step).atexit = False


def raise_forgotten(*, everywhere: bool = False) -> None:
    """Raises for gradients that can never be reduced; once.

    Args:
        everywhere: whether nothing will be reduced any more; else only those count whose communicator was closed.

    Raises:
        InvalidArgument: there are some; the text names this rank and the first parameter.
    """
    texts = _take(everywhere=everywhere)
    if texts:
        raise InvalidArgument(texts[0])


def report_forgotten_at_exit() -> None:
    """Logs at the program's exit what was never reduced, and sees to it that the exit code is not 0.

    Not where the program ends by an exception: then that is the cause.
    """
    texts = _take(everywhere=True)
    if uncaught_error() is None:
        for text in texts:
            fail_at_exit(text)


def fail_at_exit(text: str) -> None:
    """Logs an error at the program's exit, where nobody can catch one, and sees to it that the exit code is not 0."""
    global exit_code
    _log.error("error: %s", text)
    if exit_code == 0:
        exit_code = 1
        _change_exit_code(exit_code)


def _take(*, everywhere: bool) -> list[str]:
    """Returns in words what was forgotten, oldest first, and forgets it; cancels the futures of that."""
    texts = []
    for lost in list(_lost):
        communicator = lost.communicator()
        if everywhere or communicator is None or communicator.closed:
            _lost.remove(lost)
            texts.append(lost.text)
    for step in list(_watched):
        found = step.forgotten()
        if found is not None and (everywhere or found[1].closed):
            texts.append(found[0])
            step.fail(GradientCancelled("the group was left before its backward pass had ended"))
    return texts


def _collected(step: Step) -> None:
    """Warns when a callback goes with gradients that were never reduced, and makes these writeable again.

    Sums of local passes alone are no error afterwards: a loop may end before the step that would take them.
    """
    found, lost_sums = step.forgotten(), step.lost_sums()
    step.unlock_waiting()
    if step not in _watched:  # it is the process's that this one was forked from
        return
    del _watched[step]
    if uncaught_error() is not None:
        return
    if lost_sums is not None:
        _log.warning("warning: %s", lost_sums)
    if found is not None:
        text, communicator = found
        _lost.append(_Lost(text, weakref.ref(communicator)))
        _log.warning("warning: %s", text)


def _change_exit_code(code: int) -> None:
    """Has this process, which is about to exit, end with another code.

    An exception in an exit handler does not change it, and os._exit() there would skip the handlers still to come, and
    MPI_Finalize. So C's exit() ends the process, after all that Python does at its end.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or a pipe that nobody reads
            stream.flush()
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # a C library without it
        for function, argument in ((libc._exit, code), (libc.fflush, None)):  # the last one registered runs first
            libc.__cxa_atexit(function, ctypes.c_void_p(argument), None)


def _forget_after_fork() -> None:
    """They are the parent's to reduce."""
    _watched.clear()
    _lost.clear()


os.register_at_fork(after_in_child=_forget_after_fork)

"""Reports gradients that were handed over but never reduced.

When the program calls destroy_process_group(), raise_forgotten() raises an error. At the program's exit,
report_forgotten_at_exit() logs the error, and changes an exit code of 0 to 1. In a rank that the launcher starts for
one function, the rank's process calls raise_forgotten() after the function has returned. The process group imports this
file, so this file imports almost nothing.
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
    """A garbage-collected callback with gradients that were never reduced: the error text and the communicator."""

    text: str
    communicator: weakref.ref[Communicator]


_watched: dict[Step, None] = {}  # the steps of the callbacks that are alive, oldest first
_lost: list[_Lost] = []
exit_code = 0  # the program's exit code, for a rank process that does not end as Python normally does


def watch(callback: object, step: Step) -> None:
    """Watches a callback for gradients that are never reduced."""
    _watched[step] = None
    weakref.finalize(callback, _collected, step).atexit = False


def raise_forgotten(*, everywhere: bool = False) -> None:
    """Raises an error if some gradients can never be reduced. A later call does not report the same gradients again.

    Args:
        everywhere: if True, report the gradients on all communicators, because gradsync will reduce no more gradients.
            If False, report only the gradients on closed communicators.

    Raises:
        InvalidArgument: some gradients can never be reduced. The error names this rank and the first parameter.
    """
    texts = _take(everywhere=everywhere)
    if texts:
        raise InvalidArgument(texts[0])


def report_forgotten_at_exit() -> None:
    """Logs at the program's exit which gradients were never reduced; if there are any, changes an exit code of 0 to 1.

    If the program ends with an exception, the function logs nothing, because the exception explains why gradients were
    not reduced.
    """
    texts = _take(everywhere=True)
    if uncaught_error() is None:
        for text in texts:
            fail_at_exit(text)


def fail_at_exit(text: str) -> None:
    """Logs an error at the program's exit, where an exception has no effect; changes an exit code of 0 to 1."""
    global exit_code
    _log.error("error: %s", text)
    if exit_code == 0:
        exit_code = 1
        _change_exit_code(exit_code)


def _take(*, everywhere: bool) -> list[str]:
    """Returns the error texts for forgotten gradients, each only once; cancels the futures of these gradients."""
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
            step.fail(GradientCancelled("the process group ended before the end of the backward pass"))
    return texts


def _collected(step: Step) -> None:
    """Makes the waiting gradients of a garbage-collected callback writeable, and warns that they were not reduced.

    If an exception ends the program, or a failure has ended the communicator, there is no warning.
    """
    found = step.forgotten()
    step.unlock_waiting()
    if step not in _watched:  # the step belongs to the parent of this forked process
        return
    del _watched[step]
    if uncaught_error() is not None:
        return
    if found is not None:
        text, communicator = found
        _lost.append(_Lost(text, weakref.ref(communicator)))
        _log.warning("warning: %s", text)


def _change_exit_code(code: int) -> None:
    """Changes the exit code of this process, which is about to exit.

    An exception in an exit handler does not change the code, and os._exit() in an exit handler would skip later
    handlers and MPI_Finalize. So gradsync registers a function that C's exit() calls after Python's exit handlers; this
    function ends the process with the new code.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream may be None, closed, or a pipe without a reader
            stream.flush()
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # a C library without __cxa_atexit
        # The function that is registered last runs first.
        for function, argument in ((libc._exit, code), (libc.fflush, None)):
            libc.__cxa_atexit(function, ctypes.c_void_p(argument), None)


def _forget_after_fork() -> None:
    """Forgets the parent's gradients in the child of a fork: the parent will reduce them."""
    _watched.clear()
    _lost.clear()


os.register_at_fork(after_in_child=_forget_after_fork)

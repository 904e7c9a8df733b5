"""The exceptions of gradsync.

Each class except GradsyncError also derives from a built-in exception (ValueError, TimeoutError, ...). All errors can
be pickled, because gradsync sends errors between processes. `WorkerError` and `MainProcessError` are in
`launching/calls.py`: they derive from `multiprocessing.ProcessError`, and importing gradsync must not import
multiprocessing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

#: The largest number of ranks that an error lists. If there are more ranks, the error only counts the others.
MAX_NAMED_RANKS = 16
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_LAUNCHING = os.path.join(_PACKAGE, "launching", "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_MAX_NAME_CHARACTERS = 160  # for the name of a file, and for the name of a function

_earlier_error: BaseException | None = None  # the value of sys.last_value before the process group began


class GradsyncError(Exception):
    """The base class of gradsync's own errors.

    The constructor takes the message, and the attributes as keywords. All attributes have defaults, because pickle
    calls the class with the message only, and then restores the attributes.
    """

    def __init__(self, message: object = "", **attributes: Any) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)


class InvalidArgument(GradsyncError, ValueError):
    """A caller's mistake, such as a wrong value, shape, rank or name, or a call at the wrong time."""


class UnsupportedDtype(GradsyncError, TypeError):
    """The operation is not defined or not implemented for the dtype of an array."""


class BackendUnavailable(GradsyncError, RuntimeError):
    """A backend, memory, a library or a new process that a call needs is not available here.

    The error message says what is missing.
    """


class RendezvousError(GradsyncError, RuntimeError):
    """The rendezvous server could not start, refused a request or is gone, or another program runs at its address."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """A wait for the rendezvous server, or for other ranks at this server, has reached its deadline.

    Attributes:
        missing_ranks: the ranks that were missing; () if they are not known.
        missing: the missing ranks and their states in words, such as "rank 1 (not joined)".
        cause: the reason why no rendezvous server answered; "" if a server answered.
    """

    missing_ranks: tuple[int, ...] = ()
    missing: str = ""
    cause: str = ""


class AuthenticationError(RendezvousError):
    """One side of the rendezvous does not know the secret of this run."""


class PlanMismatch(GradsyncError, RuntimeError):
    """The ranks disagree on the next collective, or two ranks disagree on a message between them.

    gs.check_consistency() also raises this error, for arrays that differ. Every rank of the collective, or of the
    message, raises this error. gradsync has moved no data of this collective, and the communicator stays usable; but
    see `broken`.

    Attributes:
        descriptions: a description of each rank's collective in words, by rank.
        places: the line of code that called the collective, by rank, such as "train.py:41 in step". For an asynchronous
            collective, the place is the line that submitted the collective.
        broken: whether the ranks found it after a launch, which only NCCL does: values are wrong, and the communicator
            has ended.
    """

    descriptions: Mapping[int, str] = {}
    places: Mapping[int, str] = {}
    broken: bool = False


class MissingGradient(PlanMismatch):
    """At the end of a step, some parameters of the callback have no gradient: the same parameters on all ranks.

    If the ranks lack different gradients, all ranks raise PlanMismatch, the base class of this error.
    """


class CollectiveTimeout(GradsyncError, TimeoutError):
    """A collective, or a wait for the future of a collective, reached its deadline.

    Attributes:
        missing_ranks: the ranks that had not called the collective; () if they are not known. The first rank in the
            tuple is, if possible, a rank that does not itself wait for other ranks.
    """

    missing_ranks: tuple[int, ...] = ()


class RankFailed(GradsyncError, RuntimeError):
    """A rank died, stopped responding, raised an exception, or left the process group while other ranks needed it.

    This error also reports that a rank closed or aborted the communicator while other ranks still used it.

    Attributes:
        rank: the rank that failed; None if the number of the failed rank is not known.
        phase: the phase of the failed rank: "joining" until all ranks have joined, then "running", and "left" after the
            rank has left. The phase is "collective" if a rank closed or aborted the communicator, or if gradsync
            detected the failure through shared memory. The phase is "function" in an error that gs.spawn or
            gs.launcher raises in the launching process.
        exit_code: the failed rank's exit code, -n if signal n killed the rank; None if the exit code is not known. Only
            gs.spawn and gs.launcher set exit_code, traceback_text and results.
        traceback_text: the failed rank's traceback; "" if the traceback is not known.
        results: the return values that the launched function had on other ranks, by rank.
        was_silent: whether the failed rank sent nothing for several seconds, and gradsync found that the rank was
            stopped (SIGSTOP), gone or unreachable.
    """

    rank: int | None = None
    phase: str = ""
    exit_code: int | None = None
    traceback_text: str = ""
    results: Mapping[int, Any] = {}
    was_silent: bool = False


class CommunicatorClosed(GradsyncError, RuntimeError):
    """The communicator was closed or aborted, has failed, or belongs to the parent process of this forked process."""


class NcclError(GradsyncError, RuntimeError):
    """NCCL or the GPU failed.

    Attributes:
        code: the ncclResult_t value, 1 if the GPU failed; 0 if NCCL gave no value.
        name: the name of the ncclResult_t value, such as "ncclUnhandledCudaError" for 1; "" if NCCL gave no value.
    """

    code: int = 0
    name: str = ""


class MpiError(GradsyncError, RuntimeError):
    """MPI reported an error.

    Attributes:
        code: MPI's error class, such as 14 for MPI_ERR_TRUNCATE in MPICH; 0 if MPI gave none.
    """

    code: int = 0


class NonFiniteGradient(GradsyncError, ArithmeticError):
    """A reduced gradient contains NaN or infinity, and the callback has nonfinite="raise". All ranks raise this error.

    Attributes:
        parameter: the first parameter, in the order of hand-over, whose reduced gradient is not finite.
        parameters: all such parameters.
    """

    parameters: Sequence[str] = ()

    @property
    def parameter(self) -> str:
        """The first of `parameters`."""
        return self.parameters[0] if self.parameters else ""


class FutureNotReady(GradsyncError, RuntimeError):
    """The program read a future that was not done. For example, the bucket of a gradient was not reduced yet."""


class GradientCancelled(GradsyncError, RuntimeError):
    """This gradient is not reduced. The future of the gradient raises this error.

    Its backward pass raised an exception, the process group ended before the pass, or the weights of all ranks were 0.
    """


class Caller(NamedTuple):
    """A line of the user's program. A Caller refers only to the frame's code object, so it keeps no frame alive."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """The line number, computed only when it is needed, because the computation is slow in long functions."""
        lines = (line for begin, end, line in self.code.co_lines() if begin <= self.instruction < end)
        return next(lines, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        """Returns a text such as "/home/me/train.py:41 in step", on one line of limited length."""
        return self._in(self.code.co_filename)

    def short(self) -> str:
        """Returns the same text as str(), but without the folder of the file, which may differ between machines."""
        return self._in(os.path.basename(self.code.co_filename))

    def _in(self, file: str) -> str:
        return f"{_shortened(file)}:{self.line} in {_shortened(self.code.co_name)}"


def caller(thread: int | None = None) -> Caller | None:
    """Returns the line of the user's program that a thread is executing.

    This line belongs to the innermost frame outside gradsync, the standard library and installed packages. If the stack
    has no such frame, the function returns the innermost line of an installed package, such as torch in its backward
    pass. If there is no such line either, for example on gradsync's own threads, the function returns None.

    Args:
        thread: the identifier of the thread; None means the calling thread.
    """
    frame = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    of_package: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename)
        if kind == "program":
            return Caller(code, frame.f_lasti)
        if kind == "launching":  # the outer frames belong to the launcher
            break
        if kind == "package":
            of_package = of_package or frame
        frame = frame.f_back
    return None if of_package is None else Caller(of_package.f_code, of_package.f_lasti)


def callers() -> list[Caller]:
    """Returns the lines of the user's program on this thread's stack, the innermost first; see `caller`."""
    found: dict[str, list[Caller]] = {"program": [], "package": []}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        if kind == "launching":
            break
        if kind in found:
            found[kind].append(Caller(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found["program"] or found["package"]


@lru_cache(maxsize=1024)
def _kind_of(file: str) -> str:
    """Returns the software that a source file belongs to: "gradsync", "launching", "python", "package" or "program"."""
    if file.startswith(_PACKAGE):
        return "launching" if file.startswith(_LAUNCHING) else "gradsync"
    if any(folder in file for folder in _PACKAGES):
        return "package"
    return "python" if file.startswith((_STANDARD_LIBRARY, "<frozen ")) else "program"


def _shortened(name: str) -> str:
    """Replaces characters of a name that cannot be printed, and leaves out the beginning of a long name."""
    shown = "".join(c if c.isprintable() else "?" for c in name[-_MAX_NAME_CHARACTERS:])
    return shown if len(name) <= _MAX_NAME_CHARACTERS else f"...{shown}"


def shown(value: object) -> str:
    """Returns the text that shows a wrong argument in an error message: its repr, or advice if it is an array."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return "an array: pass the output array as out=" if is_array else repr(value)


def uncaught_error() -> BaseException | None:
    """Returns the exception that ends this program at its exit; None if no exception ends the program.

    In an interactive session the function returns None, because exceptions do not end the session.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or error is _earlier_error else error


def forget_earlier_error() -> None:
    """Makes `uncaught_error` ignore the current sys.last_value, which a test runner, for example, may have set."""
    global _earlier_error
    _earlier_error = getattr(sys, "last_value", None)


def describe(error: BaseException) -> str:
    """Returns a text such as "ValueError: no such file", for reports to other ranks; never raises an exception."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its __str__ raised {type(broken).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns a text such as "rank 2" or "ranks 0, 1 and 3".

    The text names at most sixteen ranks; for more ranks it ends with a number, such as "and 40 more".
    """
    named = [str(rank) for rank in ranks[:MAX_NAMED_RANKS]]
    more = len(ranks) - len(named)
    if more:
        named.append(f"{more} more")
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def count(number: int, what: str) -> str:
    """Returns a text such as "1 rank" or "2 ranks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(size_bytes: float) -> str:
    """Returns a size as text: "72 bytes", "7.81 KB", "25 MB". 1 MB is 1024**2 bytes, as in options."""
    for unit, name in ((1024**3, "GB"), (1024**2, "MB"), (1024, "KB")):
        if size_bytes >= unit:
            return (
                f"{size_bytes / unit:.3g} {name}" if size_bytes < 999.5 * unit else f"{size_bytes / unit:,.0f} {name}"
            )
    return f"{size_bytes:.0f} bytes"


def headline(error: BaseException) -> str:
    """Returns the first line of `describe(error)`, without the reports of other ranks in the following lines."""
    return describe(error).partition("\n")[0]

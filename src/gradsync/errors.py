"""The exceptions of gradsync.

    GradsyncError
        InvalidArgument       ValueError        a mistake of the caller
        UnsupportedDtype      TypeError         no such operation for this dtype
        BackendUnavailable    RuntimeError      something is missing on this machine
        RendezvousError       RuntimeError      the rendezvous server failed, refused or is gone
            RendezvousTimeout     TimeoutError      it, or another rank, did not come in time
            AuthenticationError                     another secret
        PlanMismatch          RuntimeError      the ranks do different things
            MissingGradient                         all lack the same gradients
        CollectiveTimeout     TimeoutError      a rank did not come to a collective in time
        RankFailed            RuntimeError      another rank died, failed or left
        CommunicatorClosed    RuntimeError      closed, aborted or failed before
        NcclError, MpiError   RuntimeError      NCCL, the GPU or MPI failed
        NonFiniteGradient     ArithmeticError   NaN or infinity, with nonfinite="raise"
        FutureNotReady        RuntimeError      read too early
        GradientCancelled     RuntimeError      this gradient is not reduced

All can be pickled, as they travel between processes. `WorkerError` and `MainProcessError` are in launching/calls.py:
they derive from `multiprocessing.ProcessError`, and importing gradsync must not import multiprocessing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

MAX_NAMED_RANKS = 16  # that an error lists; it counts the others
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_LAUNCHING = os.path.join(_PACKAGE, "launching", "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_MAX_NAME_CHARACTERS = 160  # of a file or a function

_earlier_error: BaseException | None = None  # sys.last_value before the process group began


class GradsyncError(Exception):
    """The base class of gradsync's own errors.

    Made of a message, and attributes as keywords. All attributes have defaults, because pickle passes the message only,
    and restores the attributes afterwards.
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
    """The operation is not defined, or not implemented, for the dtype of an array."""


class BackendUnavailable(GradsyncError, RuntimeError):
    """A backend, memory, a library or a new process is not to be had here. The message says what is missing."""


class RendezvousError(GradsyncError, RuntimeError):
    """The rendezvous server could not start, refused something or is gone, or another program has its address."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """The rendezvous server, or other ranks that this rank meets there, did not come before the deadline.

    Attributes:
        missing_ranks: the ranks that were missing; () if they are not known.
        missing: these ranks and their states in words, such as "rank 1 (not joined)".
        cause: why no rendezvous server answered; "" if one did.
    """

    missing_ranks: tuple[int, ...] = ()
    missing: str = ""
    cause: str = ""


class AuthenticationError(RendezvousError):
    """This process and the rendezvous server have different secrets, so they belong to different runs."""


class PlanMismatch(GradsyncError, RuntimeError):
    """The ranks disagree on the next collective or step, two ranks on a message, or arrays differ that must be equal.

    Every rank that takes part raises it. Nothing has moved, and the communicator stays usable; but see `broken`.

    Attributes:
        descriptions: what each rank called, in words, by rank.
        places: the line that called it, by rank, such as "train.py:41 in step".
        broken: whether the ranks found it after a launch, which only NCCL does: values are wrong, and the communicator
            has ended.
    """

    descriptions: Mapping[int, str] = {}
    places: Mapping[int, str] = {}
    broken: bool = False


class MissingGradient(PlanMismatch):
    """At the end of a step the same parameters have no gradient on all ranks.

    If the ranks lack different ones, they raise PlanMismatch, the base class.
    """


class CollectiveTimeout(GradsyncError, TimeoutError):
    """A collective, or a wait for its future, reached its deadline.

    Attributes:
        missing_ranks: the ranks that had not called it; () if they are not known. The first is, if possible, one that
            does not itself wait for others.
    """

    missing_ranks: tuple[int, ...] = ()


class RankFailed(GradsyncError, RuntimeError):
    """Another rank died, stopped answering or raised an exception; or it left or closed what others still used.

    To go on without it, call gs.rebuild().

    Attributes:
        rank: the rank that failed; None if it is not known.
        phase: what that rank was doing: "joining" until all have joined, then "running", and "left" after it has left;
            "collective" if it closed or aborted the communicator, or shared memory told its end; "function" where
            gs.spawn or gs.launcher raises it in the launching process.
        was_silent: whether the rank was found stopped (SIGSTOP), gone or unreachable after several seconds of silence.
        exit_code: its exit code, -n if signal n killed it; None if it is not known. This and the attributes below are
            set by gs.spawn and gs.launcher only.
        traceback_text: its traceback; "" if it is not known.
        results: what the launched function returned on other ranks, by rank.
    """

    rank: int | None = None
    phase: str = ""
    exit_code: int | None = None
    traceback_text: str = ""
    results: Mapping[int, Any] = {}
    was_silent: bool = False


class CommunicatorClosed(GradsyncError, RuntimeError):
    """The communicator was closed or aborted, has failed, or belongs to the parent of this forked process."""


class NcclError(GradsyncError, RuntimeError):
    """NCCL or the GPU failed.

    Attributes:
        code: the ncclResult_t; 1 if the GPU failed, 0 if NCCL gave none.
        name: its name, such as "ncclUnhandledCudaError" for 1; "" if NCCL gave none.
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
    """A reduced gradient has NaN or infinity, and the callback has nonfinite="raise". All ranks raise it.

    Attributes:
        parameter: the first such parameter, in the order of hand-over.
        parameters: all of them.
    """

    parameters: Sequence[str] = ()

    @property
    def parameter(self) -> str:
        """The first of `parameters`."""
        return self.parameters[0] if self.parameters else ""


class FutureNotReady(GradsyncError, RuntimeError):
    """A future was read before it was done: a gradient's before the end of its step, for example."""


class GradientCancelled(GradsyncError, RuntimeError):
    """This gradient is not reduced; its future raises this.

    The backward pass raised an exception, the process group ended first, or the weights of all ranks were 0.
    """


class Caller(NamedTuple):
    """A line of the user's program. It refers to the code object only, so it keeps no frame alive."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """The line number, computed when it is asked for: that is slow in long functions."""
        lines = (line for begin, end, line in self.code.co_lines() if begin <= self.instruction < end)
        return next(lines, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        """Returns text such as "/home/me/train.py:41 in step", on one line of limited length."""
        return f"{_shortened(self.code.co_filename)}:{self.line} in {_shortened(self.code.co_name)}"


def caller(thread: int | None = None) -> Caller | None:
    """Returns the line of the user's program that a thread is at.

    It is that of the innermost frame outside gradsync, the standard library and installed packages; else the innermost
    one of an installed package, such as torch in its backward pass; else None, as on gradsync's own threads.

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


@lru_cache(maxsize=1024)
def _kind_of(file: str) -> str:
    """Returns what a source file belongs to: "gradsync", "launching", "python", "package" or "program"."""
    if file.startswith(_PACKAGE):
        return "launching" if file.startswith(_LAUNCHING) else "gradsync"
    if any(folder in file for folder in _PACKAGES):
        return "package"
    return "python" if file.startswith((_STANDARD_LIBRARY, "<frozen ")) else "program"


def _shortened(name: str) -> str:
    """Replaces what cannot be printed, and leaves out the beginning of a long name."""
    shown = "".join(c if c.isprintable() else "?" for c in name[-_MAX_NAME_CHARACTERS:])
    return shown if len(name) <= _MAX_NAME_CHARACTERS else f"...{shown}"


def shown(value: object) -> str:
    """Returns a wrong argument as text for an error: its repr, or advice if it is an array."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return "an array: pass the output array as out=" if is_array else repr(value)


def uncaught_error() -> BaseException | None:
    """Returns the exception that ends this program; None if none does, as in an interactive session."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or error is _earlier_error else error


def forget_earlier_error() -> None:
    """Makes `uncaught_error` ignore the present sys.last_value, which a test runner, say, may have set."""
    global _earlier_error
    _earlier_error = getattr(sys, "last_value", None)


def describe(error: BaseException) -> str:
    """Returns text such as "ValueError: no such file", for reports to other ranks; never raises."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its __str__ raised {type(broken).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns text such as "rank 2" or "ranks 0, 1 and 3"; for more than sixteen it ends in "and 40 more"."""
    named = [str(rank) for rank in ranks[:MAX_NAMED_RANKS]]
    more = len(ranks) - len(named)
    if more:
        named.append(f"{more} more")
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def count(number: int, what: str) -> str:
    """Returns text such as "1 rank" or "2 ranks"."""
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
    """Returns the first line of `describe(error)`, without the other ranks' reports that may follow."""
    return describe(error).partition("\n")[0]

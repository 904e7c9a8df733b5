"""The exceptions of gradsync.

Each class also derives from the matching built-in (ValueError, TimeoutError, ...). Each can be pickled, because errors
are sent between processes. `WorkerError` and `MainProcessError` are in `launching/launch.py`: they derive from
`multiprocessing.ProcessError`, and importing gradsync must not import multiprocessing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

#: The number of ranks that an error names. Of further ranks it gives only the number.
MAX_NAMED_RANKS = 16
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_LAUNCHING = os.path.join(_PACKAGE, "launching", "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_PLACE_CHARACTERS = 160  # of a file's name, and of a function's

_earlier_error: BaseException | None = None  # the value of sys.last_value before the process group began


class GradsyncError(Exception):
    """Base of all errors raised by gradsync.

    The constructor of a subclass takes the message first, and everything else by keyword with a default. This is
    needed for pickle, which calls the class with the message and then restores the attributes.
    """


class InvalidArgument(GradsyncError, ValueError):
    """A caller's mistake: a wrong value, shape, rank, root or name."""


class UnsupportedDtype(GradsyncError, TypeError):
    """The operation is not defined, or not implemented, for this dtype."""


class BackendUnavailable(GradsyncError, RuntimeError):
    """The wanted backend cannot run here; the text has the reason."""


class RendezvousError(GradsyncError, RuntimeError):
    """The rendezvous server refused a request, is gone, or is not a rendezvous server."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """A rendezvous wait reached its deadline.

    Attributes:
        missing_ranks: the missing ranks, if the server knows them.
        missing: the missing ranks and their states in words: "rank 1 (not joined)".
        cause: the reason why no server answered; "" if one did.
    """

    def __init__(
        self, message: str, *, missing_ranks: tuple[int, ...] = (), missing: str = "", cause: str = ""
    ) -> None:
        super().__init__(message)
        self.missing_ranks = missing_ranks
        self.missing = missing
        self.cause = cause


class AuthenticationError(RendezvousError):
    """One side of the rendezvous does not know the secret of this run."""


class PlanMismatch(GradsyncError, RuntimeError):
    """The ranks disagree on the collective they are about to run.

    Raised on every rank. No data was moved, and the communicator stays usable. An exception is NCCL: ranks that leave a
    repeated sequence of collectives may notice too late; then the communicator is broken.

    Attributes:
        index: position of the first different collective (for gradients, in the step), or None.
        descriptions: the collective of each rank in words, by rank.
        places: the line of code that called it, by rank: "train.py:41 in step". For an asynchronous collective, the
            line that submitted it; for a rank that had continued already, its current line.
        broken: whether the communicator is broken; then the gradients of this step are undefined.
    """

    def __init__(
        self,
        message: str,
        *,
        index: int | None = None,
        descriptions: dict[int, str] | None = None,
        places: dict[int, str] | None = None,
        broken: bool = False,
    ) -> None:
        super().__init__(message)
        self.index = index
        self.descriptions = descriptions or {}
        self.places = places or {}
        self.broken = broken


class MissingGradient(PlanMismatch):
    """A step has ended without gradients for some of the callback's `parameters`. All ranks lack the same ones.

    It derives from PlanMismatch. If only some ranks lack gradients, all ranks get a PlanMismatch itself.
    """


class CollectiveTimeout(GradsyncError, TimeoutError):
    """A collective reached its deadline.

    Attributes:
        missing_ranks: the ranks that had not arrived; a rank that does not itself wait for others comes first.
    """

    def __init__(self, message: str, *, missing_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = missing_ranks


class RankFailed(GradsyncError, RuntimeError):
    """Another rank died, aborted, or left while this one needed it.

    Attributes:
        rank: the rank that failed, or None if it is not known.
        phase: the failed rank's phase: "joining" until all ranks have joined, then "running", or "left"; "collective"
            if the failure was found through shared memory; "function" if a launched function raised.
        exit_code: the failed rank's exit code, if known; a negative number is the signal that killed it.
        traceback_text: the failed rank's traceback, if known.
        results: the results of a launched function on other ranks, by rank.
        was_silent: whether the rank was silent for seconds and was found stopped (SIGSTOP), gone or unreachable.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str = "",
        exit_code: int | None = None,
        traceback_text: str = "",
        results: dict[int, Any] | None = None,
        was_silent: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.exit_code = exit_code
        self.traceback_text = traceback_text
        self.results = results or {}
        self.was_silent = was_silent


class CommunicatorClosed(GradsyncError, RuntimeError):
    """The communicator was closed or aborted, or belongs to the parent of a forked process."""


class NcclError(GradsyncError, RuntimeError):
    """NCCL reported an error.

    Attributes:
        code: the ncclResult_t value; 0 if NCCL gave none.
        name: the name of that value, e.g. "ncclUnhandledCudaError".
    """

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class MpiError(GradsyncError, RuntimeError):
    """MPI reported an error.

    Attributes:
        code: the error class, e.g. 15 for MPI_ERR_TRUNCATE in MPICH; 0 if MPI gave none.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NonFiniteGradient(GradsyncError, ArithmeticError):
    """A gradient contains NaN or infinity, and the callback has nonfinite="raise". The same on every rank.

    Attributes:
        rank: the first rank with such a gradient; None if all gradients are finite and their sum overflowed.
        parameter: that rank's first parameter with such a gradient, in the order of reduction; "" if `rank` is None.
        parameters: the first such parameter of every rank that has one, by rank.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        parameter: str = "",
        parameters: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.parameters = parameters or {}


class FutureNotReady(GradsyncError, RuntimeError):
    """A gradient was asked for before its bucket was reduced."""


class GradientCancelled(GradsyncError, RuntimeError):
    """The backward pass that this gradient belongs to ended with an exception; the gradient was not reduced."""


class GradientChanged(GradsyncError, RuntimeError):
    """In debug mode: a gradient was written to between its hand-over and the end of its reduction.

    Attributes:
        rank: the rank whose program wrote to the gradient.
        parameter: the gradient's parameter.
        handed_over_at: "file:line" of the call that handed the gradient over.
    """

    def __init__(self, message: str, *, rank: int | None = None, parameter: str = "", handed_over_at: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.handed_over_at = handed_over_at


class Caller(NamedTuple):
    """A line of the user's program; it holds a reference only to the code object."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """The line's number; looked up here, because that takes long in long files."""
        lines = (line for begin, end, line in self.code.co_lines() if begin <= self.instruction < end)
        return next(lines, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        """Returns "train.py:41 in step", in one line of bounded length."""
        return self._in(self.code.co_filename)

    def short(self) -> str:
        """Returns the same text without the file's folder, which may differ between machines."""
        return self._in(os.path.basename(self.code.co_filename))

    def _in(self, file: str) -> str:
        return f"{_within(file)}:{self.line} in {_within(self.code.co_name)}"


def caller(thread: int | None = None) -> Caller | None:
    """Returns the line of the user's program that a thread executes: its innermost frame outside of gradsync.

    Frames of installed packages, such as torch in its backward pass, are skipped, unless there are no others. On
    gradsync's own threads the result is None.

    Args:
        thread: the thread's ident; None is the calling thread.
    """
    frame = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    of_package: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename)
        if kind == "program":
            return Caller(code, frame.f_lasti)
        if kind == "launching":  # the outer frames have called the user's code
            break
        if kind == "package":
            of_package = of_package or frame
        frame = frame.f_back
    return None if of_package is None else Caller(of_package.f_code, of_package.f_lasti)


def callers() -> list[Caller]:
    """Returns the lines of the user's program on this thread's stack, the innermost first, chosen as in `caller`."""
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


def raised_at(error: BaseException) -> Caller | None:
    """Returns the innermost line of the user's program in an error's traceback; without one, the innermost line."""
    trace = error.__traceback__
    innermost = found = None
    while trace is not None:
        innermost = Caller(trace.tb_frame.f_code, trace.tb_lasti)
        if _kind_of(innermost.code.co_filename) == "program":
            found = innermost
        trace = trace.tb_next
    return found or innermost


@lru_cache(maxsize=1024)
def _kind_of(file: str) -> str:
    """Returns the kind of a source file: "gradsync", its "launching", "python", a "package", or the "program"."""
    if file.startswith(_PACKAGE):
        return "launching" if file.startswith(_LAUNCHING) else "gradsync"
    if any(folder in file for folder in _PACKAGES):
        return "package"
    return "python" if file.startswith((_STANDARD_LIBRARY, "<frozen ")) else "program"


def _within(name: str) -> str:
    """Returns a name without line breaks; of a long name only its end."""
    shown = "".join(c if c.isprintable() else "?" for c in name[-_PLACE_CHARACTERS:])
    return shown if len(name) <= _PLACE_CHARACTERS else f"...{shown}"


def shown(value: object) -> str:
    """Returns a wrong argument for an error: its repr; for an array advice instead of the elements."""
    return "an array: pass out= by name" if hasattr(value, "shape") and hasattr(value, "dtype") else repr(value)


def uncaught_error() -> BaseException | None:
    """Returns the exception that ends this program, which is about to exit; None if it ends without one.

    In an interactive session it returns None, because exceptions do not end the program.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or error is _earlier_error else error


def forget_earlier_error() -> None:
    """Ignores the current sys.last_value in `uncaught_error`: test runners, for example, set it."""
    global _earlier_error
    _earlier_error = getattr(sys, "last_value", None)


def describe(error: BaseException) -> str:
    """Returns "ValueError: text", for reports to other ranks; never raises, even if the error's __str__ does."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its __str__ raised {type(broken).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 2", "ranks 0, 1 and 3", or the first sixteen "and 40 more"."""
    named = [str(rank) for rank in ranks[:MAX_NAMED_RANKS]]
    more = len(ranks) - len(named)
    if more:
        named.append(f"{more} more")
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def headline(error: BaseException) -> str:
    """Returns the first line of `describe`, without the reports of other ranks."""
    return describe(error).partition("\n")[0]

"""The exception tree: every failure that gradsync reports is one of these.

Each class also derives from the built-in that a caller would expect (ValueError, TimeoutError, ...), and each
pickles, because errors cross process boundaries. `WorkerError` and `MainProcessError` live in
`launching/launch.py`: they derive from `multiprocessing.ProcessError`, and importing gradsync must not import
multiprocessing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

#: How many ranks an error names; of more it says how many.
MAX_NAMED_RANKS = 16
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_LAUNCHING = os.path.join(_PACKAGE, "launching", "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_PLACE_CHARACTERS = 160  # of a file's name, and of a function's

_earlier_error: BaseException | None = None  # in sys.last_value since before the process group


class GradsyncError(Exception):
    """Base of all errors raised by gradsync.

    A subclass takes its message first and anything else by keyword with a default: so the attributes survive
    pickling, which calls the class with the message and then restores the attributes.
    """


class InvalidArgument(GradsyncError, ValueError):
    """A caller's mistake: wrong value, shape, rank, root or name."""


class UnsupportedDtype(GradsyncError, TypeError):
    """The operation has no meaning, or no implementation, for this dtype."""


class BackendUnavailable(GradsyncError, RuntimeError):
    """The backend that was asked for cannot run here; the text says why."""


class RendezvousError(GradsyncError, RuntimeError):
    """The rendezvous server refused, vanished, or spoke something else."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """A rendezvous wait reached its deadline.

    Attributes:
        missing_ranks: the ranks that were waited for, where the server knows them.
        missing: the same in words, with where they are: "rank 1 (pid 7 on node3)".
        cause: why no server answered; "" where one did.
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

    Raised on every rank. No data was moved, and the communicator stays usable; on NCCL, ranks that leave a plan which
    they have repeated before may find out too late, and then it is broken.

    Attributes:
        index: position of the first diverging collective (in the step, for gradients), or None.
        descriptions: what each rank was about to do, by rank.
        places: the line of each rank's program that called it, by rank: "train.py:41 in step". Where another thread ran
            it, the line that submitted it; of a rank that had gone on already, the line it had come to.
        broken: whether the communicator is broken, and the gradients of this step are undefined.
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
    """A step has ended without gradients for some of the parameters that were told, the same on all ranks.

    A PlanMismatch, because that is what all ranks get where only some have those gradients.
    """


class CollectiveTimeout(GradsyncError, TimeoutError):
    """A collective reached its deadline.

    Attributes:
        missing_ranks: the ranks that had not arrived; one that is not held up by others comes first.
    """

    def __init__(self, message: str, *, missing_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = missing_ranks


class RankFailed(GradsyncError, RuntimeError):
    """Another rank died, aborted, or left while this one needed it.

    Attributes:
        rank: the rank that failed, or None when it is not known.
        phase: where that rank was: "joining" until all have met, "running" from then on, or "left"; "collective" where
            shared memory showed it, "function" where a function that ranks were started for raised.
        exit_code: its exit code (negative: the signal), where known.
        traceback_text: its traceback, where known.
        results: what a function that ranks were started for had returned on others of them, by rank.
        was_silent: whether it was found stopped, gone or out of reach, after it had not been heard of for seconds.
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
    """The communicator was closed or aborted, or belongs to the process this one was forked from."""


class NcclError(GradsyncError, RuntimeError):
    """NCCL reported an error.

    Attributes:
        code: the ncclResult_t value; 0 where NCCL gave none.
        name: its name, e.g. "ncclUnhandledCudaError".
    """

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class MpiError(GradsyncError, RuntimeError):
    """MPI reported an error.

    Attributes:
        code: the error class, e.g. 15 for MPI_ERR_TRUNCATE in MPICH; 0 where MPI gave none.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NonFiniteGradient(GradsyncError, ArithmeticError):
    """A gradient holds NaN or infinity, and the policy is to raise. The same on every rank.

    Attributes:
        rank: the first rank whose own gradients do; None where all are finite, and their sum overflowed.
        parameter: the first one of that rank that does, in the order of their reduction; "" where `rank` is None.
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
        rank: whose program wrote to it.
        parameter: whose gradient it is.
        handed_over_at: "file:line" of the call that handed it over.
    """

    def __init__(self, message: str, *, rank: int | None = None, parameter: str = "", handed_over_at: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.handed_over_at = handed_over_at


class Caller(NamedTuple):
    """A line of the user's program; keeps nothing alive but its code."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """Its number; looked up only here, as that takes long in long files."""
        lines = (line for begin, end, line in self.code.co_lines() if begin <= self.instruction < end)
        return next(lines, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        """Returns "train.py:41 in step", in one line of bounded length."""
        return self._in(self.code.co_filename)

    def short(self) -> str:
        """Returns the same without the file's folder, which may be another one on another machine."""
        return self._in(os.path.basename(self.code.co_filename))

    def _in(self, file: str) -> str:
        return f"{_within(file)}:{self.line} in {_within(self.code.co_name)}"


def caller(thread: int | None = None) -> Caller | None:
    """Returns the line of the user's program that a thread is in: that of its innermost call from outside gradsync.

    Where an installed package is between the two, as torch is in its backward pass, it is the line that called that;
    the package's own only where there is no other. None on gradsync's own threads.

    Args:
        thread: its ident; None is the calling one.
    """
    frame = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    of_package: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename)
        if kind == "program":
            return Caller(code, frame.f_lasti)
        if kind == "launching":  # from here on out it is what called the user's code
            break
        if kind == "package":
            of_package = of_package or frame
        frame = frame.f_back
    return None if of_package is None else Caller(of_package.f_code, of_package.f_lasti)


def callers() -> list[Caller]:
    """Returns the lines of the user's program that this thread is in, the innermost first, chosen as `caller` does."""
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
    """Returns whose code a file has: "gradsync", "launching" in it, "python", a "package", or the "program"."""
    if file.startswith(_PACKAGE):
        return "launching" if file.startswith(_LAUNCHING) else "gradsync"
    if any(folder in file for folder in _PACKAGES):
        return "package"
    return "python" if file.startswith((_STANDARD_LIBRARY, "<frozen ")) else "program"


def _within(name: str) -> str:
    """Returns a name without line breaks; the end of one that is too long."""
    shown = "".join(c if c.isprintable() else "?" for c in name[-_PLACE_CHARACTERS:])
    return shown if len(name) <= _PLACE_CHARACTERS else f"...{shown}"


def shown(value: object) -> str:
    """Returns a wrong argument for an error: its repr; of an array never the elements, but what it was meant to be."""
    return "an array: pass out= by name" if hasattr(value, "shape") and hasattr(value, "dtype") else repr(value)


def uncaught_error() -> BaseException | None:
    """Returns the exception by which this program, about to exit, ends; None where it ends without one.

    At a prompt each exception was shown, and the program went on: none of them has ended it.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or error is _earlier_error else error


def forget_earlier_error() -> None:
    """Takes what sys.last_value holds now for no error that ends this program: test runners, among others, set it."""
    global _earlier_error
    _earlier_error = getattr(sys, "last_value", None)


def describe(error: BaseException) -> str:
    """Returns "ValueError: text" for telling other ranks; never raises, whatever the error's own __str__ does."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its text cannot be made: {type(broken).__name__})"
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
    """Returns the first line of that: without the reports of all ranks that a verdict brings."""
    return describe(error).partition("\n")[0]

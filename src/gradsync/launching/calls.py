"""Calls of functions on ranks: how a call travels there, and what comes back, for `gs.launch`, `launcher` and `spawn`.

A call is pickled before any process starts: as multiprocessing does it, where ranks can import all that is in it, else
with cloudpickle, which sends code. A rank reads both with `pickle.loads`.
"""

from __future__ import annotations

import contextlib
import io
import operator
import os
import pickle
import signal
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import ProcessError, context, popen_spawn_posix, spawn
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, ClassVar

from gradsync.environment import log_warning
from gradsync.errors import GradsyncError, InvalidArgument, RankFailed
from gradsync.launchers import is_rank_of_gradsync
from gradsync.launching.in_rank import rank_main
from gradsync.launching.in_rank.result import ReturnValue
from gradsync.launching.job import Target
from gradsync.launching.outcome import Outcome
from gradsync.machine import current_folder

_START_METHODS = ("spawn", "fork", "forkserver")
_start_method = "spawn"


# -- The start method --------------------------------------------------------------------------------------------------


def set_start_method(method: str) -> None:
    """Sets the start method of `gs.launch`, and the default of `gs.launcher` and `gs.spawn`.

    Each rank is a fresh interpreter ("spawn"), whatever it is.

    Args:
        method: "spawn" (the default), "fork" or "forkserver". With "fork" and "forkserver" each launch logs a warning:
            ranks get no copy of the module globals that the program has set before.

    Raises:
        InvalidArgument: there is no such method.
    """
    global _start_method
    check_start_method("set_start_method", method)
    _start_method = method


def check_start_method(who: str, method: object) -> None:
    """Raises InvalidArgument if there is no such start method; `who` is the name of the public function."""
    if not isinstance(method, str) or method not in _START_METHODS:
        names = ", ".join(map(repr, _START_METHODS))
        raise InvalidArgument(f"{who} needs the start method to be one of {names}, got {method!r}")


def warn_of_start_method(who: str, method: str | None) -> None:
    """Logs a warning for a launch by "fork" or "forkserver"; None means the method of `set_start_method`."""
    method = method or _start_method
    if method != "spawn":
        log_warning(
            f"{who}: gradsync starts ranks by spawn, not by {method}: module globals that were set before are not "
            "copied to the ranks; pass what they need as arguments"
        )


# -- The call ----------------------------------------------------------------------------------------------------------


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, for errors and `ps`."""
    return getattr(function, "__qualname__", repr(function))


def call_target(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] = {},
    *,
    who: str,
    name: str | None = None,
) -> Target:
    """Prepares a function call for ranks that are children of this process.

    Args:
        function: the function that each rank calls.
        arguments, keywords: the function's arguments.
        who: the name of the public function, for errors.
        name: the function's name in errors and `ps`; by default its own name.

    Raises:
        InvalidArgument: `function` is not callable; the arguments are not a sequence; the function or an argument
            cannot be pickled; or this process is itself a rank.
    """
    if not callable(function):
        raise InvalidArgument(f"{who} needs a function, got {function!r}")
    if isinstance(arguments, str | bytes) or not isinstance(arguments, Sequence):
        raise InvalidArgument(f"{who} needs args as a tuple, got {arguments!r}; one argument is written (value,)")
    name = name or function_name(function)
    _refuse_inside_rank(name)
    inherited = _InheritedDescriptors()
    preparation = preparation_data(name)
    # Queues and locks of multiprocessing can be pickled only while it starts a process. From here on it seems to.
    context.set_spawning_popen(inherited)
    try:
        record = {
            "kind": "function",
            "preparation": pickle.dumps(preparation),
            "call": _pickle_call(name, function, tuple(arguments), dict(keywords)),
            "tracker_descriptor": _resource_tracker_descriptor(inherited),
        }
    finally:
        context.set_spawning_popen(None)
    return Target(record, (name,), tuple(dict.fromkeys(inherited.descriptors)))


def _refuse_inside_rank(name: str) -> None:
    if rank_main.is_importing_main:
        raise InvalidArgument(
            "each rank imports the script that launched the ranks, to find the function, and this import launches "
            'ranks again; put the launch under `if __name__ == "__main__":`'
        )
    if is_rank_of_gradsync() and (rank := os.environ.get("RANK")):
        advice = (
            "a rank cannot launch other ranks; launch the function from the process that launched this rank"
            if rank_main.runs_function
            else "this script starts its own ranks; run it with python, not with gradsync run"
        )
        raise InvalidArgument(f"{name} was launched inside rank {rank}: {advice}")


def preparation_data(name: str) -> dict[str, Any]:
    """Returns what makes a rank like this process (sys.path, `__main__` ...), as multiprocessing describes it.

    Raises:
        InvalidArgument: the current directory has been removed.
    """
    current_folder()
    sys.modules["__main__"].__dict__.setdefault("__spec__", None)  # before Python 3.12, pdb leaves it out
    preparation = spawn.get_preparation_data(name)
    # Ranks cannot import a `__main__` that was typed in or piped in, and multiprocessing leaves out that of a package.
    if str(preparation.get("init_main_from_name", "")).rpartition(".")[2] == "__main__":
        del preparation["init_main_from_name"]
    if not os.path.exists(preparation.get("init_main_from_path", "")):
        preparation.pop("init_main_from_path", None)
    return preparation


def ranks_import_main() -> bool:
    """Returns whether ranks import this process's `__main__`, under another name, so that its guard does not run."""
    return not {"init_main_from_name", "init_main_from_path"}.isdisjoint(preparation_data("main"))


class _InheritedDescriptors(popen_spawn_posix.Popen):
    """Stands for the process that multiprocessing starts; collects the descriptors that ranks must inherit."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return fd


def _resource_tracker_descriptor(inherited: _InheritedDescriptors) -> int | None:
    """Returns the descriptor of this process's resource tracker, which the ranks inherit; None without a tracker.

    The ranks must share this tracker: a rank's own tracker would unlink shared memory to which the rank has only
    attached.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return None if tracker is None else inherited.duplicate_for_child(tracker.getfd())


def _pickle_call(name: str, *call: Any) -> bytes:
    """Pickles a call in one piece, so that two arguments that share an object share one object in the rank too."""
    imports_main = ranks_import_main()
    if imports_main:
        try:
            return bytes(ForkingPickler.dumps(call))
        except Exception:
            pass  # something in it has no name by which ranks could import it
    try:
        return _dumps_by_value(call, imports_main)
    except Exception as error:
        function, arguments, keywords = call
        inside = "create it inside the function"
        parts = [
            (name, function, "define it at the top level of a module or script, and create inside it what it needs")
        ]
        parts += [(f"args[{position}] of {name}", value, inside) for position, value in enumerate(arguments)]
        parts += [(f"argument {key} of {name}", value, inside) for key, value in keywords.items()]
        for part, thing, remedy in parts:
            try:
                _dumps_by_value(thing, imports_main)
            except Exception as reason:
                text = f"{part} needs to be picklable to reach the ranks: {reason}; {remedy}"
                raise InvalidArgument(text) from None
        raise InvalidArgument(f"the call of {name} needs to be picklable to reach the ranks: {error}") from None


def _dumps_by_value(thing: Any, imports_main: bool) -> bytes:
    """Pickles functions and classes with their code, unless ranks find them by name."""
    import cloudpickle  # imported here, because it takes long to import, and most calls pickle by name

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # The first table holds the functions that pickle connections and locks of multiprocessing.
        dispatch_table: ClassVar = ChainMap(
            ForkingPickler(io.BytesIO()).dispatch_table, cloudpickle.Pickler.dispatch_table
        )

        def reducer_override(self, thing: Any) -> Any:
            # cloudpickle would copy a class of `__main__`, and an instance of the copy would not be an instance of the
            # class that the rank imports.
            if imports_main and _is_found_in_main(thing):
                return NotImplemented  # by name
            return super().reducer_override(thing)

    buffer = io.BytesIO()
    Pickler(buffer).dump(thing)
    return buffer.getvalue()


def _is_found_in_main(thing: Any) -> bool:
    """Returns whether a thing is a function or class that pickle finds in `__main__` by its name."""
    if not isinstance(thing, type | FunctionType) or thing.__module__ != "__main__":
        return False
    try:
        return operator.attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


# -- What comes back ---------------------------------------------------------------------------------------------------


class WorkerError(GradsyncError, ProcessError):
    """A worker (a rank process of `launch`) failed; the other workers have ended.

    The first line of the error reads "worker[1] failed with exitcode=2".

    Attributes:
        msg: the failure in words, and the worker's traceback if there is one.
        exitcode: the worker's exit code; -n if signal n killed it; None if it could not be killed.
        worker_id: the worker's rank.
        results: the return values of the workers that had sent them, by rank.
    """

    exitcode: int | None = None
    worker_id: int = -1
    results: Mapping[int, Any] = {}

    def __init__(self, msg: str, **attributes: Any) -> None:
        super().__init__(msg, **attributes)
        self.msg = msg


class MainProcessError(GradsyncError, ProcessError):
    """A signal to the launching process ended the run.

    Attributes:
        signal_no: the signal's number.
    """

    signal_no: int = 0


def load_result(rank: int, value: ReturnValue) -> Any:
    """Returns the return value of one rank.

    Raises:
        InvalidArgument: the value cannot be unpickled in this process.
    """
    try:
        return value.load()
    except Exception as error:
        raise InvalidArgument(
            f"the return value of rank {rank} cannot be unpickled in the launching process: {error!r}"
        ) from None


def take_results(outcome: Outcome) -> list[Any]:
    """Returns the return values in the order of the ranks, after a run without a failure.

    Args:
        outcome: the outcome of the run. Its results are removed one by one, so that large ones are not held twice.

    Returns:
        The return values; None, with a RuntimeWarning, for a rank that exited before its function returned.

    Raises:
        InvalidArgument: a value cannot be unpickled in this process.
    """
    results: list[Any] = []
    for rank in outcome.ranks:
        value, rank.result = rank.result, None
        if value is None:
            text = f"rank {rank.rank} exited with code 0 before its function returned; its result is None"
            warnings.warn(text, RuntimeWarning, stacklevel=3)  # at the call of `launch`
        results.append(None if value is None else load_result(rank.rank, value))
    return results


def raise_for_signal(outcome: Outcome) -> None:
    """Raises KeyboardInterrupt if SIGINT ended the run, and SystemExit(128 + its number) if another signal did."""
    if outcome.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal_number is not None:
        raise SystemExit(outcome.exit_code)


def failure(outcome: Outcome, message: str) -> RankFailed:
    """Returns the error for a run with a failed rank, with the return values that other ranks have sent.

    The text is the message and the rank's traceback.
    """
    root = outcome.root_cause
    assert root is not None
    text = root.error.text.rstrip() if root.error else ""
    values = {}
    for rank in outcome.ranks:
        if rank.result is not None:
            with contextlib.suppress(Exception):  # an error about a value would hide the failure of the rank
                values[rank.rank] = rank.result.load()
    return RankFailed(
        f"{message}\n\n{text}" if text else message,
        rank=root.rank,
        phase="function",
        exit_code=root.exit_code,
        traceback_text=text,
        results=values,
    )


def own_backend(who: str, backend: str) -> str:
    """Returns gradsync's name of a backend: "gloo", a backend of PyTorch, becomes "shm", with a warning in the log."""
    if backend != "gloo":
        return backend
    log_warning(f"{who}: gradsync has no backend gloo; the ranks use shm, which joins ranks of one host")
    return "shm"

"""`gs.launch`: calls a function in several rank processes on this machine.

`gs.spawn` and `gs.launcher` use functions of this module too. The launcher pickles the call before any process starts,
with pickle, or with cloudpickle if pickle cannot pickle the call. A rank reads the call with `pickle.loads` in both
cases; `pickle.loads` imports cloudpickle if needed. After the run, the caller gets the results or the error.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import operator
import os
import pickle
import signal
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import ProcessError, context, popen_spawn_posix, spawn
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, ClassVar

from gradsync import environment
from gradsync.errors import GradsyncError, InvalidArgument, RankFailed
from gradsync.launching.in_rank import rank_main
from gradsync.launching.in_rank.result import ReturnValue
from gradsync.launching.job import Job, Target
from gradsync.launching.outcome import Outcome, RankOutcome, signal_name
from gradsync.launching.supervisor import supervise
from gradsync.machine import default_process_count

_START_METHODS = ("spawn", "fork", "forkserver")
_default = "spawn"

_log = logging.getLogger("gradsync")

_Pickler = Callable[[io.BytesIO], Any]
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WorkerError(GradsyncError, ProcessError):
    """A worker (a rank process of `launch`) failed; the other workers have ended.

    The first line of the error reads "worker[1] failed with exitcode=2".

    Attributes:
        msg: the failure in words, and the worker's traceback if there is one.
        exitcode: the worker's exit code; -n if signal n killed the worker; None if gradsync could not kill the worker.
        worker_id: the worker's rank.
        results: a dictionary from rank to return value, for the workers that had sent their values.
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


def launch(
    func: Callable[..., Any],
    args: Any = (),
    nprocs: int | None = None,
    master_addr: str = "localhost",
    master_port: int | None = None,
) -> list[Any]:
    """Calls `func(args)`, or `func()` if `args` is (), in `nprocs` processes on this machine, and waits for them.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    and the variables that `init_process_group()` needs. The function must call `init_process_group()` itself. The
    environment of the calling process does not change. Each process is a fresh interpreter, so a script that calls
    `launch` needs the `if __name__ == "__main__":` guard.

    Args:
        func: a function of any kind, also a lambda, a closure or a function of a notebook.
        args: the single argument of the function, of any type that pickle or cloudpickle can pickle. For several
            arguments write `gs.launch(functools.partial(func, a, b), nprocs=2)`.
        nprocs: the number of processes; by default one per visible GPU, or per usable core where there is no GPU.
        master_addr: the value of MASTER_ADDR in the processes, for the function's own use.
        master_port: the value of MASTER_PORT in the processes, for the function's own use; None means a free port.

    Returns:
        The return values, in the order of the ranks. The value is None, with a RuntimeWarning, for a process that exits
        with code 0 before the function returns.

    Raises:
        InvalidArgument: `args` is a tuple of length 1, or of as many items as `func` has required parameters: perhaps
            the caller means separate arguments, as `gs.spawn` takes them. Other reasons: the function or its argument
            cannot be pickled; a return value cannot be unpickled in this process; `nprocs` is not a positive integer;
            an environment variable of gradsync is invalid; this process is a rank.
        BackendUnavailable: the system is not Linux, or allows no more processes or open files.
        WorkerError: a worker failed, for example because the `__main__` guard is missing, or its return value cannot be
            pickled.
        MainProcessError: this process received SIGINT, SIGTERM or SIGHUP (only if its main thread called `launch`).
    """
    warn_of_start_method("launch", None)
    target = function_target(func, _arguments(func, args), {}, who="launch")
    count = default_process_count() if nprocs is None else nprocs
    job = Job(target, count, master_addr=master_addr, master_port=master_port)
    outcome = supervise(job)
    if outcome.signal_number is not None:
        name = signal_name(outcome.signal_number)
        raise MainProcessError(
            f"the main process received {name}, and ended the workers", signal_no=outcome.signal_number
        )
    root = outcome.root_cause
    if root is not None:
        error = failure(
            outcome, root, f"worker[{root.rank}] failed with exitcode={root.exit_code}\n{outcome.describe_cause()}"
        )
        raise WorkerError(str(error), exitcode=root.exit_code, worker_id=root.rank, results=dict(error.results))
    return take_results(outcome, stacklevel=2)


def _arguments(func: object, args: Any) -> tuple[Any, ...]:
    """Returns the positional arguments of the call: `args` as the only argument; none if `args` is an empty tuple.

    Raises:
        InvalidArgument: `args` is a tuple that may be meant as several arguments, as in spawn(f, (a, b)).
    """
    if not isinstance(args, tuple):
        return (args,)
    if args and callable(func) and len(args) in (1, _count_required(func)):
        name = function_name(func)
        raise InvalidArgument(
            f"launch passes args to {name} as one argument, but args is a tuple of length {len(args)}, perhaps meant "
            f"as separate arguments: to call {name}(*args), write gs.launch(functools.partial({name}, *args)); to call "
            f"{name}(args), write gs.launch(functools.partial({name}, args))"
        )
    return (args,) if args else ()


def _count_required(func: Callable[..., Any]) -> int:
    """Counts the positional parameters without a default; returns 0 if the parameters are not known."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is each.empty for each in parameters)


# -- The start method --------------------------------------------------------------------------------------------------


def set_start_method(method: str) -> None:
    """Sets the start method of `gs.launch`, and the default of `gs.launcher` and `gs.spawn`.

    gradsync starts each rank as a fresh interpreter ("spawn"), whatever the method is.

    Args:
        method: "spawn" (the default), "fork" or "forkserver". With "fork" and "forkserver" each launch logs a warning:
            ranks get no copy of the module globals that the program has set before.

    Raises:
        InvalidArgument: there is no such method.
    """
    global _default
    check_start_method("set_start_method", method)
    _default = method


def check_start_method(who: str, method: object) -> None:
    """Raises InvalidArgument if there is no such start method; `who` is the name of the public function."""
    if not isinstance(method, str) or method not in _START_METHODS:
        names = ", ".join(map(repr, _START_METHODS))
        raise InvalidArgument(f"{who} needs the start method to be one of {names}, got {method!r}")


def warn_of_start_method(who: str, method: str | None) -> None:
    """Logs a warning for a launch by "fork" or "forkserver".

    Args:
        who: the name of the public function.
        method: the start method that the call names; None means the method of `set_start_method`.
    """
    method = method or _default
    if method != "spawn":
        _log.warning(
            "%s: gradsync starts ranks by spawn, not by %s: module globals that were set before are not copied to the "
            "ranks; pass what they need as arguments",
            *(who, method),
        )


# -- The call ----------------------------------------------------------------------------------------------------------


def function_target(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str | None = None,
    *,
    who: str,
) -> Target:
    """Prepares a function call for ranks that are children of this process.

    Args:
        function: the function that each rank calls.
        arguments: the function's positional arguments.
        keywords: the function's keyword arguments.
        name: the function's name in errors and `ps`; by default its own name.
        who: the name of the public function, for errors.

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
    call = (function, tuple(arguments), dict(keywords))
    inherited = _InheritedDescriptors()
    preparation = spawn.get_preparation_data(name)
    imports_main = ranks_import_main()
    if not imports_main:
        preparation.pop("init_main_from_path", None)
    # Queues and locks of multiprocessing can be pickled only while multiprocessing spawns a process. The next line
    # pretends that multiprocessing spawns a process.
    context.set_spawning_popen(inherited)
    try:
        record = {
            "kind": "function",
            "preparation": pickle.dumps(preparation),
            "call": _pickle_call(call, name, imports_main=imports_main),
            "tracker_descriptor": _resource_tracker_descriptor(inherited),
        }
    finally:
        context.set_spawning_popen(None)
    return Target(record, (name,), tuple(dict.fromkeys(inherited.descriptors)))


def own_backend(who: str, backend: str) -> str:
    """Returns gradsync's name of a backend: "gloo", a backend of PyTorch, becomes "shm", with a warning in the log."""
    if backend != "gloo":
        return backend
    _log.warning("%s: gradsync has no backend gloo; the ranks use shm, which joins ranks of one host", who)
    return "shm"


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, for errors and `ps`."""
    return getattr(function, "__qualname__", repr(function))


def _refuse_inside_rank(name: str) -> None:
    if rank_main.is_importing_main():
        raise InvalidArgument(
            "each rank imports the script that launched the ranks, to find the function, and this import launches "
            'ranks again; put the launch under `if __name__ == "__main__":`'
        )
    if rank := os.environ.get(environment.RANK):
        advice = (
            "a rank cannot launch other ranks; launch the function from the process that launched this rank"
            if rank_main.runs_function()
            else "this script starts its own ranks; run it with python, not with gradsync run"
        )
        raise InvalidArgument(f"{name} was launched inside rank {rank}: {advice}")


class _InheritedDescriptors(popen_spawn_posix.Popen):
    """Replaces multiprocessing's process object during pickling; collects the descriptors that ranks must inherit."""

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


def ranks_import_main() -> bool:
    """Returns whether ranks import this process's `__main__`, under another name, so that its guard does not run.

    Ranks cannot import an interactive session, and multiprocessing leaves out the `__main__` of a package.
    """
    preparation = spawn.get_preparation_data("main")
    name, path = preparation.get("init_main_from_name"), preparation.get("init_main_from_path")
    if name is not None:
        return str(name).rpartition(".")[2] != "__main__"
    return path is not None and os.path.exists(path)


def _pickle_call(call: _Call, name: str, *, imports_main: bool) -> bytes:
    """Pickles a call in one piece, so that two arguments that share an object share one object in the rank too.

    What ranks cannot import is pickled with its code.

    Args:
        call: the call.
        name: the function's name, for errors.
        imports_main: see `ranks_import_main`.

    Raises:
        InvalidArgument: the function or an argument cannot be pickled.
    """
    if imports_main:
        with contextlib.suppress(Exception):
            return _dumps(ForkingPickler, call)
    pickler = _pickler_by_value(imports_main)
    try:
        return _dumps(pickler, call)
    except Exception as error:
        raise InvalidArgument(_explain(call, name, pickler, error)) from None


def _dumps(pickler: _Pickler, thing: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(thing)
    return buffer.getvalue()


def _pickler_by_value(imports_main: bool) -> _Pickler:
    """Returns a pickler that pickles functions and classes with their code, unless ranks find them by name."""
    import cloudpickle  # imported here, because it takes long to import, and most calls pickle by name

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        # A new pickler reads dispatch_table, which holds the functions that pickle connections and locks of
        # multiprocessing.
        dispatch_table: ClassVar = ChainMap(
            ForkingPickler(io.BytesIO()).dispatch_table, cloudpickle.Pickler.dispatch_table
        )

        def reducer_override(self, thing: Any) -> Any:
            # The next lines pickle by name. cloudpickle would copy a class of `__main__`, and an instance of the copy
            # would not be an instance of the class that the rank imports.
            if imports_main and _is_found_in_main(thing):
                return NotImplemented
            return super().reducer_override(thing)

    return Pickler


def _is_found_in_main(thing: Any) -> bool:
    """Returns whether a thing is a function or class that pickle finds in `__main__` by its name."""
    if not isinstance(thing, type | FunctionType) or thing.__module__ != "__main__":
        return False
    try:
        return operator.attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


def _explain(call: _Call, name: str, pickler: _Pickler, error: Exception) -> str:
    """Returns the error text for a call that cannot be pickled: the part that fails, the reason, and advice."""
    for part, thing, remedy in _parts_of(call, name):
        try:
            _dumps(pickler, thing)
        except Exception as part_error:
            return f"{part} needs to be picklable to reach the ranks: {part_error}; {remedy}"
    return f"the call of {name} needs to be picklable to reach the ranks: {error}"


def _parts_of(call: _Call, name: str) -> Iterator[tuple[str, Any, str]]:
    """Yields each part of a call: its name, the part itself, and advice if it cannot be pickled."""
    function, arguments, keywords = call
    yield name, function, "define it at the top level of a module or script, and create inside it what it needs"
    for position, value in enumerate(arguments):
        yield f"args[{position}] of {name}", value, "create it inside the function"
    for key, value in keywords.items():
        yield f"argument {key} of {name}", value, "create it inside the function"


# -- The results -------------------------------------------------------------------------------------------------------


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


def take_results(outcome: Outcome, *, stacklevel: int) -> list[Any]:
    """Returns the return values in the order of the ranks, after a run without a failure; removes them from `outcome`.

    Args:
        outcome: the outcome of the run. `take_results` removes its results one by one, so that large results are not in
            memory twice.
        stacklevel: the `stacklevel` of a warning, as the caller would give it to `warnings.warn`.

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
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
        results.append(None if value is None else load_result(rank.rank, value))
    return results


def failure(outcome: Outcome, root: RankOutcome, message: str) -> RankFailed:
    """Returns the error for a run with a failed rank; the error has the return values that other ranks have sent.

    Args:
        outcome: the outcome of the run.
        root: the rank whose failure came first.
        message: the beginning of the error's text; the rank's traceback follows.
    """
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


def raise_for_signal(outcome: Outcome) -> None:
    """Raises the exception for the signal that ended a run; does nothing if no signal ended the run.

    Raises:
        KeyboardInterrupt: the signal was SIGINT.
        SystemExit: another signal, such as SIGTERM, ended the run; the exit code is 128 + the signal's number.
    """
    if outcome.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal_number is not None:
        raise SystemExit(outcome.exit_code)

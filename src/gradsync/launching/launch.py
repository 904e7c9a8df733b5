"""`gs.launch`: calls a function in several rank processes on this machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from multiprocessing import ProcessError
from typing import Any

from gradsync.errors import GradsyncError, InvalidArgument
from gradsync.launching.function_call import (
    chosen_start_method,
    function_name,
    function_target,
    returned_values,
    take_results,
    traceback_of,
)
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome, RankOutcome, signal_name
from gradsync.launching.supervisor import supervise
from gradsync.machine import default_process_count


class WorkerError(GradsyncError, ProcessError):
    """A worker of `launch` failed; no other worker runs any more.

    The first line of the error reads "worker[1] failed with exitcode=2".

    Attributes:
        msg: the failure in words, and the worker's traceback if there is one.
        exitcode: the worker's exit code; -n if signal n killed it; None if it could not be killed.
        worker_id: the worker's rank.
        results: a dictionary from rank to return value, for the workers that had sent their values.
    """

    def __init__(
        self, msg: str, *, exitcode: int | None = None, worker_id: int = -1, results: dict[int, Any] | None = None
    ) -> None:
        super().__init__(msg)
        self.msg = msg
        self.exitcode = exitcode
        self.worker_id = worker_id
        self.results = results or {}


class MainProcessError(GradsyncError, ProcessError):
    """A signal to the launching process ended the run; all workers have ended.

    Attributes:
        signal_no: the signal's number.
    """

    def __init__(self, msg: str, *, signal_no: int = 0) -> None:
        super().__init__(msg)
        self.signal_no = signal_no


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
    environment of the calling process does not change. The start method is "spawn" unless `gs.set_start_method` has
    chosen a different one; with "spawn" and "forkserver" a script that calls `launch` needs the `if __name__ ==
    "__main__":` guard.

    Args:
        func: a function at the top level of a module or script. Any other function needs cloudpickle, or the start
            method "fork".
        args: the one argument of the function, of any type. It must be picklable, unless the start method is "fork".
            For several arguments write `gs.launch(functools.partial(func, a, b), nprocs=2)`.
        nprocs: the number of processes; by default one per visible GPU, or per usable core where there is no GPU.
        master_addr: the value of MASTER_ADDR in the processes, for the function's own use.
        master_port: the port that `func` finds in MASTER_PORT, for its own use; None means a free port.

    Returns:
        The return values, in the order of the ranks. The value is None, with a RuntimeWarning, for a process that exits
        with code 0 before the function returns.

    Raises:
        InvalidArgument: `args` is a tuple of length 1, or of as many items as `func` has required parameters, so it may
            be meant as separate arguments, as before 0.2. Or the function or its argument cannot be pickled, `nprocs`
            is not a positive integer, the `__main__` guard is missing, or ranks would be forked although this process
            has initialised CUDA.
        WorkerError: a worker failed.
        MainProcessError: this process received SIGINT, SIGTERM or SIGHUP (only if its main thread called `launch`).
    """
    method = chosen_start_method("launch", None)
    target = function_target(func, _arguments(func, args), {}, who="launch", start_method=method)
    count = default_process_count() if nprocs is None else nprocs
    job = Job(target, count, master_addr=master_addr, master_port=master_port, start_method=method)
    outcome = supervise(job)
    if outcome.signal_number is not None:
        name = signal_name(outcome.signal_number)
        raise MainProcessError(
            f"the main process received {name}; all workers were ended", signal_no=outcome.signal_number
        )
    root = outcome.root_cause
    if root is not None:
        raise _worker_error(outcome, root)
    return take_results(outcome, stacklevel=2)


def _arguments(func: object, args: Any) -> tuple[Any, ...]:
    """Returns the positional arguments of the call: `args` as the only one, or none if `args` is an empty tuple.

    Raises:
        InvalidArgument: `args` is a tuple that may be meant as several arguments: before 0.2, launch(f, (a, b)) called
            f(a, b).
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


def _worker_error(outcome: Outcome, root: RankOutcome) -> WorkerError:
    text = f"worker[{root.rank}] failed with exitcode={root.exit_code}\n{outcome.describe_cause()}"
    trace = traceback_of(root)
    return WorkerError(
        f"{text}\n\n{trace}" if trace else text,
        exitcode=root.exit_code,
        worker_id=root.rank,
        results=returned_values(outcome),
    )

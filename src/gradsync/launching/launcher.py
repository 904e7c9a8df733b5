"""`gs.launcher`: a decorator that makes calling a function run it on several ranks, over the supervisor."""

from __future__ import annotations

import functools
import importlib
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from gradsync.errors import InvalidArgument, RankFailed
from gradsync.launching.outcome import Outcome, load_results
from gradsync.launching.rank_main import HOW_TO_DEFINE
from gradsync.launching.supervisor import supervise
from gradsync.launching.targets import function_target
from gradsync.visible_devices import default_process_count

_Result = TypeVar("_Result")
_DEVICE_BACKENDS = {"auto": "auto", "cpu": "shm", "gpu": "nccl"}
# Marks the functions that `launcher` made, so that a rank can find the user's own function beneath.
_MARK = "_gradsync_launcher"


@overload
def launcher(func: Callable[..., _Result]) -> Callable[..., list[_Result]]: ...


@overload
def launcher(
    func: None = None,
    *,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "auto",
    backend: str = "auto",
) -> Callable[[Callable[..., _Result]], Callable[..., list[_Result]]]: ...


def launcher(
    func: Callable[..., Any] | None = None,
    *,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "auto",
    backend: str = "auto",
) -> Callable[..., Any]:
    """Makes a call of the decorated function run it in `n_gpus` processes, one per rank.

    With or without arguments: `@gs.launcher` or `@gs.launcher(n_gpus=2)`. In each rank the process group is
    initialised before the function runs (`gs.get_communicator()` gives it) and destroyed after it. Processes
    are spawned: a script that calls the function needs the `if __name__ == "__main__":` guard.

    Args:
        func: the function, at the top level of a module or script.
        n_gpus: number of processes; by default one per visible GPU, or per usable core where there is no GPU.
        world_size: number of ranks in the run; this version runs on one machine, so it equals `n_gpus`.
        rank_start: rank of the first process; this version runs on one machine, so it is 0.
        master_ip: "localhost" or "127.0.0.1": this version runs on one machine.
        port: port of the rendezvous server on 127.0.0.1; 0 takes a free one.
        device_type: "auto", "cpu" or "gpu"; with "auto" as backend "cpu" takes shm and "gpu" takes nccl.
        backend: what `init_process_group` is given.

    Returns:
        The function; a call of it returns what each rank returned, by local rank. It raises InvalidArgument
        when the function or an argument does not pickle, RankFailed when a rank fails (with its rank, exit
        code and traceback), KeyboardInterrupt after Ctrl-C, and SystemExit(128 + n) after SIGTERM or SIGHUP.

    Raises:
        InvalidArgument: an argument is out of its range, or asks for several machines.
    """
    _check_one_machine(n_gpus, world_size, rank_start, master_ip, port)
    if device_type not in _DEVICE_BACKENDS:
        raise InvalidArgument(f"launcher needs device_type 'auto', 'cpu' or 'gpu', got {device_type!r}")
    if device_type == "cpu" and backend == "nccl":
        raise InvalidArgument("launcher got backend 'nccl' with device_type 'cpu'; NCCL moves GPU arrays only")

    group_backend = _DEVICE_BACKENDS[device_type] if backend == "auto" else backend

    def decorate(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        if not callable(function):
            hint = f"; for {function} ranks write launcher(n_gpus={function})" if isinstance(function, int) else ""
            raise InvalidArgument(f"launcher needs a function, got {function!r}{hint}")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            reference = _reference(function)
            target = function_target(
                _run_in_group, (*reference, group_backend, args, kwargs), {}, function.__qualname__
            )
            count = n_gpus or world_size or default_process_count(device_type)
            return _results(supervise(target, count, backend=group_backend, rendezvous_port=port))

        setattr(run, _MARK, True)
        return run

    return decorate if func is None else decorate(func)


def _check_one_machine(n_gpus: int | None, world_size: int | None, rank_start: int, master_ip: str, port: int) -> None:
    """Refuses what this version cannot do, rather than doing something else."""
    for name, value in (("n_gpus", n_gpus), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidArgument(f"launcher needs {name} to be an integer of at least 1, got {value!r}")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise InvalidArgument(f"launcher needs port to be 0 to 65535, got {port!r}")
    several = "; this version starts all ranks of a run on one machine"
    if rank_start != 0:
        raise InvalidArgument(f"launcher needs rank_start 0, got {rank_start!r}{several}")
    if None not in (n_gpus, world_size) and n_gpus != world_size:
        raise InvalidArgument(f"launcher needs world_size = n_gpus = {n_gpus}, got {world_size}{several}")
    if master_ip not in ("localhost", "127.0.0.1"):
        raise InvalidArgument(f"launcher needs master_ip 'localhost' or '127.0.0.1', got {master_ip!r}{several}")


def _reference(function: Callable[..., Any]) -> tuple[str, str]:
    """Gives the module and name by which a rank finds the function again.

    The name is bound to the decorated function, so that pickle would refuse the function itself.

    Raises:
        InvalidArgument: the function is not found there.
    """
    module, name = function.__module__, function.__qualname__
    try:
        found = _find(module, name)
    except (AttributeError, KeyError, InvalidArgument):
        found = None
    if found is not function:
        raise InvalidArgument(
            f"{name} needs to be found as {module}.{name} to reach the ranks by pickle; define it at the top "
            "level of a module or script, not as a lambda or inside another function"
        )
    return module, name


def _find(module: str, name: str) -> Callable[..., Any]:
    """Looks up a function, and takes off the decorators down to what `launcher` was given."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    layer = found
    while layer is not None and _MARK not in vars(layer):
        layer = getattr(layer, "__wrapped__", None)
    # Not marked at all: `run = launcher(function)` leaves the name to the plain function.
    function: Callable[..., Any] = found if layer is None else layer.__wrapped__
    return function


def _run_in_group(module: str, name: str, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs in each rank: the function inside an initialised process group."""
    from gradsync.process_group import destroy_process_group, init_process_group, is_initialized

    importlib.import_module(module)
    try:
        function = _find(module, name)
    except AttributeError:
        raise InvalidArgument(f"{name} is not found in {module} of this rank; {HOW_TO_DEFINE}") from None
    init_process_group(backend)
    try:
        return function(*args, **kwargs)
    finally:
        if is_initialized():  # the function may have destroyed it itself
            destroy_process_group()


def _results(outcome: Outcome) -> list[Any]:
    """Gives the results of a run, or raises why there are none."""
    if outcome.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal_number is not None:
        raise SystemExit(outcome.exit_code)
    root = outcome.root_cause
    if root is None:
        return load_results(outcome)
    text = root.error.text.rstrip() if root.error else ""
    raise RankFailed(
        f"{root.describe()}; all other ranks were ended" + (f"\n\n{text}" if text else ""),
        rank=root.rank,
        phase="function",
        exit_code=root.exit_code,
        traceback_text=text,
    )

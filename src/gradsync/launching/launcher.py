"""`gs.launcher`: a decorator that makes each call of a function run the function on several ranks.

Ranks import scripts with decorated functions too, so this module imports the modules that start ranks only when the
program calls a decorated function or passes `start_method`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from gradsync.arguments import check_integer, check_port, integer_of, is_loopback
from gradsync.backends import BACKENDS
from gradsync.errors import AuthenticationError, InvalidArgument
from gradsync.machine import default_process_count

_DEVICE_BACKENDS = {"auto": "auto", "cpu": "shm", "gpu": "nccl"}
_DECORATED = "_gradsync_launcher"

_Result = TypeVar("_Result")


@overload
def launcher(
    func: Callable[..., _Result],
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "auto",
    backend: str = "auto",
    *,
    start_method: str | None = None,
) -> Callable[..., list[_Result]]: ...


@overload
def launcher(
    func: None = None,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "auto",
    backend: str = "auto",
    *,
    start_method: str | None = None,
) -> Callable[[Callable[..., _Result]], Callable[..., list[_Result]]]: ...


def launcher(
    func: Callable[..., Any] | None = None,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "auto",
    backend: str = "auto",
    *,
    start_method: str | None = None,
) -> Callable[..., Any]:
    """Decorates a function, so that a call runs the function in `n_gpus` processes on this machine, one per rank.

    Write `@gs.launcher`, `@gs.launcher(n_gpus=2)`, or the call `gs.launcher(func, 2)`. In each rank, gradsync
    initialises the process group before the function runs, and destroys the process group when the function has ended.
    Each process is a fresh interpreter, so a script that calls the function needs the `if __name__ == "__main__":`
    guard. gradsync starts processes and binds ports only during a call.

    For a run on several machines, every machine calls the function with the same `world_size`, `master_ip` and `port`,
    and its own `rank_start`. All ranks then wait for each other after they have joined the process group, and before
    they leave it. The machine with rank_start 0 hosts the rendezvous server at `master_ip`:`port`. If other machines
    can reach this address, every machine needs the secret of the run: in a file of mode 0600 whose path is in
    GRADSYNC_SECRET_FILE, or in GRADSYNC_SECRET.

    Args:
        func: the function to decorate, also a lambda, a closure or a function of a notebook.
        n_gpus: the number of processes on this machine; by default one per visible GPU. If there is no GPU, or
            `device_type` is "cpu", the default is one per usable core. The default is at most `world_size` -
            `rank_start`.
        world_size: the number of ranks in the run; by default `n_gpus`.
        rank_start: the rank of this machine's first process.
        master_ip: the address or name of the machine with rank_start 0; "localhost" is loopback.
        port: the port of the rendezvous server; 0 chooses a free port, and is allowed only on the machine with
            rank_start 0.
        device_type: the type of the devices, "auto", "cpu" or "gpu". If `backend` is "auto", "cpu" selects shm and
            "gpu" selects nccl.
        backend: the backend for `init_process_group`; "gloo", a backend of PyTorch, becomes "shm", with a warning.
        start_method: "spawn", "fork" or "forkserver", which all do the same; see `gs.set_start_method`.

    Returns:
        The decorated function. A call returns a list of the return values of this machine's ranks, in rank order.
        The value is None, with a RuntimeWarning, for a process that exits with code 0 before the function returns. The
        call raises InvalidArgument if the function or an argument cannot be pickled, or if a return value cannot be
        unpickled. The call raises RankFailed if a rank fails, or if its return value cannot be pickled. The attributes
        of this error are the rank, its exit code and traceback, and the return values of the ranks that had finished.
        The call raises AuthenticationError if the secret is missing,
        RendezvousError if the port is taken, and BackendUnavailable if the ranks cannot be started. Ctrl-C raises
        KeyboardInterrupt. SIGTERM and SIGHUP raise SystemExit(128 + n), where n is the signal's number.

    Raises:
        InvalidArgument: an argument is out of its range, or contradicts another argument.
    """
    rank_start, port = check_integer("launcher", "rank_start", rank_start, 0), check_port("launcher", "port", port)
    n_gpus = None if n_gpus is None else check_integer("launcher", "n_gpus", n_gpus, 1)
    world_size = None if world_size is None else check_integer("launcher", "world_size", world_size, 1)
    _check_node(n_gpus, world_size, rank_start, master_ip, port)
    if device_type not in _DEVICE_BACKENDS:
        raise InvalidArgument(f"launcher needs device_type 'auto', 'cpu' or 'gpu', got {device_type!r}")
    if backend not in (*BACKENDS, "gloo"):
        raise InvalidArgument(f"launcher needs backend to be one of {', '.join(BACKENDS)}, got {backend!r}")
    if device_type == "cpu" and backend == "nccl":
        raise InvalidArgument("launcher got backend 'nccl' with device_type 'cpu'; NCCL moves GPU arrays only")
    if start_method is not None:
        from gradsync.launching.launch import check_start_method

        check_start_method("launcher", start_method)

    def decorate(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        if not callable(function):
            hint = f"; to use {function} ranks, write launcher(n_gpus={function})" if integer_of(function) else ""
            raise InvalidArgument(f"launcher needs a function, got {function!r}{hint}")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            return _run_on_ranks(
                *(function, args, kwargs, n_gpus or default_process_count(device_type), world_size, rank_start),
                host="127.0.0.1" if master_ip == "localhost" else master_ip,  # localhost may have several addresses
                port=port,
                backend=_DEVICE_BACKENDS[device_type] if backend == "auto" else backend,
                start_method=start_method,
            )

        setattr(run, _DECORATED, True)
        return run

    return decorate if func is None else decorate(func)


def _check_node(n_gpus: int | None, world_size: int | None, rank_start: int, master_ip: object, port: int) -> None:
    """Checks that this node's ranks are within world_size, and that every node except the first has a port."""
    if not isinstance(master_ip, str) or not master_ip:
        raise InvalidArgument(f"launcher needs master_ip to be an address or a host's name, got {master_ip!r}")
    if rank_start > 0 and world_size is None:
        raise InvalidArgument(
            f"launcher with rank_start {rank_start} is one of several nodes and needs world_size, "
            "the number of ranks on all of them"
        )
    if world_size is not None and rank_start + (n_gpus or 1) > world_size:
        got = f"rank_start {rank_start}" + ("" if n_gpus is None else f" and n_gpus {n_gpus}")
        raise InvalidArgument(f"launcher needs the ranks of this node to be below world_size {world_size}, got {got}")
    if rank_start > 0 and port == 0:
        raise InvalidArgument(
            f"launcher with rank_start {rank_start} needs the port of the node with rank_start 0, got port 0"
        )


def _run_on_ranks(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: int,
    world_size: int | None,
    rank_start: int,
    *,
    host: str,
    port: int,
    backend: str,
    start_method: str | None,
) -> list[Any]:
    """Runs a function on the ranks of this node; see `launcher` for the results and errors."""
    from gradsync.launching import launch
    from gradsync.launching.command import shared_endpoint
    from gradsync.launching.job import Job
    from gradsync.launching.supervisor import supervise

    launch.warn_of_start_method("launcher", start_method)
    backend = launch.own_backend("launcher", backend)
    if world_size is None:
        world_size = count
    count = min(count, world_size - rank_start)
    has_others = count < world_size
    call = functools.partial(call_in_group, _reference(function), backend, has_others)
    name = launch.function_name(function)
    target = launch.function_target(call, args, kwargs, name, who="launcher")
    with contextlib.ExitStack() as stack:
        endpoint, listener = None, None
        if has_others:
            secret, words = (
                _secret_for(host),
                "launcher needs master_ip to be an address of the machine with rank_start 0",
            )
            shared = shared_endpoint(host, port, secret, is_first=rank_start == 0, words=words)
            endpoint, listener = stack.enter_context(shared)
        job = Job(
            target,
            count,
            world_size=world_size,
            rank_start=rank_start,
            backend=backend,
            master_addr=host,
            rendezvous_port=port,
            endpoint=endpoint,
            listener=listener,
        )
        outcome = supervise(job)
    launch.raise_for_signal(outcome)
    root = outcome.root_cause
    if root is not None:
        others = "the other ranks ended normally" if root.is_unsendable else "all other ranks have ended"
        has_others = len(outcome.failed_alike) < len(outcome.ranks)
        message = f"{outcome.describe_cause()}; {others}" if has_others else outcome.describe_cause()
        raise launch.failure(outcome, root, message)
    return launch.take_results(outcome, stacklevel=3)


def _secret_for(host: str) -> bytes | None:
    """Returns the secret that the user has set for the launchers of several machines.

    Raises:
        AuthenticationError: there is none, and other machines can reach the server.
    """
    from gradsync.environment import SECRET, SECRET_FILE, take_secret

    secret = take_secret()
    if secret is None and not is_loopback(host):
        raise AuthenticationError(
            f"launcher at {host} needs a secret, because other machines can reach this address: put a secret into a "
            f"file of mode 0600 and set {SECRET_FILE} to its path on every node, or set {SECRET}; if all launchers run "
            "on one machine, master_ip='localhost' needs no secret"
        )
    return secret


def _reference(function: Callable[..., Any]) -> str | Callable[..., Any]:
    """Returns the name by which a rank can import the function; the function itself if it has no such name.

    A decorator binds the function's name to the decorated version, so pickle cannot find the original function by this
    name. A rank imports the decorated version and takes the original function from it.
    """
    from gradsync.launching.launch import ranks_import_main

    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module == "__main__" and not ranks_import_main():
        return function
    try:
        is_found = _undecorated(operator.attrgetter(name)(sys.modules[module])) is function
    except (AttributeError, KeyError):
        return function
    return f"{module}:{name}" if is_found else function


def _find(reference: str) -> Callable[..., Any]:
    """In a rank: imports the function that `launcher` decorates.

    Raises:
        InvalidArgument: the module has no such name in this rank.
    """
    module, _, name = reference.partition(":")
    imported = importlib.import_module(module)
    try:
        return _undecorated(operator.attrgetter(name)(imported))
    except AttributeError:
        from gradsync.launching.in_rank.rank_main import HOW_TO_DEFINE

        raise InvalidArgument(f"this rank finds no {name} in {module}; {HOW_TO_DEFINE}") from None


def _undecorated(found: Any) -> Callable[..., Any]:
    """Returns the function that `launcher` has decorated, perhaps below other decorators."""
    layer = found
    while layer is not None and _DECORATED not in getattr(layer, "__dict__", {}):
        layer = getattr(layer, "__wrapped__", None)
    # After `run = launcher(function)` the name `function` refers to the plain function, which lacks `_DECORATED`.
    function: Callable[..., Any] = found if layer is None else layer.__wrapped__
    return function


def call_in_group(
    function: str | Callable[..., Any], backend: str, has_others: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """In a rank: initialises the process group, calls the function, and destroys the group.

    Args:
        function: the function, or its name as `_reference` returns it.
        backend: the backend for `init_process_group`.
        has_others: whether other launchers have ranks too. Then no rank calls the function before all ranks have joined
            the process group, and no rank leaves the process group before the function has returned in all ranks.
        args, kwargs: the positional and keyword arguments of the function.

    Returns:
        The function's return value.
    """
    from gradsync.process_group import destroy_process_group, group_barrier, init_process_group, is_initialized

    if isinstance(function, str):
        function = _find(function)
    try:
        with init_process_group(backend):
            if has_others:
                group_barrier()
            result = function(*args, **kwargs)
            if has_others:
                group_barrier()  # does nothing if the function has destroyed the group itself
        return result
    finally:
        if is_initialized():  # the function may have made a new group
            destroy_process_group()

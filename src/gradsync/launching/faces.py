"""The functions that run a function on several ranks: `gs.launch`, `gs.launcher` and `gs.spawn`.

Ranks import scripts with decorated functions too, and this module with them, so what starts ranks is imported in calls.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gradsync.arguments import check_integer, check_port, integer_of, is_loopback
from gradsync.backends import BACKENDS
from gradsync.errors import AuthenticationError, InvalidArgument
from gradsync.machine import default_process_count
from gradsync.words import hint

if TYPE_CHECKING:
    from gradsync.launching.spawned import MultiprocessContext

_Result = TypeVar("_Result")


# -- launch ------------------------------------------------------------------------------------------------------------


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
        InvalidArgument: `args` is a tuple of length 1: perhaps the caller means its item, as `gs.spawn` takes it. Other
            reasons: the function or its argument cannot be pickled; a return value cannot be unpickled in this process;
            `nprocs` is not a positive integer; an environment variable of gradsync is invalid; this process is a rank.
        BackendUnavailable: the system is not Linux, or allows no more processes or open files.
        WorkerError: a worker failed, for example because the `__main__` guard is missing, or its return value cannot be
            pickled.
        MainProcessError: this process received SIGINT, SIGTERM or SIGHUP (only if its main thread called `launch`).
    """
    from gradsync.launching import calls
    from gradsync.launching.job import Job
    from gradsync.launching.outcome import signal_name
    from gradsync.launching.supervisor import supervise

    if isinstance(args, tuple) and len(args) == 1 and callable(func):
        name = calls.function_name(func)
        raise InvalidArgument(
            f"launch passes args to {name} as one argument, and args is a tuple of length 1, perhaps meant as spawn "
            f"takes it: to call {name}(value), write gs.launch({name}, value); to call {name}((value,)), write "
            f"gs.launch(functools.partial({name}, (value,)))"
        )
    calls.warn_of_start_method("launch", None)
    target = calls.call_target(func, () if args == () and isinstance(args, tuple) else (args,), who="launch")
    count = default_process_count() if nprocs is None else nprocs
    outcome = supervise(Job(target, count, master_addr=master_addr, master_port=master_port))
    if (number := outcome.signal_number) is not None:
        text = f"the main process received {signal_name(number)}, and ended the workers"
        raise calls.MainProcessError(text, signal_no=number)
    if (root := outcome.root_cause) is not None:
        first_line = f"worker[{root.rank}] failed with exitcode={root.exit_code}"
        error = calls.failure(outcome, f"{first_line}\n{outcome.describe_cause()}")
        raise calls.WorkerError(str(error), exitcode=root.exit_code, worker_id=root.rank, results=dict(error.results))
    return calls.take_results(outcome)


# -- launcher ----------------------------------------------------------------------------------------------------------

_DEVICE_BACKENDS = {"auto": "auto", "cpu": "shm", "gpu": "nccl"}
_DECORATED = "_gradsync_launcher"


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
        from gradsync.launching.calls import check_start_method

        check_start_method("launcher", start_method)

    host = "127.0.0.1" if master_ip == "localhost" else master_ip  # localhost may have several addresses

    def decorate(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        if not callable(function):
            hint = f"; to use {function} ranks, write launcher(n_gpus={function})" if integer_of(function) else ""
            raise InvalidArgument(f"launcher needs a function, got {function!r}{hint}")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            from gradsync.launching import calls
            from gradsync.launching.job import Job
            from gradsync.launching.nodes import shared_endpoint
            from gradsync.launching.supervisor import supervise

            calls.warn_of_start_method("launcher", start_method)
            count = n_gpus or default_process_count(device_type)
            ranks = world_size or count
            count = min(count, ranks - rank_start)
            has_others = count < ranks
            chosen = calls.own_backend("launcher", _DEVICE_BACKENDS[device_type] if backend == "auto" else backend)
            call = functools.partial(call_in_group, _reference(function), chosen, has_others)
            target = calls.call_target(call, args, kwargs, who="launcher", name=calls.function_name(function))
            with contextlib.ExitStack() as stack:
                server = None
                if has_others:
                    words = "launcher needs master_ip to be an address of the machine with rank_start 0"
                    shared = shared_endpoint(host, port, _secret_for(host), is_first=rank_start == 0, words=words)
                    server = stack.enter_context(shared)
                outcome = supervise(
                    Job(
                        target,
                        count,
                        world_size=ranks,
                        rank_start=rank_start,
                        backend=chosen,
                        master_addr=host,
                        rendezvous_port=port,
                        shared=server,
                    )
                )
            calls.raise_for_signal(outcome)
            if (root := outcome.root_cause) is not None:
                others = "the other ranks ended normally" if root.is_unsendable else "all other ranks have ended"
                is_alone = len(outcome.failed_alike) == len(outcome.ranks)
                raise calls.failure(outcome, outcome.describe_cause() + ("" if is_alone else f"; {others}"))
            return calls.take_results(outcome)

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


def _secret_for(host: str) -> bytes | None:
    """Returns the secret that the user has set; None only where no other machine can reach the server."""
    from gradsync.environment import SECRET, SECRET_FILE, read_secret

    secret = read_secret()
    if secret is None and not is_loopback(host):
        raise AuthenticationError(
            f"launcher at {host} needs a secret, because other machines can reach this address: put a secret into a "
            f"file of mode 0600 and set {SECRET_FILE} to its path on every node, or set {SECRET}; if all launchers run "
            "on one machine, master_ip='localhost' needs no secret"
        )
    return secret


def _reference(function: Callable[..., Any]) -> tuple[str, str] | Callable[..., Any]:
    """Returns the module and name by which a rank can import the function; the function itself if there are none.

    A decorator binds the function's name to the decorated version, so pickle cannot find the original function by this
    name. A rank imports the decorated version and takes the original function from it.
    """
    from gradsync.launching.calls import ranks_import_main

    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module in sys.modules and (module != "__main__" or ranks_import_main()):
        with contextlib.suppress(AttributeError):
            if _original(module, name) is function:
                return module, name
    return function


def _original(module: str, name: str) -> Callable[..., Any]:
    """Returns the function that `launcher` has decorated, perhaps below other decorators; without it, what is there."""
    found = layer = attrgetter(name)(importlib.import_module(module))
    while layer is not None and _DECORATED not in getattr(layer, "__dict__", {}):
        layer = getattr(layer, "__wrapped__", None)
    # After `run = launcher(function)` the name `function` refers to the plain function.
    original: Callable[..., Any] = found if layer is None else layer.__wrapped__
    return original


def call_in_group(
    function: tuple[str, str] | Callable[..., Any], backend: str, has_others: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """In a rank: initialises the process group, calls the function, destroys the group, and returns the result.

    Args:
        function: what `_reference` returns.
        backend: the backend for `init_process_group`.
        has_others: whether other launchers have ranks too. Then no rank calls the function before all ranks have joined
            the process group, and no rank leaves the process group before the function has returned in all ranks.
        args, kwargs: the arguments of the function.

    Raises:
        InvalidArgument: this rank finds no such function.
    """
    from gradsync.process_group import destroy_process_group, group_barrier, init_process_group, is_initialized

    if isinstance(function, tuple):
        module, name = function
        try:
            function = _original(module, name)
        except AttributeError:
            from gradsync.launching.in_rank.rank_main import HOW_TO_DEFINE

            raise InvalidArgument(f"this rank finds no {name} in {module}; {HOW_TO_DEFINE}") from None
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


# -- spawn -------------------------------------------------------------------------------------------------------------

_PROXIES = ("http_proxy", "https_proxy")
_OPTIONS = ("start_method", "gpus", "ips", "backend", "print_config")
# For each deprecated option: the option that gets its value, and the end of the warning.
_DEPRECATED = {
    "selected_devices": ("gpus", "; use gpus"),
    "cluster_node_ips": ("ips", "; use ips"),
    "node_ip": ("ips", "; use ips"),
    "started_port": ("started_port", "; without it the rendezvous server takes a free port"),
    "use_paddlecloud": ("use_paddlecloud", " and does nothing: PaddleCloud is out of scope"),
}


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Calls `func(*args)` in `nprocs` processes on this machine.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    and the variables that `init_process_group()` needs, but not http_proxy and https_proxy. The function must call
    `init_process_group()` itself. When a process fails, gradsync ends the other processes, unless only the return value
    could not be sent. Each process is a fresh interpreter, so a script that calls `spawn` needs the `if __name__ ==
    "__main__":` guard.

    Args:
        func: a function of any kind, also a lambda, a closure or a function of a notebook.
        args: the function's positional arguments, of types that pickle or cloudpickle can pickle.
        nprocs: the number of processes; -1 means one per entry of `gpus`; without `gpus`, one per visible GPU; without
            a GPU, or with the backend "shm", one per usable core.
        join: whether to wait for all processes. If False, a thread watches the processes while the caller continues.
        daemon: whether this program, at its end, ends the processes instead of waiting for them (only with
            `join=False`).
        **options: start_method: "spawn", "fork" or "forkserver", which all do the same; see `gs.set_start_method`.
            gpus: the GPUs of the processes, one for each, such as "4,5"; if CUDA_VISIBLE_DEVICES is set, it must
            contain these GPUs. ips: addresses of this machine. backend: the backend that `init_process_group("auto")`
            uses; "auto" chooses the backend by the devices, and "gloo" means "shm". print_config: whether to print the
            settings. These options are deprecated, and give a DeprecationWarning: selected_devices (use gpus),
            cluster_node_ips and node_ip (use ips), started_port (the port of the rendezvous server), use_paddlecloud.

    Returns:
        A context with the processes, their results and errors, and the method `join(timeout)`.

    Raises:
        InvalidArgument: an option is unknown or has a wrong value; the function or an argument cannot be pickled; an
            environment variable of gradsync is invalid; or this process is a rank.
        BackendUnavailable: the system is not Linux, or allows no more processes or open files.
        RankFailed: a process failed, for example because the `__main__` guard is missing, or its return value cannot be
            pickled (only with `join`). If an exception ended the process, the error's text is "Process 1 terminated
            with the following error:" and the traceback; otherwise the text names the signal or the exit code. A
            process that Ctrl-C has ended has no traceback.
        RendezvousError: started_port is taken.
        KeyboardInterrupt: after Ctrl-C, when all processes have ended (only with `join`).
        SystemExit: after SIGTERM or SIGHUP (only with `join`); the exit code is 128 + the signal's number.
    """
    from gradsync.launching import calls
    from gradsync.launching.job import Job, choose_gpus
    from gradsync.launching.spawned import MultiprocessContext

    given = _translate(options)
    _check_ips(given.get("ips"))
    backend = calls.own_backend("spawn", given.get("backend", "auto"))
    if backend not in BACKENDS:
        raise InvalidArgument(f"spawn needs backend to be one of {', '.join(BACKENDS)}, got {backend!r}")
    gpus, method = given.get("gpus"), given.get("start_method")
    if method is not None:
        calls.check_start_method("spawn", method)
    count = None if integer_of(nprocs) == -1 else check_integer("spawn", "nprocs", nprocs, 1)
    devices = None if gpus is None else choose_gpus(gpus, count)
    if count is None:
        count = default_process_count("cpu" if backend == "shm" else "auto") if devices is None else len(devices)
    port = check_port("spawn", "started_port", given.get("started_port", 0))
    calls.warn_of_start_method("spawn", method)
    job = Job(
        calls.call_target(func, args, who="spawn"),
        count,
        backend=backend,
        rendezvous_port=port,
        gpus=devices,
        stdin_rank=0 if join else None,  # a caller that continues may read standard input itself
        removed_variables=frozenset(name for name in os.environ if name.lower() in _PROXIES),
    )
    if given.get("print_config"):
        gpus_text = "as this process" if devices is None else ",".join(devices)
        print(
            f"gradsync.spawn: nprocs {count}, start_method spawn, backend {backend}, gpus {gpus_text}, "
            f"port {port or 'a free one'}",
            flush=True,
        )
    return MultiprocessContext(job, joins=join, daemon=daemon)


def _translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options under their current names; leaves out options with the value None."""
    given = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
    for name, value in options.items():
        if name in _DEPRECATED:
            new_name, advice = _DEPRECATED[name]
            text = f"spawn: the option {name} is deprecated{advice}"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            if value is not None:
                given.setdefault(new_name, value)
        elif name not in _OPTIONS:
            known = f"(it has {', '.join(_OPTIONS)})"
            raise InvalidArgument(
                f"spawn has no option {name!r}{hint('spawn', name, (*_OPTIONS, *_DEPRECATED))} {known}"
            )
    return given


def _check_ips(ips: str | Sequence[str] | None) -> None:
    """Raises InvalidArgument if an address does not belong to this machine."""
    if ips is None:
        return
    for ip in ips.split(",") if isinstance(ips, str) else ips:
        if not isinstance(ip, str) or not _is_own(ip.strip()):
            raise InvalidArgument(
                f"spawn starts processes on this machine only, and {ip!r} in ips {ips!r} does not belong to it; for "
                "several machines decorate the function with gs.launcher(rank_start=...), and call it on each machine"
            )


def _is_own(host: str) -> bool:
    """Returns whether a host name or address belongs to this machine: a socket can be bound to it."""
    import socket

    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return host != ""
    except (OSError, ValueError):
        return False

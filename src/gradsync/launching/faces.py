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

    Each process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and
    what `init_process_group()` needs, which the function calls itself. Each is a fresh interpreter, so the call belongs
    under `if __name__ == "__main__":`.

    Args:
        func: any function, also a lambda, a closure or one of a notebook.
        args: its single argument, which pickle or cloudpickle can pickle. For several arguments write
            `gs.launch(functools.partial(func, a, b), nprocs=2)`.
        nprocs: the number of processes; by default one per visible GPU, or per usable core where there is no GPU.
        master_addr: MASTER_ADDR in the processes, for the function's own use.
        master_port: MASTER_PORT, likewise; None means a free port.

    Returns:
        The return values, in rank order: None, with a RuntimeWarning, for a process that exits with code 0 before the
        function returns.

    Raises:
        InvalidArgument: `args` is a tuple of length 1, perhaps meant as `gs.spawn` takes it; the function or its
            argument cannot be pickled, or a return value not be unpickled here; `nprocs` is no positive integer; a
            variable of gradsync is wrong; or this process is a rank.
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
    """Decorates a function, so that a call runs it in `n_gpus` processes on this machine, with GPUs or without.

        @gs.launcher(n_gpus=2)
        def train(): ...

    `@gs.launcher` and `gs.launcher(func, 2)` do, too. In each rank the process group is there before the function runs,
    and ends after it. Each process is a fresh interpreter, so the call belongs under `if __name__ == "__main__":`.

    On several machines each calls the function with the same `world_size`, `master_ip` and `port`, and its own
    `rank_start`. All ranks wait for each other once they have joined, and before they leave. The machine with
    rank_start 0 hosts the rendezvous server at `master_ip`:`port`. If others can reach this address, each machine needs
    the secret of the run: in a file of mode 0600 whose path is in GRADSYNC_SECRET_FILE, or in GRADSYNC_SECRET.

    Args:
        func: any function, also a lambda, a closure or one of a notebook.
        n_gpus: the number of processes on this machine; by default one per visible GPU, or per usable core if there is
            none or `device_type` is "cpu", and at most `world_size` - `rank_start`.
        world_size: the number of ranks in the run; by default `n_gpus`.
        rank_start: the rank of this machine's first process.
        master_ip: the address or name of the machine with rank_start 0; "localhost" is loopback.
        port: of the rendezvous server; 0, a free one, only where rank_start is 0.
        device_type: "auto", "cpu" or "gpu". If `backend` is "auto", "cpu" means shm, and "gpu" nccl.
        backend: for `init_process_group`; "gloo", which is PyTorch's, becomes "shm", with a warning.
        start_method: "spawn", "fork" or "forkserver", which all do the same; see `gs.set_start_method`.

    Returns:
        The decorated function. A call returns the return values of this machine's ranks, in rank order: None, with a
        RuntimeWarning, for a process that exits with code 0 before the function returns. It raises RankFailed if a rank
        fails or its return value cannot be pickled, with the rank, its exit code and traceback, and the return values
        of ranks that had finished; InvalidArgument if the function or an argument cannot be pickled, or a return value
        not be unpickled; AuthenticationError if the secret is missing, RendezvousError if the port is taken, and
        BackendUnavailable if the ranks cannot be started; KeyboardInterrupt after Ctrl-C, and SystemExit(128 + n) after
        SIGTERM and SIGHUP.

    Raises:
        InvalidArgument: an argument is out of its range, or contradicts another.
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
    """Checks that this node's ranks are within world_size, and that every node but the first has a port."""
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

    The name is that of the decorated version, so pickle cannot find the original by it. A rank imports the decorated
    one, and takes the original from it.
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
        has_others: whether other launchers have ranks too. Then no rank calls the function before all have joined, and
            none leaves before it has returned in all.
        args, kwargs: the function's arguments.

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

    Each process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and
    what `init_process_group()` needs, which the function calls itself; http_proxy and https_proxy are left out. When a
    process fails, the others are ended, unless only its return value could not be sent. Each is a fresh interpreter, so
    the call belongs under `if __name__ == "__main__":`.

    Args:
        func: any function, also a lambda, a closure or one of a notebook.
        args: its positional arguments, which pickle or cloudpickle can pickle.
        nprocs: the number of processes; -1 means one per entry of `gpus`; without `gpus`, one per visible GPU; without
            a GPU, or with the backend "shm", one per usable core.
        join: whether to wait for all processes. If False, a thread watches them while the caller goes on.
        daemon: whether this program, at its end, ends the processes and does not wait (only with `join=False`).
        **options: start_method: "spawn", "fork" or "forkserver", which all do the same; see `gs.set_start_method`.
            gpus: one for each process, such as "4,5", of those in CUDA_VISIBLE_DEVICES, if that is set. ips: addresses
            of this machine. backend: what `init_process_group("auto")` uses; "auto" goes by the devices, and "gloo" is
            "shm". print_config: whether to print the settings. Deprecated, with a DeprecationWarning: selected_devices
            (use gpus), cluster_node_ips and node_ip (use ips), started_port (of the rendezvous server),
            use_paddlecloud.

    Returns:
        A context with the processes, their results and errors, and the method `join(timeout)`.

    Raises:
        InvalidArgument: an option is unknown or has a wrong value; the function or an argument cannot be pickled; a
            variable of gradsync is wrong; or this process is a rank.
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
    if _wants_rank_first(func, args):
        raise InvalidArgument(
            f"spawn calls {calls.function_name(func)}(*args) without the rank, unlike torch.multiprocessing: take "
            "comm.rank after comm = gs.init_process_group()"
        )
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


def _wants_rank_first(func: Any, args: Any) -> bool:
    """Whether a function takes one argument more than it is given, as one for torch.multiprocessing.spawn does."""
    from inspect import signature  # imported here: ranks import this module

    try:
        expected = signature(func, follow_wrapped=False)  # a decorator may fill in the first argument
        expected.bind(None, *args)
    except (TypeError, ValueError):  # it takes others, or Python does not know which
        return False
    try:
        expected.bind(*args)
    except TypeError:
        return True
    return False


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

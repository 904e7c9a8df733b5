"""`gs.spawn`: calls a function in several rank processes of this machine, and lets the caller go on meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from gradsync.launching.cuda_state import check_cuda_untouched
from gradsync.launching.job import Job
from gradsync.launching.multiprocess_context import MultiprocessContext
from gradsync.launching.spawn_options import SpawnSettings, read_options
from gradsync.launching.targets import Target, function_target

_PROXIES = ("http_proxy", "https_proxy")


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Calls `func(*args)` in `nprocs` processes on this machine.

    Each process gets an environment of its own, with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and all that `init_process_group()` needs, which the function calls by itself; http_proxy and
    https_proxy are left out. When a process fails, the others are ended. With the start methods "spawn" and
    "forkserver" a script that calls this needs the `if __name__ == "__main__":` guard.

    Args:
        func: a function at the top level of a module or script; any other one with cloudpickle installed, or with
            the start method "fork".
        args: its positional arguments; they pickle, unless forked.
        nprocs: number of processes; -1: one per entry of `gpus`, else per visible GPU, else per usable core.
        join: whether to wait for all of them. Otherwise a thread watches them while the caller goes on.
        daemon: with `join=False`: whether this program ends without waiting for the processes, which then end too.
        **options: start_method: "spawn", "fork" or "forkserver"; by default what `gs.set_start_method` says, at first
            "spawn". gpus: such as "4,5", one for each process, within CUDA_VISIBLE_DEVICES where that is set. ips:
            addresses of this machine. backend: what `init_process_group("auto")` takes; "auto" goes by the devices.
            print_config: True prints the settings. Deprecated, with a DeprecationWarning: selected_devices (gpus),
            cluster_node_ips and node_ip (ips), started_port (where the ranks meet), use_paddlecloud.

    Returns:
        The processes, their results and errors, and `join(timeout)`.

    Raises:
        InvalidArgument: an option is unknown or does not fit, the function or an argument does not pickle, the
            `__main__` guard is missing, or forked ranks could not use CUDA, which this process has initialised.
        RankFailed: with `join`: a process failed; "Process 1 terminated with the following error:" and its traceback,
            or with which signal or exit code. A process that Ctrl-C has ended tells no traceback.
        RendezvousError: started_port is taken.
        KeyboardInterrupt: with `join`, after Ctrl-C, when all processes have ended.
        SystemExit: with `join`, after SIGTERM or SIGHUP; with 128 and the signal's number.
    """
    settings = read_options(nprocs, options, stacklevel=2)
    target = function_target(func, args, {}, who="spawn", start_method=settings.start_method)
    check_cuda_untouched("spawn", settings.start_method)
    if settings.print_config:
        print(settings.table(), flush=True)
    context = MultiprocessContext(_job(target, settings, joins=join), joins=join, daemon=daemon)
    if join:
        context.run()
    return context


def _job(target: Target, settings: SpawnSettings, *, joins: bool) -> Job:
    return Job(
        target,
        settings.nprocs,
        backend=settings.backend,
        rendezvous_port=settings.port,
        start_method=settings.start_method,
        gpus=settings.gpus,
        # A caller that goes on may read standard input itself.
        stdin_rank=0 if joins else None,
        removed_variables=frozenset(name for name in os.environ if name.lower() in _PROXIES),
    )

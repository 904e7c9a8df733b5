"""`gs.launcher`: a decorator that makes calling a function run it on several ranks, over the supervisor.

Ranks import a script's decorated functions too, so what starts ranks loads only when one is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from gradsync.arguments import integer_of
from gradsync.errors import InvalidArgument
from gradsync.launching.in_rank.named_function import mark_as_launcher
from gradsync.launching.launcher_options import LauncherOptions

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
    """Makes a call of the decorated function run it in `n_gpus` processes of this machine, one per rank.

    With or without arguments: `@gs.launcher` or `@gs.launcher(n_gpus=2)`, or called: `gs.launcher(func, 2)`.
    In each rank the process group is initialised before the function runs (`gs.get_communicator()` gives it) and
    destroyed after it. With the start methods "spawn" and "forkserver" a script that calls the function needs the
    `if __name__ == "__main__":` guard. Nothing starts, and no port is bound, before the call.

    Several machines: every one calls the function with the same `world_size`, `master_ip` and `port`, and its own
    `rank_start`. The ranks wait for all others after the group is initialised and before they leave it. The one with
    rank_start 0 hosts the rendezvous server at `master_ip`:`port`. Where other machines can reach that, each needs the
    secret of the run: a file of mode 0600, named in GRADSYNC_SECRET_FILE.

    Args:
        func: the function. Lambdas, closures and functions of a notebook work with cloudpickle installed, or with the
            start method "fork".
        n_gpus: number of processes on this machine; by default one per visible GPU, or per usable core where there is
            no GPU, and at most what is left of `world_size`.
        world_size: number of ranks in the run; by default `n_gpus`.
        rank_start: rank of this machine's first process.
        master_ip: address or name of the machine with rank_start 0; "localhost" is loopback.
        port: port of the rendezvous server; 0, on the machine with rank_start 0 only, takes a free one.
        device_type: "auto", "cpu" or "gpu"; with "auto" as backend "cpu" takes shm and "gpu" takes nccl.
        backend: what `init_process_group` is given.
        start_method: "spawn", "fork" or "forkserver"; by default what `gs.set_start_method` says, at first "spawn".

    Returns:
        The function; a call of it returns what it returned on each rank of this machine, by local rank (None, with a
        RuntimeWarning, for a process that exits with 0 before). The call raises InvalidArgument when the function or an
        argument does not pickle, or forked ranks could not use CUDA; RankFailed when a rank fails (with its rank, exit
        code and traceback, and what had been returned on the others); AuthenticationError when the secret is
        missing; RendezvousError when the port is taken; RendezvousTimeout when the machine with rank_start 0 does
        not come; KeyboardInterrupt after Ctrl-C, and SystemExit(128 + n) after SIGTERM or SIGHUP.

    Raises:
        InvalidArgument: an argument is out of its range, or does not fit the others.
    """
    options = LauncherOptions(n_gpus, world_size, rank_start, master_ip, port, device_type, backend, start_method)

    def decorate(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        if not callable(function):
            hint = f"; for {function} ranks write launcher(n_gpus={function})" if integer_of(function) else ""
            raise InvalidArgument(f"launcher needs a function, got {function!r}{hint}")

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            from gradsync.launching.launcher_run import run_on_ranks

            return run_on_ranks(function, args, kwargs, options)

        mark_as_launcher(run)
        return run

    return decorate if func is None else decorate(func)

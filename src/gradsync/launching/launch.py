"""`gs.launch`: calls a function in several rank processes of this machine, over the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import ProcessError
from typing import Any

from gradsync.errors import GradsyncError, InvalidArgument
from gradsync.launching.outcome import load_results, signal_name
from gradsync.launching.supervisor import supervise
from gradsync.launching.targets import function_target
from gradsync.visible_devices import default_process_count


class WorkerError(GradsyncError, ProcessError):
    """A worker of `launch` failed; all others were ended.

    Attributes:
        msg: what happened, and the worker's traceback where there is one.
        exitcode: its exit code; negative: the signal that killed it.
        worker_id: its rank.
    """

    def __init__(self, msg: str, *, exitcode: int | None = None, worker_id: int = -1) -> None:
        super().__init__(msg)
        self.msg = msg
        self.exitcode = exitcode
        self.worker_id = worker_id


class MainProcessError(GradsyncError, ProcessError):
    """A signal to the launching process ended the run; all workers were ended first.

    Attributes:
        signal_no: the signal.
    """

    def __init__(self, msg: str, *, signal_no: int = 0) -> None:
        super().__init__(msg)
        self.signal_no = signal_no


def launch(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    master_addr: str = "localhost",
    master_port: int | None = None,
) -> list[Any]:
    """Calls `func(*args)` in `nprocs` processes on this machine, and waits for them.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
    environment, and all that `init_process_group()` needs, which the function calls by itself. The
    environment of the calling process stays as it is. Processes are spawned: a script that calls this needs
    the `if __name__ == "__main__":` guard.

    Args:
        func: a function at the top level of a module or script.
        args: its positional arguments; they pickle.
        nprocs: number of processes; by default one per visible GPU, or per usable core where there is no GPU.
        master_addr: MASTER_ADDR, for the function's own use.
        master_port: MASTER_PORT, for the function's own use; a free port by default.

    Returns:
        What the function returned, by rank.

    Raises:
        InvalidArgument: the function or an argument does not pickle, `nprocs` is no positive integer, or the
            `__main__` guard is missing.
        WorkerError: a worker failed.
        MainProcessError: SIGINT, SIGTERM or SIGHUP came to this process (in its main thread).
    """
    if not callable(func):
        raise InvalidArgument(f"launch needs a function, got {func!r}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise InvalidArgument(f"launch needs args as a tuple, got {args!r}; one argument is written (value,)")
    target = function_target(func, args, {}, getattr(func, "__qualname__", repr(func)))
    count = default_process_count() if nprocs is None else nprocs
    outcome = supervise(target, count, master_addr=master_addr, master_port=master_port)
    if outcome.signal_number is not None:
        name = signal_name(outcome.signal_number)
        raise MainProcessError(
            f"the main process received {name}; all workers were ended", signal_no=outcome.signal_number
        )
    root = outcome.root_cause
    if root is None:
        return load_results(outcome)
    message = f"worker[{root.rank}] failed with exitcode={root.exit_code}"
    if root.exit_code is not None and root.exit_code < 0:
        message += f" ({signal_name(-root.exit_code)})"
    if root.error is not None:
        message += f"\n\n{root.error.text.rstrip()}"
    raise WorkerError(message, exitcode=root.exit_code, worker_id=root.rank)

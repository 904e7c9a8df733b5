"""Runs one function in several rank processes, with an initialised process group; for tests only.

Ranks are forkserver processes with NumPy, gradsync and pytest already imported, so that a test costs milliseconds.
Results and errors come back as text or pickles over one pipe for each rank; no rank outlives the call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import gradsync as gs
from gradsync.rendezvous import connection, stuck
from gradsync.rendezvous.server import RendezvousServer

STAND_IN = Path(__file__).parent / "fake_cupy"
_PATIENCE_SECONDS = 30.0  # for what every rank says in the end, however late a busy machine lets it

_context = multiprocessing.get_context("forkserver")
# What ranks import otherwise, each of them anew: most of what an empty one costs.
_PRELOADED = [
    *("gradsync.process_group", "gradsync.comm", "gradsync.consistency", "gradsync.diagnostics.compare"),
    *("gradsync.bucketing.callback", "gradsync.bucketing.lists", "gradsync.bucketing.trees"),
    *("gradsync.rendezvous.hosting", "gradsync.rendezvous.server"),
    *("gradsync.communicators.shared_memory.shm_backend", "gradsync.communicators.local"),
    *("gradsync.communicators.failures", "gradsync.communicators.objects"),
    *("numpy", "numpy.typing", "numpy.random", "pytest", "ml_dtypes", "msgpack", "secrets"),
    *("encodings.ascii", "encodings.idna", "multiprocessing.popen_forkserver"),
    *("rank_processes", "contract", "kits", "places"),
]
_PRELOADED_WITH_STAND_IN = [
    "cupy.cuda.nccl",
    "cupy.cuda.nvrtc",
    "gradsync.communicators.nccl.connect",
    "gradsync.communicators.nccl.nccl_backend",
    "gradsync.communicators.nccl.kernels",
]


class _RankServer(forkserver.ForkServer):
    """Forks ranks, with modules imported that it finds in folders."""

    def __init__(self, preloaded: list[str], *folders: Path) -> None:
        super().__init__()
        self._folders = folders
        self.set_forkserver_preload(preloaded)

    def ensure_running(self) -> None:
        for name in _PRELOADED if self._forkserver_pid is None else ():  # which Python would pass over in silence
            assert not name.startswith("gradsync.") or find_spec(name), f"{name} is to be imported for all ranks"
        kept = os.environ.get(_PATH)
        os.environ[_PATH] = os.pathsep.join([*map(str, self._folders), *filter(None, [kept])])
        try:
            super().ensure_running()
        finally:
            _set_path(kept)


def _set_path(text: str | None) -> None:
    if text is None:
        os.environ.pop(_PATH, None)
    else:
        os.environ[_PATH] = text


_PATH = "PYTHONPATH"
_one_at_a_time = threading.Lock()
_server = _RankServer(_PRELOADED, STAND_IN.parent)
_server_with_stand_in = _RankServer([*_PRELOADED, *_PRELOADED_WITH_STAND_IN], STAND_IN, STAND_IN.parent)


@contextlib.contextmanager
def _forked_by(server: _RankServer) -> Iterator[None]:
    """Processes of the context are forked by that server in the block: Python knows a single one."""
    with _one_at_a_time:
        kept, forkserver.connect_to_new_process = forkserver.connect_to_new_process, server.connect_to_new_process
        try:
            yield
        finally:
            forkserver.connect_to_new_process = kept


@dataclass
class Outcome:
    """How one rank ended: a result, an error with its traceback, or neither when it was killed."""

    result: Any = None
    error: BaseException | None = None
    traceback_text: str = ""
    exit_code: int | None = None

    def returned(self) -> Any:
        """Returns the result of a rank that must have one."""
        assert self.error is None, self.traceback_text
        assert self.exit_code == 0, f"exit code {self.exit_code}"
        return self.result


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0, **options: Any
) -> list[Any]:
    """Calls function(communicator, *args) on every rank and returns the results by rank.

    Raises the traceback of the first failing rank as an AssertionError.
    """
    outcomes = run_ranks_for_outcomes(world_size, function, *args, timeout=timeout, **options)
    failed = [
        f"rank {r}:\n{o.traceback_text or f'exit code {o.exit_code}'}"
        for r, o in enumerate(outcomes)
        if o.error or o.exit_code
    ]
    if failed:
        raise AssertionError("\n".join(failed))
    return [outcome.result for outcome in outcomes]


def run_ranks_for_outcomes(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0, **options: Any
) -> list[Outcome]:
    """The same, but errors are returned, rank by rank; a killed rank has its negative signal as exit code.

    Args:
        world_size: number of ranks.
        function: importable by name.
        args: picklable.
        timeout: seconds until every rank is killed.
        options: for init_process_group; "environment" holds variables for the ranks, and "stand_in" makes the ranks'
            CuPy the one under tests/stand_in, with as many GPUs as ranks; "backends" gives each rank its own.
    """
    secret, kept_path = secrets.token_bytes(32), os.environ.get(_PATH)
    with _patient_inquiries(), RendezvousServer(world_size, secret=secret) as server:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(theirs, rank, world_size, server.address, secret.hex(), function, args, options, kept_path),
            )
            with _forked_by(_server_with_stand_in if options.get("stand_in") else _server):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            deadline = time.monotonic() + timeout  # of all ranks together
            outcomes = [_receive(pipe, timeout, deadline) for pipe in pipes]
            for process, outcome in zip(processes, outcomes, strict=True):
                process.join(max(1.0, deadline - time.monotonic()))
                outcome.exit_code = process.exitcode
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
                pipe.close()
    return outcomes


@contextlib.contextmanager
def _patient_inquiries() -> Iterator[None]:
    """Lets servers of this process wait for what each rank says of itself, before they tell who is missing."""
    kept, stuck.ANSWER_SECONDS = stuck.ANSWER_SECONDS, _PATIENCE_SECONDS
    try:
        yield
    finally:
        stuck.ANSWER_SECONDS = kept


def _receive(pipe: Connection, timeout: float, deadline: float) -> Outcome:
    if not wait([pipe], max(0.0, deadline - time.monotonic())):
        return Outcome(error=TimeoutError(), traceback_text=f"no result within {timeout} s")
    try:
        data, text = pipe.recv()
    except EOFError:
        return Outcome()
    try:
        return pickle.loads(data)
    except Exception as error:  # of a class that only ranks have, as the stand-in's
        return Outcome(error=error, traceback_text=text or f"its result does not unpickle here: {error!r}")


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    address: str,
    secret: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    python_path: str | None,
) -> None:
    _set_path(python_path)
    os.environ.update(
        GRADSYNC_RANK=str(rank),
        GRADSYNC_WORLD_SIZE=str(world_size),
        GRADSYNC_LOCAL_RANK=str(rank),
        GRADSYNC_LOCAL_WORLD_SIZE=str(world_size),
        GRADSYNC_ADDRESS=address,
        GRADSYNC_HOSTED="1",
        GRADSYNC_SECRET=secret,
    )
    connection.FAILURE_WITHIN_SECONDS = _PATIENCE_SECONDS
    options.setdefault("timeout_seconds", 30.0)
    options.setdefault("collective_timeout_seconds", 30.0)
    try:
        os.environ.update(options.pop("environment", {}))
        if "backends" in options:
            options["backend"] = options.pop("backends")[rank]
        if options.pop("stand_in", False):
            os.environ.setdefault("FAKE_CUPY_DEVICES", str(world_size))
            sys.path.insert(0, str(STAND_IN))
        with gs.init_process_group(**options) as communicator:
            outcome = Outcome(result=function(communicator, *args))
        gs.destroy_process_group()  # one that the function has begun: multiprocessing ends without Python's atexit
    except BaseException as error:
        outcome = Outcome(error=error, traceback_text=traceback.format_exc())
    try:
        data = pickle.dumps(outcome)
    except Exception as error:  # the result or the error does not pickle
        data = pickle.dumps(Outcome(error=RuntimeError(repr(error)), traceback_text=outcome.traceback_text))
    with contextlib.suppress(BrokenPipeError):
        pipe.send((data, outcome.traceback_text))
    pipe.close()

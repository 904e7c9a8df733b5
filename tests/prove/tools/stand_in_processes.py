"""Runs a function in processes with the stand-in in place of CuPy, so that no other test meets it; for tests only."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # with what rank_processes.py preloads, should it share the server
    [
        *("numpy", "ml_dtypes", "msgpack", "pytest"),
        *("gradsync.process_group", "gradsync.bucketing.callback", "gradsync.bucketing.lists"),
    ]
)
_TIMEOUT_SECONDS = 100.0
FLOAT, SUM = 7, 0  # NCCL_FLOAT32, NCCL_SUM


class Rank(NamedTuple):
    """What a function under test is given: its place, and ways to the other ranks that NCCL has no part in."""

    rank: int
    world_size: int
    cupy: ModuleType
    nccl: ModuleType
    ids: Any  # queue of unique ids
    barrier: Any

    def unique_id(self) -> bytes:
        """Returns a new id of rank 0; every rank must call it."""
        if self.rank == 0:
            unique_id = self.nccl.get_unique_id()
            for _ in range(1, self.world_size):
                self.ids.put(unique_id)
            return unique_id
        return self.ids.get()

    def communicator(self) -> Any:
        """Makes a communicator of all ranks on the device with this rank's number, which becomes current."""
        self.cupy.cuda.Device(self.rank).use()
        return self.nccl.NcclCommunicator(self.world_size, self.unique_id(), self.rank)

    def launch(self, communicator: Any, array: Any, stream: Any = None) -> None:
        """Launches a sum of float32 in place."""
        ptr = (self.cupy.cuda.get_current_stream() if stream is None else stream).ptr
        communicator.allReduce(array.data.ptr, array.data.ptr, array.size, FLOAT, SUM, ptr)

    def full(self, value: float, size: int = 4) -> Any:
        return self.cupy.full(size, value, np.float32)


def run(function: Callable[[Rank], Any], world_size: int = 1, **environment: str) -> list[Any]:
    """Calls function(rank) in processes with the stand-in and returns the results by rank."""
    environment = {"FAKE_CUPY_DEVICES": str(world_size), **environment}
    ids, barrier = _context.SimpleQueue(), _context.Barrier(world_size)
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_main, args=(theirs, function, rank, world_size, ids, barrier, environment), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        outcomes = [pipe.recv() if wait([pipe], _TIMEOUT_SECONDS) else ("", "no result in time") for pipe in pipes]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        ids.close()
    failures = [f"rank {rank}:\n{failure}" for rank, (_, failure) in enumerate(outcomes) if failure]
    assert not failures, "\n".join(failures)
    return [result for result, _ in outcomes]


def _main(pipe: Any, function: Any, rank: int, world_size: int, ids: Any, barrier: Any, environment: Any) -> None:
    os.environ.update(environment)
    sys.path.insert(0, str(Path(__file__).parents[2] / "fake_cupy"))
    try:
        import cupy
        from cupy.cuda import nccl

        outcome = function(Rank(rank, world_size, cupy, nccl, ids, barrier)), ""
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()  # the process that has made an id serves it
    except BaseException:
        barrier.abort()
        outcome = None, traceback.format_exc()
    pipe.send(outcome)


class Gate:
    """Keeps a stream from going on."""

    def __init__(self, stream: Any) -> None:
        self._opened = threading.Event()
        stream.launch_host_func(lambda _: self._opened.wait(), None)

    def open(self) -> None:
        self._opened.set()

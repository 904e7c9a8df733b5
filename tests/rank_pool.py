"""Ranks that stay: for tests of very many short runs, each of which would cost less than its processes; tests only."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from rank_processes import run_ranks

_LONGER_THAN_ALL_TESTS_SECONDS = 3600.0


class RankPool:
    """Rank processes with an initialised process group, which call one function after the other.

    Args:
        world_size: number of ranks.
        options: for run_ranks.
    """

    def __init__(self, world_size: int, **options: Any) -> None:
        self._world_size = world_size
        self._options = options
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self._ranks: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls function(communicator, *args) on every rank and returns the results by rank.

        Raises:
            AssertionError: with the tracebacks of those that failed; the next run has new ranks.
        """
        if self._ranks is None:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = [self._receive(pipe, timeout) for pipe in self._pipes]
        failures = [f"rank {rank}:\n{failure}" for rank, (_, failure) in enumerate(outcomes) if failure]
        if failures:
            self._stop(kill=True)
            raise AssertionError("\n".join(failures))
        return [result for result, _ in outcomes]

    def close(self) -> None:
        """Ends the ranks."""
        self._stop()
        self._thread.shutdown()

    def _start(self) -> None:
        pairs = [Pipe() for _ in range(self._world_size)]
        self._pipes = [ours for ours, _ in pairs]
        theirs = [theirs for _, theirs in pairs]
        self._ranks = self._thread.submit(
            run_ranks, self._world_size, _serve, theirs, timeout=_LONGER_THAN_ALL_TESTS_SECONDS, **self._options
        )
        self._pids = [self._receive(pipe, 60.0)[0] for pipe in self._pipes]
        for pipe in theirs:
            pipe.close()
        if None in self._pids:
            raise AssertionError(f"{self._world_size} ranks did not come: {self._ranks}")

    def _stop(self, *, kill: bool = False) -> None:
        """Closes the pipes, at which the ranks return; those that may hang are killed."""
        for pipe, pid in zip(self._pipes, self._pids, strict=True):
            pipe.close()
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._ranks is not None:
            self._ranks.exception()
            self._ranks = None

    def _receive(self, pipe: Connection, timeout: float) -> tuple[Any, str]:
        if not wait([pipe], timeout):
            return None, f"no result within {timeout} s"
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return None, "the rank has ended"


def _serve(comm: Any, pipes: list[Connection]) -> None:
    """Calls what comes, until the parent closes the pipe, or a call fails: then the other ranks are told."""
    mine = pipes[comm.rank]
    for pipe in pipes:
        if pipe is not mine:
            pipe.close()
    mine.send((os.getpid(), ""))
    while True:
        try:
            function, args = mine.recv()
        except EOFError:
            return
        try:
            outcome = function(comm, *args), ""
        except BaseException:
            outcome = None, traceback.format_exc()
            comm.abort("a call failed")
        mine.send(outcome)
        if outcome[1]:
            return

"""One rank of one pair: `python -m peers.rank SYSTEM SOCKET`, started by that system's launcher.

It connects to the controller, then sleeps in the socket until it is asked for something: a rank that waited inside its
own library would spin, and the others are measured meanwhile. It sends what peers.crew expects.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import traceback
from multiprocessing.connection import Client, Connection

import numpy as np

from peers.contenders import GRADSYNC, TORCH
from peers.operation import NotOffered, Operation, System, take_turns
from peers.workload import Workload


class WrongResult(RuntimeError):
    """A contender's result is wrong."""


class Requests:
    """The methods that the controller may call on a rank."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.release()

    def prepare(self, workload: Workload) -> dict[str, bool]:
        """Makes the arrays and checks every contender's results; returns whether the system offers it, by contender."""
        arrays = workload.make_arrays()
        self._workload = workload
        self._operations = dict(self._system.operations(workload, arrays))
        offered = {name: self._is_offered(name, operation, arrays) for name, operation in self._operations.items()}
        if workload.adds_up:
            arrays[0].fill(0)  # zeros do not grow when they are summed repeatedly
        return offered

    def _is_offered(self, name: str, operation: Operation, arrays: list[np.ndarray]) -> bool:
        try:
            # The second step takes other paths: gradsync knows its plan by then, and DDP has rebuilt its buckets.
            for step in (1, 2):
                self._check(f"{name}, step {step}", operation, arrays)
        except NotOffered:
            return False
        return True

    def _check(self, what: str, operation: Operation, arrays: list[np.ndarray]) -> None:
        rank = self._system.rank
        self._workload.fill(arrays if operation.inputs is None else operation.inputs, rank)
        operation.prepare_round()
        operation.run()
        if operation.results is None:
            return
        index = self._workload.wrong(operation.results(), rank, operation.rounding)
        if index is not None:
            raise WrongResult(f"rank {rank}: {what} of {self._workload.name}: array {index} is wrong")

    def time(self, contenders: list[str]) -> dict[str, list[float]]:
        """Returns by contender the seconds of each round of a block, in which they take turns."""
        operations = {name: self._operations[name] for name in contenders}
        return take_turns(operations, self._workload, self._system.barrier)

    def release(self) -> None:
        """Frees the memory of the workload."""
        self._operations: dict[str, Operation] = {}


def connect(name: str) -> System:
    """Connects to the other rank, over the system of that name."""
    if name == GRADSYNC:
        from peers.over_gradsync import Gradsync

        return Gradsync()
    if name == TORCH:
        from peers.over_gloo import Gloo

        return Gloo()
    from peers.over_mpi import Mpi

    return Mpi(name)


def serve(connection: Connection, name: str) -> None:
    """Answers requests until the controller closes the connection."""
    system = connect(name)
    versions = {"python": platform.python_version(), "numpy": np.__version__, **system.versions}
    connection.send(("hello", {"rank": system.rank, "pid": os.getpid(), "versions": versions}))
    requests = Requests(system)
    with contextlib.suppress(EOFError):
        while True:
            method, *arguments = connection.recv()
            connection.send(("answer", getattr(requests, method)(*arguments)))
    system.close()


def main() -> None:
    """Runs this rank to its end, and reports its failure to the controller."""
    name, address = sys.argv[1:]
    with Client(address, "AF_UNIX") as connection:
        try:
            serve(connection, name)
        except BaseException:
            with contextlib.suppress(OSError):
                connection.send(("failure", traceback.format_exc()))
            # A normal exit would wait, inside the library, for the other rank.
            os._exit(1)


if __name__ == "__main__":
    main()

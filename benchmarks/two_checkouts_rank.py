"""One rank of a checkout that two_checkouts.py compares: started with PYTHONPATH at that checkout, asleep unless asked.

It imports only public names of gradsync that every edition has, and nothing else of this repository: the checkout may
be older or newer than the script.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client

import numpy as np

import gradsync as gs

Shapes = list[tuple[int, ...]]

#: For collectives that return a new array: its values when two ranks give their ranks.
_COLLECTIVES = {"broadcast": [0], "all_gather": [0, 1], "reduce_scatter": [1], "all_to_all": [0, 1]}


class Rank:
    """The methods that the controller may call."""

    def __init__(self) -> None:
        self._communicator = gs.init_process_group("shm")
        self._run: Callable[[], object] = int

    def hello(self) -> dict[str, object]:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "gradsync": str(gs.__file__)}
        return {"rank": self._communicator.rank, "pid": os.getpid(), "versions": versions}

    def prepare(self, kind: str, shapes: Shapes) -> None:
        """Prepares the timed call, and checks its result."""
        arrays = [np.empty(shape, np.float32) for shape in shapes]
        if kind in _COLLECTIVES:
            self._prepare_collective(kind, *arrays)
            return
        if kind == "all_reduce":
            (array,) = arrays
            self._run = lambda: self._communicator.all_reduce(array, "mean")
        else:
            if kind == "bucket views":
                parameters = {index: (array.shape, "float32") for index, array in enumerate(arrays)}
                callback = gs.AllreduceCallback("mean", parameters=parameters, gradient_as_bucket_view=True)
                arrays = list(callback.gradient_buffers().values())
            elif kind == "clipped gradients":
                # The sum over two ranks doubles equal gradients, so each step is clipped to half of the sum again.
                elements = sum(array.size for array in arrays)
                callback = gs.AllreduceCallback("sum", nonfinite="raise", clip_norm=0.5 * math.sqrt(elements))
            else:
                callback = gs.AllreduceCallback("mean")
            if kind == "new gradients":  # copies stand for a backward pass; both checkouts pay for them
                self._run = lambda: _step(callback, [array.copy() for array in arrays], arrays)
            else:
                self._run = lambda: _step(callback, arrays)
        for _ in range(3):  # the second and the third call take other paths
            for array in arrays:
                array.fill(self._communicator.rank)
            self._run()
            expected = (self._communicator.world_size - 1) / 2
            if not all(np.allclose(array, expected, rtol=1e-5, atol=0) for array in arrays):
                raise RuntimeError(f"{kind} of {len(arrays)} arrays is wrong")

    def _prepare_collective(self, name: str, array: np.ndarray) -> None:
        collective, expected = getattr(self._communicator, name), _COLLECTIVES[name]
        self._run = lambda: collective(array)
        for _ in range(3):
            array.fill(self._communicator.rank)
            if list(np.unique(collective(array))) != expected:
                raise RuntimeError(f"{name} of shape {array.shape} is wrong")

    def time(self, warm_up: int, rounds: int, calls: int) -> list[float]:
        """Returns the seconds of one call, round by round."""
        seconds = []
        for _ in range(warm_up + rounds):
            self._communicator.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                self._run()
            seconds.append((time.perf_counter() - began) / calls)
        return seconds[warm_up:]

    def release(self) -> None:
        """Frees the memory."""
        self._run = int


def _step(callback: gs.AllreduceCallback, gradients: list[np.ndarray], results: list[np.ndarray] | None = None) -> None:
    """A step: hands every gradient over, flushes, and asks for every result."""
    with callback.backward():
        futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
    for index, future in enumerate(futures):
        reduced = future.result()
        if results is not None:
            results[index] = reduced


def main(address: str) -> None:
    """Answers requests until the controller closes the connection; peers.crew describes the messages."""
    with Client(address, "AF_UNIX") as connection:
        try:
            rank = Rank()
            connection.send(("hello", rank.hello()))
            with contextlib.suppress(EOFError):
                while True:
                    method, *arguments = connection.recv()
                    connection.send(("answer", getattr(rank, method)(*arguments)))
            gs.destroy_process_group()
        except BaseException:
            with contextlib.suppress(OSError):
                connection.send(("failure", traceback.format_exc()))
            os._exit(1)  # a normal exit would wait for the other rank


if __name__ == "__main__":
    main(sys.argv[1])

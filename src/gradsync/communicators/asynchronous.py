"""The asynchronous form of every collective: the same methods with the same arguments, each giving a future.

On the CPU the collective waits for its turn in collective_queue.py and runs in a thread beside the caller.
On a GPU it is launched at once, and the device is beside the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Sizes
from gradsync.communicators.collective_queue import LostFailure, submit
from gradsync.errors import CommunicatorClosed
from gradsync.futures import CollectiveFuture
from gradsync.reduction import Array, ReduceOp

#: One collective of one rank, checked: its name in errors, what this rank believes all ranks are about to do, what
#: moves the bytes within the communicator's turn, and two arrays. With arrays it is a backend's plan, which is called
#: with them and the agreement; the second one is the result. Without, it is called with the launch, has the arrays
#: itself, and returns the result.
CollectiveCall = tuple[str, Agreement, Callable[..., Any], Array | None, Array | None]


class Asynchronous:
    """`communicator.asynchronous`: its collectives, which return at once.

    Every rank must submit them in the order in which the others do, collectives without a future included: those wait
    until everything that their thread has submitted is over. Arguments are refused at once; whatever else goes wrong,
    the future raises: result() and wait() do. A failure that nobody asks for is logged. A failed collective fails its
    own future only. Until a future is done, its arrays belong to gradsync, which keeps them.

    A done-callback must not call or submit collectives, on any backend: InvalidArgument; see
    CollectiveFuture.add_done_callback. Nor can it wait for a future that is not done: FutureNotReady.

    On a GPU, without a stream, the collective runs on the communicator's own, after the work that is on the current
    stream now; result() makes the stream that is current then wait for it.

    Args:
        communicator: whose collectives these are.
    """

    def __init__(self, communicator: Any) -> None:  # a Communicator, whose file is above this one
        self._communicator = communicator

    def __repr__(self) -> str:
        return f"<asynchronous collectives of {self._communicator!r}>"

    def all_reduce(
        self, array: Any, op: str | ReduceOp = "sum", *, out: Any = None, stream: Any = None
    ) -> CollectiveFuture:
        """See Communicator.all_reduce."""
        return self._submit(self._communicator._all_reduce_call(array, op, out=out), stream)

    def reduce(
        self, array: Any, op: str | ReduceOp = "sum", root: int = 0, *, out: Any = None, stream: Any = None
    ) -> CollectiveFuture:
        """See Communicator.reduce."""
        return self._submit(self._communicator._reduce_call(array, op, root, out=out), stream)

    def reduce_scatter(
        self,
        array: Any,
        op: str | ReduceOp = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> CollectiveFuture:
        """See Communicator.reduce_scatter."""
        return self._submit(self._communicator._reduce_scatter_call(array, op, sizes=sizes, out=out), stream)

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None) -> CollectiveFuture:
        """See Communicator.broadcast."""
        return self._submit(self._communicator._broadcast_call(array, root), stream)

    def all_gather(self, array: Any, *, sizes: Sizes = None, out: Any = None, stream: Any = None) -> CollectiveFuture:
        """See Communicator.all_gather."""
        return self._submit(self._communicator._all_gather_call(array, sizes=sizes, out=out), stream)

    def gather(
        self, array: Any, root: int = 0, *, sizes: Sizes = None, out: Any = None, stream: Any = None
    ) -> CollectiveFuture:
        """See Communicator.gather."""
        return self._submit(self._communicator._gather_call(array, root, sizes=sizes, out=out), stream)

    def scatter(
        self,
        array: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> CollectiveFuture:
        """See Communicator.scatter."""
        return self._submit(self._communicator._scatter_call(array, root, sizes=sizes, out=out), stream)

    def all_to_all(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> CollectiveFuture:
        """See Communicator.all_to_all."""
        call = self._communicator._all_to_all_call(array, send_sizes=send_sizes, recv_sizes=recv_sizes, out=out)
        return self._submit(call, stream)

    def send(self, array: Any, dest: int, *, stream: Any = None) -> CollectiveFuture:
        """See Communicator.send.

        It is not MPI's Isend: messages take their turn like other collectives, one after the other. Two ranks that
        each submit a recv before the send that the other waits for, wait for each other until the deadline. Use
        exchange, which does both at once; or let the lower rank send first and the higher one receive first.
        """
        return self._submit(self._communicator._send_call(array, dest), stream)

    def recv(self, array: Any, source: int, *, stream: Any = None) -> CollectiveFuture:
        """See Communicator.recv; and send, on the order of messages: what is submitted later waits for this one."""
        return self._submit(self._communicator._recv_call(array, source), stream)

    def exchange(self, array: Any, *, dest: int, out: Any, source: int, stream: Any = None) -> CollectiveFuture:
        """See Communicator.exchange."""
        return self._submit(self._communicator._exchange_call(array, dest=dest, out=out, source=source), stream)

    def barrier(self) -> CollectiveFuture:
        """See Communicator.barrier."""
        return self._submit(self._communicator._barrier_call(), None)

    def _submit(self, call: CollectiveCall, stream: Any) -> CollectiveFuture:
        communicator = self._communicator
        what, agreement, move, *_ = call
        name = f"{communicator.label}: {what}"
        if not communicator.runs_beside_host:
            return submit(communicator.lifetime, what, name, partial(communicator._run, call, stream))
        future = CollectiveFuture(name)  # a device has no plans: `move` takes the launch
        producers = [communicator.mark_work()] if stream is None else None
        turn = communicator.lifetime.turn(what, agreement)
        try:
            with turn, communicator._backend.launching(stream, producers) as launch:
                result = move(launch)
        except Exception as error:
            closed = isinstance(error, CommunicatorClosed)  # what has closed it, has told
            future.fail(error, None if closed else LostFailure(name, error, communicator.lifetime))
        else:
            future.resolve(result, launch)
        return future

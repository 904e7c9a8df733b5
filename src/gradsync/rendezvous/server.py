"""The rendezvous server: binds at once, then serves in a background thread or in the calling one.

The public face of the server's side. The launcher embeds it; `gradsync serve` runs it alone; without a
launcher, rank 0 hosts it. `event_loop` does the work, `protocol` decides.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from types import TracebackType

from gradsync.arguments import integer_of
from gradsync.environment import check_removed_variables
from gradsync.errors import InvalidArgument, RendezvousError
from gradsync.machine import machine_identity
from gradsync.rendezvous.descriptors import make_room
from gradsync.rendezvous.event_loop import MAX_STRANGERS, EventLoop
from gradsync.rendezvous.events import Ended, Started
from gradsync.rendezvous.handshake import MAX_RUN_ID_BYTES, check_secret
from gradsync.rendezvous.messages import MAX_RANKS
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.sockets import adopt_listener, bind_listener, format_address

_STOP_SECONDS = 10.0


class RendezvousServer:
    """The server through which the ranks of one run find each other.

    Args:
        world_size: ranks in every generation, from 1.
        secret: what every rank of the run knows and nobody else, at least 16 bytes.
        host: the interface to bind; loopback by default.
        port: the port to bind; 0 takes a free one, and the bound socket is its reservation.
        listener: a bound TCP socket to use instead of host and port; the server owns it from now on.
        run_id: names the run in messages and binds its sessions; random by default, at most 64 bytes.
        earlier_generations: how many an earlier server of the same run has formed; its own count goes on from there.
        called: what messages call a member; those of the launchers' own rendezvous are nodes.
        host_rank: the member that hosts the server, and ends it when not all join in its time.

    Attributes:
        address: where clients connect, e.g. "127.0.0.1:43211" or "[::1]:4000".
        run_id: the run's name.

    Raises:
        InvalidArgument: an argument is out of its range, the secret is too short, or a variable is set that has gone.
        RendezvousError: the address cannot be bound; names the holder of a port in use where it can be read.
    """

    def __init__(
        self,
        world_size: int,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
        run_id: str | None = None,
        earlier_generations: int = 0,
        called: str = "rank",
        host_rank: int | None = None,
    ) -> None:
        size = integer_of(world_size)
        if size is None or not 1 <= size <= MAX_RANKS:
            raise InvalidArgument(f"the rendezvous needs a world_size from 1 to {MAX_RANKS}, got {world_size}")
        self.world_size = world_size = size
        self.run_id = _check_run_id(run_id)
        secret = check_secret(secret)
        check_removed_variables()
        make_room(2 * world_size + MAX_STRANGERS)
        listener = bind_listener(host, port) if listener is None else adopt_listener(listener)
        self.address = format_address(listener)
        self._core = RendezvousCore(
            world_size,
            machine=machine_identity(),
            pid=os.getpid(),
            earlier_generations=earlier_generations,
            called=called,
            host=host_rank,
        )
        self._loop = EventLoop(listener, self._core, secret=secret, run_id=self.run_id, ranks=world_size)
        self._pid = os.getpid()
        self._runner: int | None = None  # the thread that runs the loop
        self._thread: threading.Thread | None = None
        self._claimed = False
        self._ended = threading.Event()
        _servers.add(self)

    def __repr__(self) -> str:
        return f"RendezvousServer(address={self.address!r}, world_size={self.world_size})"

    @property
    def generation(self) -> int:
        """Number of the generation that was formed last; 0 before the first."""
        return self._core.formed_count

    def __enter__(self) -> RendezvousServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serves in a background daemon thread.

        Raises:
            RendezvousError: the server was started or stopped before.
        """
        self._claim()
        self._thread = threading.Thread(target=self._run, name=f"gradsync-rendezvous-{self.address}", daemon=True)
        self._thread.start()

    def serve_forever(self) -> None:
        """Serves in the calling thread until `stop`, which a signal handler or another thread may call.

        Raises:
            RendezvousError: the server was started or stopped before.
        """
        self._claim()
        self._run()

    def stop(self) -> None:
        """Ends the server: every connection closed, the thread joined, the port free. Idempotent.

        Called from the serving thread itself (a signal handler during `serve_forever`), it returns at once,
        and the loop ends right after.
        """
        if os.getpid() != self._pid:
            self.abandon()
            return
        self._loop.request_stop()
        if not self._claimed:
            self._claimed = True
            self._loop.close()
            self._ended.set()
        elif self._runner != threading.get_ident():
            self._ended.wait(_STOP_SECONDS)
            if self._thread is not None:
                self._thread.join(_STOP_SECONDS)

    def note_start(self, rank: int, pid: int) -> None:
        """Tells the server of a rank's process on this machine: should it stand still before it joins, that is seen.

        Args:
            rank: its number.
            pid: its process id.
        """
        self._loop.tell(Started(rank, pid))

    def note_end(self, rank: int, how: str) -> None:
        """Tells the server that a rank's process has ended: who waits for it to join waits in vain, and is told.

        Args:
            rank: its number.
            how: it ended, in words, e.g. "ended with exit code 0".
        """
        self._loop.tell(Ended(rank, how))

    def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Waits until every client has left; returns whether they have. For a rank that hosts the server.

        Args:
            timeout_seconds: how long to wait at most.
        """
        return self._loop.wait_until_empty(timeout_seconds)

    def abandon(self) -> None:
        """Closes this process's copies of the descriptors without any I/O: for the child after a fork."""
        self._claimed = True
        with contextlib.suppress(OSError):
            self._loop.close(is_copy=True)

    def _claim(self) -> None:
        if self._claimed:
            raise RendezvousError(
                f"the rendezvous server at {self.address} was started or stopped before; make a new one"
            )
        self._claimed = True

    def _run(self) -> None:
        self._runner = threading.get_ident()
        try:
            self._loop.run()
        finally:
            self._ended.set()


def _check_run_id(run_id: str | None) -> str:
    if run_id is None:
        return os.urandom(8).hex()
    if not run_id or len(run_id.encode()) > MAX_RUN_ID_BYTES:
        raise InvalidArgument(f"a run_id needs 1 to {MAX_RUN_ID_BYTES} bytes, got {len(run_id.encode())}")
    return run_id


# A child of a fork must not keep the port, nor the streams by whose end the ranks know that the server is gone.
_servers: weakref.WeakSet[RendezvousServer] = weakref.WeakSet()


def _abandon_copies() -> None:
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_copies)

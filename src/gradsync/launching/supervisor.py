"""The one engine of launching: starts the ranks of a run, watches them, and stops them all when one fails.

`gradsync run`, `gs.launch` and `gs.launcher` are thin faces over `supervise`, which prepares a run and leaves
the waiting to `watch`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import TextIO

from gradsync import environment
from gradsync.errors import InvalidArgument
from gradsync.launching.outcome import Outcome
from gradsync.launching.rank_process import RankProcess, start_record
from gradsync.launching.signal_inbox import SignalInbox
from gradsync.launching.targets import Target
from gradsync.launching.watch import Watch
from gradsync.rendezvous.sockets import bind_listener


def supervise(
    target: Target,
    n_ranks: int,
    *,
    backend: str = "auto",
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    rendezvous_port: int = 0,
    notices: TextIO | None = None,
) -> Outcome:
    """Runs a target in `n_ranks` processes on this machine, to the end of all of them.

    Hosts the rendezvous server of the run. SIGINT, SIGTERM and SIGHUP to this process are forwarded to the
    ranks and end the run; the outcome tells which it was.

    Args:
        target: what each rank runs.
        n_ranks: number of processes.
        backend: what `init_process_group("auto")` takes in the ranks.
        master_addr: MASTER_ADDR in the ranks, for the user's own use.
        master_port: MASTER_PORT in the ranks, for the user's own use; a free port by default.
        rendezvous_port: port of the rendezvous server on 127.0.0.1; 0 takes a free one.
        notices: where a Ctrl-C is answered with a line.

    Returns:
        How every rank ended. A failing rank is no exception here.

    Raises:
        InvalidArgument: `n_ranks` is no positive integer.
        RendezvousError: `rendezvous_port` is taken.
    """
    if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
        raise InvalidArgument(f"the number of processes needs to be an integer of at least 1, got {n_ranks!r}")
    # The server's socket is bound now, so that ranks can start before the server does.
    with SignalInbox() as signals, bind_listener("127.0.0.1", rendezvous_port) as listener:
        port = master_port or _free_port()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        secret = os.urandom(32)
        environs = [rank_environment(rank, n_ranks, address, master_addr, port, backend) for rank in range(n_ranks)]
        with Watch(signals, notices) as watch:
            start = start_record(target, secret)
            try:
                for rank, environ in enumerate(environs):
                    watch.add(RankProcess(rank, target, start, environ))
            finally:
                os.close(start)
            # The ranks boot meanwhile; who connects early waits in the listener's backlog.
            with _serving(n_ranks, secret, listener):
                return watch.run()


def rank_environment(
    rank: int,
    n_ranks: int,
    address: str,
    master_addr: str,
    master_port: int,
    backend: str,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Gives the environment variables of one rank: those of this process, and the rank's own.

    Args:
        rank: the rank, which is also its local rank.
        n_ranks: number of ranks, all on this machine.
        address: host:port of the rendezvous server.
        master_addr: MASTER_ADDR.
        master_port: MASTER_PORT.
        backend: GRADSYNC_BACKEND.
        environ: the variables of this process.
    """
    own = {
        environment.RANK: str(rank),
        environment.WORLD_SIZE: str(n_ranks),
        environment.LOCAL_RANK: str(rank),
        environment.LOCAL_WORLD_SIZE: str(n_ranks),
        environment.ADDRESS: address,
        environment.HOSTED: "1",
        environment.BACKEND: backend,
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    # A secret around this process belongs to another run.
    kept = {k: v for k, v in environ.items() if k not in (environment.SECRET, environment.SECRET_FILE)}
    return kept | environment.blas_thread_variables(n_ranks, environ) | own


@contextlib.contextmanager
def _serving(n_ranks: int, secret: bytes, listener: socket.socket) -> Iterator[None]:
    """Runs the rendezvous server in a thread of this process."""
    from gradsync.rendezvous.server import RendezvousServer  # here: the ranks boot while it loads

    server = RendezvousServer(n_ranks, secret=secret, listener=listener)
    server.start()
    try:
        yield
    finally:
        server.stop()


def _free_port() -> int:
    """Gives a port that was free a moment ago; its user binds it, so nobody can hold it until then."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

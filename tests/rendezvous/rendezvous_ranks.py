"""Runs one function as several ranks, each in a thread with its own client."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer

SECRET = b"0123456789abcdef0123456789abcdef"
JOIN_SECONDS = 60.0


def connect(server: RendezvousServer | str, rank: int, world_size: int, **options: Any) -> RendezvousClient:
    address = server.address if isinstance(server, RendezvousServer) else server
    options = {"secret": SECRET, "timeout_seconds": JOIN_SECONDS, **options}
    return RendezvousClient.connect(address, rank=rank, world_size=world_size, **options)


@contextlib.contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Gives a server of one rank in a process of its own, and its address."""
    script = (
        "from gradsync.rendezvous.server import RendezvousServer\n"
        f"server = RendezvousServer(1, secret={SECRET!r})\n"
        "print(server.address, flush=True)\n"
        "server.serve_forever()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def run_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Runs the functions side by side; returns each one's result, or the exception that it raised."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads), f"stuck; so far {results}"
    return results


def run_ranks(server: RendezvousServer, world_size: int, work: Callable[[RendezvousClient], Any]) -> list[Any]:
    """Connects every rank, runs the work, closes; returns results or exceptions by rank."""

    def run(rank: int) -> Any:
        with connect(server, rank, world_size) as client:
            return work(client)

    return run_threads([lambda rank=rank: run(rank) for rank in range(world_size)])


def connect_all(server: RendezvousServer, world_size: int) -> list[RendezvousClient]:
    clients = run_threads([lambda r=r: connect(server, r, world_size) for r in range(world_size)])
    for client in clients:
        if isinstance(client, BaseException):
            raise client
    return clients

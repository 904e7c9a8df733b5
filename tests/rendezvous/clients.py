"""Servers and clients over loopback: a thread is a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.peer import PATIENCE_SECONDS, SECRET, Peer, Status


def connect(server: RendezvousServer | str, rank: int = 0, size: int = 1, **options: Any) -> RendezvousClient:
    address = server if isinstance(server, str) else server.address
    options = {"secret": SECRET, "timeout_seconds": PATIENCE_SECONDS} | options
    return RendezvousClient.connect(address, rank=rank, world_size=size, **options)


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Calls the functions side by side, and gives what each returns or raises."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads), f"still running; so far {results}"
    return results


def join_all(server: RendezvousServer, size: int) -> list[RendezvousClient]:
    clients = together(*[lambda rank=rank: connect(server, rank, size) for rank in range(size)])
    for client in clients:
        if isinstance(client, BaseException):
            raise client
    return clients


@contextmanager
def world(size: int) -> Iterator[list[RendezvousClient]]:
    """The clients of all ranks of a world, whose server has no other."""
    with RendezvousServer(size, secret=SECRET) as server:
        clients = join_all(server, size)
        try:
            yield clients
        finally:
            together(*[client.close for client in clients])


@contextmanager
def world_with_peer(size: int) -> Iterator[tuple[list[RendezvousClient], Peer]]:
    """The same, but the last rank is a peer that says what the test wants, and ends without a word."""
    with RendezvousServer(size, secret=SECRET) as server, Peer.of_client(server.address) as peer:
        with thread_of(lambda: peer.join(size - 1, size)) as joined:
            clients = together(*[lambda rank=rank: connect(server, rank, size) for rank in range(size - 1)])
            assert joined().status == Status.OK
        try:
            yield clients, peer
        finally:
            together(*[client.close for client in clients])


def on_each(clients: list[RendezvousClient], work: Callable[[RendezvousClient], Any]) -> list[Any]:
    """Calls work(client) as each rank, side by side."""
    return together(*[lambda client=client: work(client) for client in clients])


def failure_of(client: RendezvousClient) -> BaseException:
    """The failure of its world, which a request that would wait for ever raises."""
    try:
        client.get("nobody sets this", timeout_seconds=PATIENCE_SECONDS)
    except Exception as error:
        return error
    raise AssertionError("the world has not failed")


@contextmanager
def thread_of(function: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Runs a function beside the block, and gives a function that waits for what it returns or raises."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    def result() -> Any:
        thread.join(2 * PATIENCE_SECONDS)
        return results[0]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield result
    finally:
        with suppress(IndexError):
            result()

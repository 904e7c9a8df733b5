"""What lies between a client and a server: a listener, one who speaks TLS with both, and buffers of little room."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

from gradsync.environment import TLS_CERTIFICATE, TLS_KEY


class Tap:
    """A place between client and server: `meddle(client, server)` is run for each connection."""

    def __init__(self, address: str, meddle: Callable[[socket.socket, socket.socket], None]) -> None:
        self._server = address.split(":")
        self._meddle = meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Tap:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._server[0], int(self._server[1])))
                self._threads.append(threading.Thread(target=self._serve, args=(client, server)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            self._meddle(client, server)


def relay(client: socket.socket, server: socket.socket, seen: bytearray) -> None:
    """Passes everything on, both ways, and keeps a copy."""

    def one_way(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)

    back = threading.Thread(target=one_way, args=(server, client))
    back.start()
    one_way(client, server)
    back.join(60)


def in_the_middle(variables: dict[str, str]) -> Callable[[socket.socket, socket.socket], None]:
    """Speaks TLS with both, with a certificate of its own, and passes on what is inside."""
    to_client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    to_client.load_cert_chain(variables[TLS_CERTIFICATE], variables[TLS_KEY])
    to_server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    to_server.check_hostname, to_server.verify_mode = False, ssl.CERT_NONE

    def meddle(client: socket.socket, server: socket.socket) -> None:
        with to_client.wrap_socket(client, server_side=True) as inside, to_server.wrap_socket(server) as upper:
            relay(inside, upper, bytearray())

    return meddle


def narrow(stream: socket.socket) -> socket.socket:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    return stream


def small_buffers(tune: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def tuned(stream: socket.socket) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        tune(stream)

    return tuned

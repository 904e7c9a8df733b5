"""TLS around a rendezvous connection: an option, for networks on which others can listen.

Beside `sockets`; loaded only where `tls_files` names certificates. The handshake of `handshake` and the MACs of `wire`
run inside, as they do without: TLS adds that nobody else can read. What the rest of the rendezvous gets is a socket
that behaves like a plain non-blocking one (`TlsStream`).

A CA alone would let every holder of a certificate of that CA stand between two ranks, who would still see each other's
proofs. So the secret with which both prove themselves is mixed with the certificate that the client saw (`bound_to`):
nobody can stand between them without the server's key, and a run needs no CA, nor names in its certificates. With a CA
both sides have to show a certificate of it, before they prove anything.

Source: the channel binding "tls-server-end-point" of RFC 5929.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any, cast

from gradsync.environment import TLS_CA, TLS_CERTIFICATE, TLS_KEY
from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousTimeout
from gradsync.rendezvous.sockets import RoomNeeded
from gradsync.tls_files import TlsFiles

_BOUND = b"gradsync 1 secret bound to a certificate\0"
_RECORD_BYTES = 16 * 1024  # the most that one TLS record holds
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
_ALERT = bytes.fromhex("15 0303 0002 02 46")  # fatal, protocol_version; Source: RFC 8446, section 6
# What the peer's alerts are called that refuse a certificate; Source: RFC 8446, section 6.2, as OpenSSL spells them.
_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")


class TlsStream(ssl.SSLSocket):
    """A TLS connection with the manners of a non-blocking socket; made by `ServerTls` and `ClientTls`.

    What it cannot do now raises BlockingIOError. What it has decrypted it hands out: a poll would not tell of bytes
    that wait inside OpenSSL. A thread may read beside one that writes, which OpenSSL by itself does not allow.
    """

    _lock: threading.RLock  # reentrant: a signal's handler may come between two calls

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Returns bytes that have come, and with them the rest of their record: at most 16 KiB more than asked for."""
        if not hasattr(self, "_lock"):  # `ssl` asks, before anything is wrapped, what a peer has left that is gone
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        with self._lock:
            try:
                data = super().recv(buflen, flags)
                while data and (left_bytes := self.pending()):
                    data += super().recv(left_bytes, flags)
                return data
            except ssl.SSLWantReadError:
                raise BlockingIOError("no whole record has come") from None
            except ssl.SSLWantWriteError:
                raise RoomNeeded("the handshake waits for room") from None
            except ssl.SSLError as error:
                if error.reason in _NOT_TLS:
                    self._answer_what_is_not_tls()
                raise

    def send(self, data: Any, flags: int = 0) -> int:
        """Sends at most one record; after BlockingIOError the next call has to begin with the same bytes."""
        with self._lock, memoryview(data) as whole, whole[:_RECORD_BYTES] as piece:
            try:
                return super().send(piece, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError("no room") from None

    def _answer_what_is_not_tls(self) -> None:
        """Tells a peer of ours that it forgot TLS, as OpenSSL does not: with an alert, which `wire` recognises."""
        with contextlib.suppress(OSError):
            socket.socket.recv(self, _RECORD_BYTES)  # what is left unread would overtake the answer at closing
            socket.socket.send(self, _ALERT)

    def shutdown(self, how: int) -> None:
        """Ends the stream; a thread that reads sees its end, and never what is left of it undecrypted."""
        socket.socket.shutdown(self, how)


class ServerTls:
    """The server's side.

    Args:
        files: its certificate and key; with a CA, clients have to show a certificate of it.

    Raises:
        InvalidArgument: a file is missing, or is not what it should be, or the key is another certificate's.
    """

    def __init__(self, files: TlsFiles) -> None:
        if files.certificate is None:
            raise InvalidArgument(
                f"a rendezvous server with TLS needs a certificate of its own: set {TLS_CERTIFICATE} and {TLS_KEY} "
                f"where it runs, beside {TLS_CA}"
            )
        self._context = _context(ssl.PROTOCOL_TLS_SERVER, files)
        self._context.num_tickets = 0  # nothing is resumed
        self._certificate = _first_certificate(files.certificate)

    def bind(self, secret: bytes) -> bytes:
        """Returns the secret as clients have it that see this certificate."""
        return bound_to(self._certificate, secret)

    def wrap(self, stream: socket.socket) -> socket.socket:
        """Returns an accepted connection that reads and writes TLS; its handshake runs while it is read.

        Raises:
            OSError: the peer is gone.
        """
        return _wrap(self._context, stream, server_side=True)


class ClientTls:
    """A client's side.

    Args:
        files: with a CA, the server has to show a certificate of it; the certificate is shown to a server that asks.

    Raises:
        InvalidArgument: see `ServerTls`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._context = _context(ssl.PROTOCOL_TLS_CLIENT, files)

    def connect(self, stream: socket.socket, secret: bytes, deadline: float) -> tuple[socket.socket, bytes]:
        """Runs the handshake of TLS on a connected socket, which is closed where that fails.

        Returns:
            The connection that reads and writes TLS, and the secret bound to the server's certificate.

        Raises:
            AuthenticationError: the server's certificate does not hold.
            RendezvousTimeout: the deadline (monotonic seconds) came first.
            OSError: the peer ended the connection, or does not speak TLS.
        """
        wrapped = _wrap(self._context, stream, server_side=False)
        try:
            _shake_hands(wrapped, deadline)
            certificate = wrapped.getpeercert(binary_form=True)
            if not certificate:
                raise AuthenticationError("the server has shown no certificate")
            return wrapped, bound_to(certificate, secret)
        except BaseException:
            wrapped.close()
            raise

    @staticmethod
    def refusal_in(error: BaseException | None) -> str | None:
        """Returns why the server refused this side's certificate, where an error tells that; else None.

        The server looks at it last: this side hears of a refusal with the first thing that it reads.
        """
        reason = error.reason if isinstance(error, ssl.SSLError) else None
        if not reason or "ALERT" not in reason or not any(word in reason for word in _REFUSALS):
            return None
        alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return (
            f"the server refuses the TLS certificate of this side ({alert}): see {TLS_CERTIFICATE} here, {TLS_CA} there"
        )


def bound_to(certificate: bytes, secret: bytes) -> bytes:
    """Returns the secret for a connection to whoever holds the key of this certificate (in DER)."""
    return hmac.digest(secret, _BOUND + hashlib.sha256(certificate).digest(), "sha256")


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsStream
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # `bound_to` says more than a name would
    context.verify_mode = ssl.CERT_NONE if files.ca is None else ssl.CERT_REQUIRED
    if files.ca is not None:
        _check_readable(TLS_CA, files.ca)
        try:
            context.load_verify_locations(files.ca)
        except ssl.SSLError as error:
            raise InvalidArgument(f"{TLS_CA}={files.ca!r} needs to hold certificates in PEM: {_said(error)}") from None
    if files.certificate is not None and files.key is not None:
        _load_own(context, files.certificate, files.key)
    return context


def _load_own(context: ssl.SSLContext, certificate: str, key: str) -> None:
    _check_readable(TLS_CERTIFICATE, certificate)
    _check_readable(TLS_KEY, key)

    def refuse_to_ask() -> str:
        raise InvalidArgument(f"{TLS_KEY}={key!r} is encrypted, and nobody is there to ask for its password")

    try:
        context.load_cert_chain(certificate, key, password=refuse_to_ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(
                f"{TLS_KEY}={key!r} is not the key of the certificate in {TLS_CERTIFICATE}={certificate!r}"
            ) from None
        raise InvalidArgument(
            f"{TLS_CERTIFICATE}={certificate!r} and {TLS_KEY}={key!r} need to hold a certificate and its key in PEM: "
            f"{_said(error)}"
        ) from None


def _check_readable(name: str, path: str) -> None:
    """OpenSSL would say which file it is in no case, and of some not even what is wrong."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO would keep us
            file.read(1)
    except OSError as error:
        raise InvalidArgument(f"{name}={path!r} cannot be opened: {error.strerror}") from None


def _first_certificate(path: str) -> bytes:
    """Returns the first certificate of a file in PEM, in DER: that of this side, as OpenSSL takes it."""
    text = Path(path).read_text(encoding="ascii", errors="replace")
    body = text.partition(ssl.PEM_HEADER)[2].partition(ssl.PEM_FOOTER)[0]
    try:
        certificate = ssl.PEM_cert_to_DER_cert(f"{ssl.PEM_HEADER}{body}{ssl.PEM_FOOTER}")
    except ValueError:
        certificate = b""
    if not certificate:
        raise InvalidArgument(f"{TLS_CERTIFICATE}={path!r} needs to begin with this side's certificate in PEM")
    return certificate


def _wrap(context: ssl.SSLContext, stream: socket.socket, *, server_side: bool) -> TlsStream:
    wrapped = cast(TlsStream, context.wrap_socket(stream, server_side=server_side, do_handshake_on_connect=False))
    if getattr(wrapped, "_sslobj", None) is None:  # reset by its peer already: `ssl` would go on in plain text
        wrapped.close()
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    wrapped._lock = threading.RLock()
    return wrapped


def _shake_hands(stream: TlsStream, deadline: float) -> None:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while True:
        try:
            stream.do_handshake()
            return
        except ssl.SSLWantReadError:
            poll.modify(stream, select.POLLIN)
        except ssl.SSLWantWriteError:
            poll.modify(stream, select.POLLOUT)
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(
                f"the TLS certificate of the server does not hold ({error.verify_message}): see {TLS_CA} here, "
                f"{TLS_CERTIFICATE} there"
            ) from None
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            raise RendezvousTimeout("no answer to the handshake of TLS")
        poll.poll(1000.0 * left_seconds + 1.0)


def _said(error: ssl.SSLError) -> str:
    return error.reason or str(error)

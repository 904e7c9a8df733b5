"""The handshake: both sides prove that they know the run's secret, and derive the keys of their session.

`connection` and `server` use this module. The two classes are state machines without I/O: they take nonces
and frames, and return bytes.

    client                                  server
    HELLO     magic, version, client nonce      ->
                                     <-     CHALLENGE  magic, version, server nonce, machine, pid, run id
                                                       MAC: the server's proof
    PROOF     MAC: the client's proof ->
    JOIN and all later messages, with the session keys, in both directions

The server gives its proof first. So a client sends no proof to a server that does not know the secret. A client whose
own secret is wrong learns this from the server's proof. Each proof covers the headers and bodies of all frames so far
and the label of its direction, so no frame can be reflected, replayed or spliced. Bodies have a fixed binary layout: no
decoder runs before authentication. The client refuses a server of another protocol version, so all later frames have
the same format.

Both nonces go into the keys of the session, so the keys are valid for one connection only.

The CHALLENGE identifies the server's process by a digest of its machine's identity and by its pid. So a client on the
same machine can check whether a silent server is paused (SIGSTOP).

Source: the mutual challenge and response of ISO/IEC 9798-4 (three passes), with HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousError
from gradsync.rendezvous.frames import PROTOCOL_VERSION, FrameType
from gradsync.rendezvous.wire import MAC_BYTES, Frame, FrameError, Session, pack_frame

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_RUN_ID_BYTES = 64
_MAGIC = b"gradsync"
_PREFIX = _MAGIC + bytes([PROTOCOL_VERSION])
_PROCESS = struct.Struct(">8sI")  # a digest of the machine's identity (zeros if unknown), and the pid
_NO_MAC = bytes(MAC_BYTES)  # in HELLO: there is no key yet; both proofs cover the frame later

_SERVER_PROOF = b"gradsync 1 server proof\0"
_CLIENT_PROOF = b"gradsync 1 client proof\0"
_CLIENT_TO_SERVER = b"gradsync 1 client to server\0"
_SERVER_TO_CLIENT = b"gradsync 1 server to client\0"


class ServerProcess(NamedTuple):
    """The server's process, as its CHALLENGE identifies it.

    Attributes:
        machine: a digest of the server's `machine_identity`; zeros if unknown.
        pid: the server's process id on that machine.
    """

    machine: bytes = bytes(8)
    pid: int = 0

    @classmethod
    def of(cls, machine: str, pid: int) -> ServerProcess:
        """Returns the process with this pid on the machine with this identity; "" is an unknown machine."""
        return cls(hashlib.sha256(machine.encode()).digest()[:8] if machine else bytes(8), pid)

    def is_on(self, machine: str) -> bool:
        """Whether the process runs on the machine with this identity."""
        return bool(machine) and self.machine == ServerProcess.of(machine, 0).machine


_UNKNOWN = ServerProcess()


def check_secret(secret: bytes) -> bytes:
    """Returns the secret as bytes.

    Raises:
        InvalidArgument: the secret is neither bytes nor a bytearray, or is shorter than 16 bytes.
    """
    if not isinstance(secret, (bytes, bytearray)) or len(secret) < MIN_SECRET_BYTES:
        size = f"{len(secret)} bytes" if isinstance(secret, (bytes, bytearray)) else type(secret).__name__
        raise InvalidArgument(
            f"the rendezvous needs a secret of at least {MIN_SECRET_BYTES} bytes, got {size}; "
            "make one per run with secrets.token_bytes(32)"
        )
    return bytes(secret)


def _sign(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + transcript, "sha256")


def _session(secret: bytes, transcript: bytes, *, is_server: bool) -> Session:
    digest = hashlib.sha256(transcript).digest()
    to_server = _sign(secret, _CLIENT_TO_SERVER, digest)
    to_client = _sign(secret, _SERVER_TO_CLIENT, digest)
    send_key, receive_key = (to_client, to_server) if is_server else (to_server, to_client)
    return Session(send_key=send_key, receive_key=receive_key, is_server=is_server)


def _expect(frame: Frame, frame_type: FrameType, sequence: int) -> None:
    if frame.type != frame_type or frame.sequence != sequence:
        raise FrameError(f"expected {frame_type.name}, got frame type {frame.type}, sequence {frame.sequence}")


class ServerHandshake:
    """The server's side of the handshake, for one connection.

    Args:
        secret: the run's secret.
        run_id: the run's name, from which the keys of the session are derived too.
        nonce: 32 new random bytes.
        process: the server's process.
    """

    def __init__(self, secret: bytes, run_id: str, nonce: bytes, process: ServerProcess = _UNKNOWN) -> None:
        self._secret = secret
        self._run_id = run_id.encode()
        self._nonce = nonce
        self._process = _PROCESS.pack(*process)
        self._transcript = b""

    def receive(self, frame: Frame) -> bytes | Session:
        """Handles the client's next frame: returns the CHALLENGE to send after a HELLO, the session after a PROOF.

        Raises:
            FrameError: the frame does not have the expected type or sequence, or is malformed.
            AuthenticationError: the client's proof is wrong.
        """
        if not self._transcript:
            return self._challenge(frame)
        return self._verify(frame)

    def _challenge(self, frame: Frame) -> bytes:
        _expect(frame, FrameType.HELLO, 0)
        well_formed = len(frame.body) == len(_PREFIX) + NONCE_BYTES and frame.body.startswith(_MAGIC)
        if not well_formed or frame.mac != _NO_MAC:
            raise FrameError("malformed HELLO: the peer is not a gradsync client")
        signed = pack_frame(FrameType.CHALLENGE, 0, _PREFIX + self._nonce + self._process + self._run_id)
        self._transcript = frame.signed + signed
        return signed + _sign(self._secret, _SERVER_PROOF, self._transcript)

    def _verify(self, frame: Frame) -> Session:
        _expect(frame, FrameType.PROOF, 1)
        if frame.body:
            raise FrameError("malformed PROOF: its body must be empty")
        transcript = self._transcript + frame.signed
        if not hmac.compare_digest(_sign(self._secret, _CLIENT_PROOF, transcript), frame.mac):
            raise AuthenticationError("the client does not know the secret of this run")
        return _session(self._secret, transcript, is_server=True)


class ClientHandshake:
    """The client's side of the handshake, for one connection.

    Args:
        secret: the run's secret.
        nonce: 32 new random bytes.

    Attributes:
        run_id, server: the server's run id and process, valid once `receive` has accepted the server's proof.
    """

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._hello = pack_frame(FrameType.HELLO, 0, _PREFIX + nonce)
        self.run_id = ""
        self.server = _UNKNOWN

    def hello(self) -> bytes:
        """Returns the first bytes to send."""
        return self._hello + _NO_MAC

    def receive(self, frame: Frame) -> tuple[bytes, Session]:
        """Handles the CHALLENGE; returns the PROOF to send and the session that starts after it.

        Raises:
            FrameError: the frame is not a valid CHALLENGE, because another service uses the port.
            RendezvousError: the server speaks another version of the protocol.
            AuthenticationError: the server's proof is wrong, because the secrets differ.
        """
        _expect(frame, FrameType.CHALLENGE, 0)
        self.run_id, self.server = _read_challenge(frame.body)
        transcript = self._hello + frame.signed
        if not hmac.compare_digest(_sign(self._secret, _SERVER_PROOF, transcript), frame.mac):
            raise AuthenticationError(
                f"the server (run {self.run_id!r}) does not know this run's secret: "
                "the secret here is wrong, or another run holds this port"
            )
        signed = pack_frame(FrameType.PROOF, 1, b"")
        transcript += signed
        proof = signed + _sign(self._secret, _CLIENT_PROOF, transcript)
        return proof, _session(self._secret, transcript, is_server=False)


def _read_challenge(body: bytes) -> tuple[str, ServerProcess]:
    """Returns the run id and the server's process from a CHALLENGE's body."""
    if not body.startswith(_MAGIC) or len(body) < len(_PREFIX):
        raise FrameError("malformed CHALLENGE: the peer is not a gradsync server")
    if body[len(_MAGIC)] != PROTOCOL_VERSION:
        raise RendezvousError(
            f"the server speaks protocol version {body[len(_MAGIC)]}, this side version {PROTOCOL_VERSION}; "
            "run the same version of gradsync on every rank"
        )
    begin = len(_PREFIX) + NONCE_BYTES
    run_id = body[begin + _PROCESS.size :]
    if not 1 <= len(run_id) <= MAX_RUN_ID_BYTES:
        raise FrameError("malformed CHALLENGE: the peer is not a gradsync server")
    try:
        return run_id.decode(), ServerProcess(*_PROCESS.unpack_from(body, begin))
    except UnicodeDecodeError:
        raise FrameError("malformed CHALLENGE: the run id is not UTF-8") from None

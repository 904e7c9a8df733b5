"""The bytes between a rank and the rendezvous server: the handshake, then sealed messages. No I/O and no clock.

    client                                  server
    HELLO     magic, version, nonce              ->
                                     <-     CHALLENGE  magic, version, nonce, run id; the server's proof
    PROOF     the client's proof                 ->
    then messages in both directions: a msgpack array of a request's number and fields

A frame has these parts:

    length    4 bytes, big endian: the number of bytes that follow
    kind      1 byte
    sequence  8 bytes, big endian: counts the frames of one direction from 0
    body      see above; HELLO, CHALLENGE and PROOF have a fixed layout, so that no decoder runs for a stranger
    MAC       32 bytes: HMAC-SHA256 of all bytes before it, with the key of this direction; of HELLO zeros

The server gives its proof first, so a client sends no proof to a server that does not know the secret. Each proof
covers all frames so far and the label of its direction: no frame can be reflected, replayed or spliced. The keys are
derived from the whole handshake, so they are valid for one connection only. The length of a frame is checked as soon as
its 4 bytes are there, and its body is decoded only when the MAC was right. `ssl` with a pre-shared key can take the
place of `Channel` once Python 3.13 is the oldest that gradsync supports.

Source: the mutual challenge and response of ISO/IEC 9798-4 (three passes), with HMAC-SHA256.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack

from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousError

PROTOCOL_VERSION = 15  # below 256: HELLO and CHALLENGE have one byte for it

MAC_BYTES = NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_HANDSHAKE_FRAME_BYTES = 512
MAX_FRAME_BYTES = 64 * 1024

MAX_VALUE_BYTES = 60 * 1024  # leaves room in a frame for the longest key
MAX_EXCHANGED_BYTES = 512 * 1024  # all members' values together: each member receives all of them
MAX_NAME_BYTES = 1024  # of names, and of other short texts
MAX_EVENT_BYTES = 48 * 1024
MAX_REASON_BYTES = 4096
MAX_TEXT_BYTES = 8192
MAX_FAILURE_BYTES = 48 * 1024  # the report of a stuck collective holds the stacks of the ranks
MAX_REPORT_BYTES = 16 * 1024
MAX_STATUS_GROUPS = 16
MAX_STATUS_CALLS = 128
MAX_CALL_BYTES = 200
MAX_RANKS = 16_384
OF_MESSAGES = 0  # in place of a collective's number, which starts at 1: the rank waits in a send or receive

#: By group: for each of a rank's last collectives its number, digest, description, and whether it still runs.
Calls = Mapping[str, Sequence[tuple[int, int, str, bool]]]

_MAGIC = b"gradsync"
_PREFIX = _MAGIC + bytes([PROTOCOL_VERSION])
_HEADER = struct.Struct("!IBQ")
_MIN_FRAME_BYTES = _HEADER.size + MAC_BYTES
_MAX_BODY_BYTES = MAX_FRAME_BYTES - _MIN_FRAME_BYTES
_NO_MAC = bytes(MAC_BYTES)


class Kind(enum.IntEnum):
    """The kinds of frames: of the handshake, of ranks, and from 64 of the server."""

    HELLO, CHALLENGE, PROOF = 1, 2, 3
    JOIN, SET, GET, DELETE, EXCHANGE, LEAVE, FAIL, BEAT, WAITING, STATUS = range(16, 26)
    REPLY, FAILED, LEFT, ASK = range(64, 68)


class Status(enum.IntEnum):
    """What a REPLY says: here is the value; or the request was wrong, or refused, or timed out, or has failed."""

    OK, INVALID, REFUSED, TIMED_OUT, FAILED = range(5)


class FrameError(RendezvousError):
    """The received bytes are no valid message; the connection cannot be used any further."""


class Message(NamedTuple):
    """One authenticated message. Its repr leaves out the fields, which may hold a secret id.

    Attributes:
        kind: the kind.
        request: the number that the client gave the request, also in the REPLY; 0 if there will be no answer.
        fields: the fields.
    """

    kind: Kind
    request: int
    fields: list[Any]

    def __repr__(self) -> str:
        return f"{self.kind.name} {self.request}"


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


class Channel:
    """One end of one connection.

    Args:
        secret: the run's secret.
        run_id: on the server: the run's name, 1 to 64 bytes; None on a rank.

    Attributes:
        outgoing: the bytes to send; the owner removes what it has sent.
        is_open: whether the handshake has ended: `seal` may be called.
        has_received: whether a message of an authenticated peer has arrived.
    """

    def __init__(self, secret: bytes, *, run_id: str | None = None) -> None:
        self.outgoing = bytearray()
        self.is_open = self.has_received = False
        self._secret = secret
        self._run_id = None if run_id is None else run_id.encode()
        self._transcript = b""
        self._received = bytearray()
        self._sent_count = self._received_count = 0
        self._mac_sent: hmac.HMAC
        self._mac_received: hmac.HMAC
        if run_id is None:
            self._transcript = self._frame(Kind.HELLO, _PREFIX + os.urandom(NONCE_BYTES))
            self.outgoing += self._transcript + _NO_MAC

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that are complete with these bytes; goes on with the handshake.

        Raises:
            FrameError: the peer does not speak this protocol, or a frame was altered, replayed, lost or reordered.
            AuthenticationError: the peer does not know the secret.
            RendezvousError: the server speaks another version of the protocol.
        """
        self._received += data
        messages: list[Message] = []
        while (frame := self._next_frame()) is not None:
            signed, mac = frame[:-MAC_BYTES], frame[-MAC_BYTES:]
            _, kind, sequence = _HEADER.unpack_from(frame)
            body = signed[_HEADER.size :]
            if self.is_open:
                messages.append(self._message(kind, sequence, signed, body, mac))
                continue
            self._expect(kind, sequence)
            self._received_count += 1
            if kind == Kind.HELLO:
                self._challenge(signed, body, mac)
            elif kind == Kind.CHALLENGE:
                self._prove(signed, body, mac)
            else:
                self._verify(signed, body, mac)
        return messages

    def seal(self, kind: Kind, request: int, *fields: Any) -> None:
        """Adds a message to `outgoing`.

        Raises:
            Exception: msgpack cannot encode the fields, or they are too long; the channel is as before.
        """
        body = msgpack.packb((request, *fields), use_bin_type=True)
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidArgument(f"{kind.name} has {len(body)} bytes, more than the {_MAX_BODY_BYTES} of a message")
        signed = self._frame(kind, body)
        self.outgoing += signed + _signed_by(self._mac_sent, signed)

    def _frame(self, kind: int, body: bytes) -> bytes:
        """Returns the next frame of this direction, without its MAC."""
        self._sent_count += 1
        return _HEADER.pack(len(body) + _MIN_FRAME_BYTES - 4, kind, self._sent_count - 1) + body

    def _next_frame(self) -> bytes | None:
        if len(self._received) < 4:
            return None
        size = 4 + int.from_bytes(self._received[:4], "big")
        limit = MAX_FRAME_BYTES if self.is_open else MAX_HANDSHAKE_FRAME_BYTES
        if not _MIN_FRAME_BYTES <= size <= limit:
            raise FrameError(f"a frame needs {_MIN_FRAME_BYTES} to {limit} bytes, the peer announced {size}")
        if len(self._received) < size:
            return None
        frame = bytes(self._received[:size])
        del self._received[:size]
        return frame

    # -- The handshake -------------------------------------------------------------------------------------------

    def _expect(self, kind: int, sequence: int) -> None:
        if self._run_id is None:
            expected = Kind.CHALLENGE, 0
        else:
            expected = (Kind.PROOF, 1) if self._transcript else (Kind.HELLO, 0)
        if (kind, sequence) != expected:
            raise FrameError(f"expected {expected[0].name}, got frame kind {kind}, sequence {sequence}")

    def _challenge(self, signed: bytes, body: bytes, mac: bytes) -> None:
        """The server's answer to HELLO; one of another version gets it too, so that the client can say why it ends."""
        assert self._run_id is not None
        if len(body) != len(_PREFIX) + NONCE_BYTES or not body.startswith(_MAGIC) or mac != _NO_MAC:
            raise FrameError("malformed HELLO: the peer is not a gradsync client")
        challenge = self._frame(Kind.CHALLENGE, _PREFIX + os.urandom(NONCE_BYTES) + self._run_id)
        self._transcript = signed + challenge
        self.outgoing += challenge + self._proof(b"server")

    def _prove(self, signed: bytes, body: bytes, mac: bytes) -> None:
        if not body.startswith(_MAGIC) or len(body) <= len(_PREFIX) + NONCE_BYTES:
            raise FrameError("malformed CHALLENGE: the peer is not a gradsync server")
        if body[len(_MAGIC)] != PROTOCOL_VERSION:
            raise RendezvousError(
                f"the server speaks protocol version {body[len(_MAGIC)]}, this side version {PROTOCOL_VERSION}; "
                "run the same version of gradsync on every rank"
            )
        self._transcript += signed
        if not hmac.compare_digest(self._proof(b"server"), mac):
            run_id = body[len(_PREFIX) + NONCE_BYTES :].decode(errors="replace")
            raise AuthenticationError(
                f"the server (run {run_id!r}) does not know this run's secret: "
                "the secret here is wrong, or another run holds this port"
            )
        proof = self._frame(Kind.PROOF, b"")
        self._transcript += proof
        self.outgoing += proof + self._proof(b"client")
        self._open(b"client to server", b"server to client")

    def _verify(self, signed: bytes, body: bytes, mac: bytes) -> None:
        self._transcript += signed
        if body or not hmac.compare_digest(self._proof(b"client"), mac):
            raise AuthenticationError("the client does not know the secret of this run")
        self._open(b"server to client", b"client to server")

    def _proof(self, who: bytes) -> bytes:
        return hmac.digest(self._secret, b"gradsync 1 %b proof\0" % who + self._transcript, "sha256")

    def _open(self, sending: bytes, receiving: bytes) -> None:
        digest = hashlib.sha256(self._transcript).digest()
        sent, received = [
            hmac.digest(self._secret, b"gradsync 1 %b\0" % way + digest, "sha256") for way in (sending, receiving)
        ]
        # The part of a MAC that depends only on the key is computed once, and copied for every frame.
        self._mac_sent, self._mac_received = hmac.new(sent, digestmod="sha256"), hmac.new(received, digestmod="sha256")
        self.is_open = True

    # -- Messages ------------------------------------------------------------------------------------------------

    def _message(self, kind: int, sequence: int, signed: bytes, body: bytes, mac: bytes) -> Message:
        if not hmac.compare_digest(_signed_by(self._mac_received, signed), mac):
            raise FrameError("the MAC of a frame is wrong: the frame was altered, or belongs to another connection")
        if sequence != self._received_count:
            raise FrameError(
                f"expected frame {self._received_count}, got frame {sequence}: a frame was replayed, lost or reordered"
            )
        self._received_count += 1
        self.has_received = True
        known = _FROM_SERVER if self._run_id is None else _FROM_RANKS
        if kind not in known:
            raise FrameError(f"the peer may not send frame kind {kind}")
        try:
            request, *fields = msgpack.unpackb(body, raw=False, use_list=True)
        except Exception as error:  # the decoder raises many types of errors, which all mean the same here
            raise FrameError(f"the body of a frame is no msgpack array: {type(error).__name__}") from None
        if type(request) is not int or not 0 <= request < 2**63:
            raise FrameError("malformed message: a request's number is an integer from 0 to 2**63 - 1")
        return Message(known[kind], request, fields)


_FROM_RANKS = {int(kind): kind for kind in Kind if Kind.JOIN <= kind < Kind.REPLY}
_FROM_SERVER = {int(kind): kind for kind in Kind if kind >= Kind.REPLY}


def _signed_by(mac: hmac.HMAC, data: bytes) -> bytes:
    mac = mac.copy()
    mac.update(data)
    return mac.digest()


# -- Failures ---------------------------------------------------------------------------------------------------------

DIED, STUCK, SILENT = range(3)  # kinds of failures
_MISSING_RANK_BYTES = 3  # the largest number of bytes for one rank in an encoded list
_MAX_RANKS_BESIDE_TEXT = 12 * 1024  # a failure that lists this number of ranks still has room for a text of 12 KiB


class Failure(NamedTuple):
    """Why a request or a whole generation has failed.

    Attributes:
        rank: the rank that caused it; one of them if there are several.
        phase: that rank's phase: joining, running or left.
        text: the full description.
        kind: DIED, STUCK or SILENT.
        missing: the ranks that have not arrived at a stuck collective, as far as they are known.
    """

    rank: int
    phase: str
    text: str
    kind: int = DIED
    missing: tuple[int, ...] = ()

    def fields(self) -> tuple[object, ...]:
        """Returns the fields of a message that tells it."""
        text = clip_text(self.text, failure_room_bytes(len(self.missing)))
        return self.kind, self.rank, self.phase, self.missing, text


def failure_room_bytes(missing_ranks: int) -> int:
    """Returns the space for a failure's text in a frame that also lists `missing_ranks` ranks."""
    return MAX_FAILURE_BYTES - _MISSING_RANK_BYTES * min(missing_ranks, _MAX_RANKS_BESIDE_TEXT)


# -- Checks of fields, and texts --------------------------------------------------------------------------------------

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "bytes": (bytes,),
    "dict": (dict,),
    "list": (list,),
    "None": (type(None),),
}


def check_fields(handler: Callable[..., Any], skip: int, kind: Kind, fields: Sequence[Any]) -> None:
    """Checks the number and the types of a message's fields against the annotations of its handler.

    Args:
        handler: whose parameters, after the first `skip`, are the fields.
        skip, kind, fields: see above.

    Raises:
        FrameError: they do not fit.
    """
    types = _types_of(handler, skip)
    if len(fields) != len(types):
        raise FrameError(f"malformed {kind.name}: it needs {len(types)} fields, got {len(fields)}")
    for (name, allowed), value in zip(types, fields, strict=True):
        if type(value) not in allowed:
            raise FrameError(f"malformed {kind.name}: {name} is a {type(value).__name__}")


@lru_cache(maxsize=64)
def _types_of(handler: Callable[..., Any], skip: int) -> list[tuple[str, tuple[type, ...]]]:
    found = []
    for name in handler.__code__.co_varnames[skip : handler.__code__.co_argcount]:
        words = [word.partition("[")[0].strip() for word in handler.__annotations__[name].split("|")]
        found.append((name, tuple([kind for word in words for kind in _TYPES[word]])))
    return found


def clip_text(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns the text shortened to `max_bytes` in UTF-8; characters that cannot be encoded are replaced."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 4].decode("utf-8", "ignore") + " ..."


def event_key(group: str, position: int, rank: int) -> str:
    """Returns the key for the description of a rank's collective, which the ranks read if their collectives differ."""
    return f"{event_prefix(group, rank)}/{position}"


def event_prefix(group: str, rank: int) -> str:
    """Returns the common beginning of a rank's keys for all positions, which the rank deletes together."""
    return f"{group}/agree/{rank}"


def is_under(name: str, prefix: str) -> bool:
    """Whether a name is the prefix itself, or begins with "prefix/"."""
    return name == prefix or name.startswith(f"{prefix}/")

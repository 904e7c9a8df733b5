"""Seals and opens frames of the byte stream; `frames` has the schemas of their fields.

`handshake` derives the keys of a `Session`; then both sides seal and open messages with the `Session`. This module
reads no socket, no clock and no source of randomness. A frame has these parts:

    length    4 bytes, big endian: the number of bytes that follow
    type      1 byte
    sequence  8 bytes, big endian: counts the frames of one direction from 0
    body      msgpack array of the type's fields (handshake frames: fixed binary layout)
    MAC       32 bytes: HMAC-SHA256 of all bytes before the MAC, with the key of this direction

The receiver checks the length of a frame as soon as these 4 bytes have arrived. It decodes the body only after it has
verified the MAC. The receiver refuses a message that is sent again (in a later run, later in the stream, or in the
other direction), because the key or the sequence does not match.
"""

from __future__ import annotations

import hmac
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from gradsync.errors import RendezvousError
from gradsync.rendezvous.frames import SCHEMAS, FieldError, FrameType, Message, check_fields

MAC_BYTES = 32
MAX_HANDSHAKE_FRAME_BYTES = 512
MAX_FRAME_BYTES = 64 * 1024
#: A frame is refused if it is still incomplete after this time: its length field was probably altered on the way.
MAX_FRAME_SECONDS = 5.0
_LENGTH = struct.Struct("!I")
_HEADER = struct.Struct("!IBQ")
_MIN_FRAME_BYTES = _HEADER.size + MAC_BYTES
_LENGTH_OF_EMPTY = _MIN_FRAME_BYTES - _LENGTH.size


class FrameError(RendezvousError):
    """The received bytes are not a valid frame; the connection cannot be used any further."""


@dataclass(slots=True)  # not frozen: every frame makes one, and a frozen object takes three times as long to make
class Frame:
    """One frame of the stream, whose MAC is not yet checked; treat it as immutable."""

    type: int
    sequence: int
    raw: bytes = field(repr=False)

    @property
    def body(self) -> bytes:
        """The fields, encoded."""
        return self.raw[_HEADER.size : -MAC_BYTES]

    @property
    def mac(self) -> bytes:
        """The sender's signature: the MAC of the bytes before it."""
        return self.raw[-MAC_BYTES:]

    @property
    def signed(self) -> bytes:
        """The bytes that the MAC covers."""
        return self.raw[:-MAC_BYTES]


def pack_frame(frame_type: int, sequence: int, body: bytes) -> bytes:
    """Returns the header and body of a frame, to which the sender appends the MAC."""
    return _HEADER.pack(len(body) + _LENGTH_OF_EMPTY, frame_type, sequence) + body


def sign(mac: hmac.HMAC, data: bytes) -> bytes:
    """Returns the MAC of the data, 32 bytes; `mac` holds the key, and does not change."""
    mac = mac.copy()
    mac.update(data)
    return mac.digest()


class FrameReader:
    """Cuts a byte stream into frames; holds at most one frame of the allowed length plus the bytes of one `feed`.

    Attributes:
        limit_bytes: the longest frame accepted now; the owner raises this limit after the handshake.
    """

    def __init__(self) -> None:
        self.limit_bytes = MAX_HANDSHAKE_FRAME_BYTES
        self._buffer = b""
        self._taken = 0  # the number of bytes already returned
        self._fed_at = 0.0
        self._begun_at = 0.0  # when the first bytes of the incomplete frame at the end of the buffer arrived

    def feed(self, data: bytes, now: float = 0.0) -> None:
        """Adds bytes that were read from the stream at `now`, in monotonic seconds."""
        self._fed_at = now
        if self._taken == len(self._buffer):
            self._begun_at = now
        self._buffer = self._buffer[self._taken :] + data
        self._taken = 0

    def next_frame(self) -> Frame | None:
        """Returns the next whole frame, or None while more bytes are needed.

        Raises:
            FrameError: the announced length is outside the range that is accepted now, or a frame that began more than
                5 s ago is still incomplete although new bytes have arrived.
        """
        buffer, begin = self._buffer, self._taken
        held_bytes = len(buffer) - begin
        if held_bytes >= _LENGTH.size:
            total_bytes = _LENGTH.unpack_from(buffer, begin)[0] + _LENGTH.size
            if not _MIN_FRAME_BYTES <= total_bytes <= self.limit_bytes:
                raise FrameError(
                    f"a frame needs {_MIN_FRAME_BYTES} to {self.limit_bytes} bytes, the peer announced {total_bytes}"
                )
            if held_bytes >= total_bytes:
                self._taken = end = begin + total_bytes
                self._begun_at = self._fed_at
                _, frame_type, sequence = _HEADER.unpack_from(buffer, begin)
                return Frame(frame_type, sequence, buffer[begin:end])
        if held_bytes and self._fed_at - self._begun_at > MAX_FRAME_SECONDS:
            raise FrameError(
                f"the peer's last message has been incomplete for {MAX_FRAME_SECONDS:g} s: "
                "the data was probably altered on the way"
            )
        return None


class Session:
    """Seals outgoing and opens incoming messages of one authenticated connection, in both directions.

    Args:
        send_key, receive_key: the direction keys that the handshake derived, 32 bytes each.
        is_server: whether this is the server's side, which determines the accepted frame types and the first sequences.

    Attributes:
        send_sequence: the sequence of the next frame to send.
    """

    def __init__(
        self,
        *,
        send_key: bytes,
        receive_key: bytes,
        is_server: bool,
    ) -> None:
        # The parts of a MAC that depend only on the key are computed once, and copied for every frame.
        self._mac_sent = hmac.new(send_key, digestmod="sha256")
        self._mac_received = hmac.new(receive_key, digestmod="sha256")
        # HELLO and PROOF of the client had the numbers 0 and 1, the server's CHALLENGE had 0.
        self.send_sequence, self._receive_sequence = (1, 2) if is_server else (2, 1)
        self._accepted_types = _FROM_CLIENTS if is_server else _FROM_SERVER

    def seal(self, frame_type: FrameType, *fields: Any) -> bytes:
        """Returns the frame of one message as bytes for the stream.

        Raises:
            FieldError: a field does not fit the schema; the sequence stays the same.
        """
        check_fields(frame_type, fields)
        signed = pack_frame(frame_type, self.send_sequence, _encode(fields))
        frame = signed + sign(self._mac_sent, signed)
        self.send_sequence += 1
        return frame

    def open(self, frame: Frame) -> Message:
        """Checks a frame's MAC, sequence, type and fields, and returns its message.

        Raises:
            FrameError: one of the checks failed.
        """
        if not hmac.compare_digest(sign(self._mac_received, frame.signed), frame.mac):
            raise FrameError("the MAC of a frame is wrong: the frame was altered, or belongs to another connection")
        if frame.sequence != self._receive_sequence:
            raise FrameError(
                f"expected frame {self._receive_sequence}, got frame {frame.sequence}: "
                "a frame was replayed, lost or reordered"
            )
        self._receive_sequence += 1
        frame_type = self._accepted_types.get(frame.type)
        if frame_type is None:
            raise FrameError(f"the peer may not send frame type {frame.type}")
        fields = _decode(frame.body)
        try:
            check_fields(frame_type, fields)
        except FieldError as error:
            raise FrameError(f"malformed {frame_type.name}: {error}") from None
        return Message(frame_type, frame.sequence, fields)


_FROM_CLIENTS = {int(frame_type): frame_type for frame_type in SCHEMAS if not frame_type.from_server}
_FROM_SERVER = {int(frame_type): frame_type for frame_type in SCHEMAS if frame_type.from_server}


class _Packers(threading.local):
    """One packer for each thread, kept because making a packer takes longer than encoding a message."""

    def __init__(self) -> None:
        self.pack: Callable[[tuple[Any, ...]], bytes] = msgpack.Packer(use_bin_type=True).pack


_packers = _Packers()


def _encode(fields: tuple[Any, ...]) -> bytes:
    try:
        return _packers.pack(fields)
    except UnicodeEncodeError:
        raise FieldError("text needs to be encodable in UTF-8, got a lone surrogate") from None


def _decode(body: bytes) -> tuple[Any, ...]:
    try:
        fields = msgpack.unpackb(body, raw=False, use_list=True)
    except Exception as error:  # the decoder raises many types of errors, which all mean the same here
        raise FrameError(f"the body of a frame is not msgpack: {type(error).__name__}") from None
    if type(fields) is not list:
        raise FrameError(f"the body of a frame needs to be a msgpack array, got {type(fields).__name__}")
    return tuple(fields)

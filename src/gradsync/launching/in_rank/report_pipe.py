"""The pipe on which a rank reports its end to the supervisor: one frame with a result or an error.

A frame is one kind byte, eight bytes of length (little endian) and the body. In the rank `rank_main` writes results and
`rank_error` errors; `rank_process` reads in the launcher. Imported by every rank at start-up, so it imports next to
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

#: The body says where in the rank's result file the return value lies: see `rank_result`.
RESULT = b"R"
#: The body is a JSON object with the attributes of `rank_process.ErrorReport`.
ERROR = b"E"

_HEADER_BYTES = 9
_GROWTH_BYTES = 16 << 20


def write_frame(descriptor: int, kind: bytes, body: bytes | bytearray) -> None:
    """Writes one frame, waiting while the pipe is full.

    Args:
        descriptor: write end of the pipe.
        kind: one byte.
        body: its length may be 0.

    Raises:
        OSError: the launcher is gone.
    """
    write_all(descriptor, (kind + len(body).to_bytes(8, "little"), body))


def write_all(descriptor: int, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Writes bytes, one part after the other, however often that takes."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


class FrameReader:
    """Takes frames off a non-blocking pipe, whatever pieces they arrive in.

    A body is read straight into memory, which grows with what has come: an error may hold any text, and a length
    that was announced may be anything.

    Attributes:
        ended: whether nothing more comes.
        refused_bytes: the length of a body for which the machine has no memory, which ends the reading; else 0.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._header = bytearray()
        self._body: bytearray | None = None  # of the frame whose header is complete
        self._length = 0  # of that body
        self._filled = 0
        self.ended = False
        self.refused_bytes = 0

    def read(self, limit_reads: int | None = None) -> list[tuple[bytes, bytearray]]:
        """Reads what is there now, without waiting.

        Args:
            limit_reads: how often to read at most, for a caller that has other things to do.

        Returns:
            The frames (kind, body) that are complete.
        """
        frames: list[tuple[bytes, bytearray]] = []
        reads = 0
        try:
            while not self.ended and reads != limit_reads:
                reads += 1
                self._read_header() if self._body is None else self._read_body(self._body)
                if self._body is not None and self._filled == self._length:
                    frames.append((bytes(self._header[:1]), self._body))
                    self._header, self._body, self._filled = bytearray(), None, 0
        except BlockingIOError:
            pass
        return frames

    def _read_header(self) -> None:
        piece = os.read(self._descriptor, _HEADER_BYTES - len(self._header))
        self.ended = not piece
        self._header += piece
        if len(self._header) == _HEADER_BYTES:
            self._body, self._length = bytearray(), int.from_bytes(self._header[1:], "little")
            if self._length > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
                self._refuse()

    def _refuse(self) -> None:
        self.refused_bytes, self.ended = self._length, True

    def _read_body(self, body: bytearray) -> None:
        if self._filled == len(body):
            try:
                body.extend(bytes(min(self._length - self._filled, _GROWTH_BYTES)))
            except MemoryError:
                self._refuse()
                return
        with memoryview(body) as whole, whole[self._filled :] as rest:
            count = os.readv(self._descriptor, [rest])
        self.ended = count == 0
        self._filled += count

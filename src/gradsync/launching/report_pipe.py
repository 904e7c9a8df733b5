"""The pipe on which a rank reports its end to the supervisor: one frame with a result or an error.

A frame is one kind byte, eight bytes of length (little endian) and the body. `rank_main` writes in the rank,
`rank_process` reads in the launcher. Imported by every rank at start-up, so it imports next to nothing.
"""

from __future__ import annotations

import os

#: The body is the pickled return value.
RESULT = b"R"
#: The body is a marshalled dict of `text`, `summary`, `is_consequence` and `missed_rank`.
ERROR = b"E"

_HEADER_BYTES = 9
_READ_BYTES = 1 << 16  # what a pipe holds


def write_frame(descriptor: int, kind: bytes, body: bytes) -> None:
    """Writes one frame, waiting while the pipe is full.

    Raises:
        OSError: the launcher is gone.
    """
    for part in (kind + len(body).to_bytes(8, "little"), body):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


class FrameReader:
    """Takes frames off a non-blocking pipe, whatever pieces they arrive in."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()
        self.ended = False

    def read(self) -> list[tuple[bytes, bytearray]]:
        """Reads what is there now, without waiting.

        Returns:
            The frames (kind, body) that are complete.
        """
        while not self.ended:
            try:
                piece = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            self.ended = not piece
            self._buffer += piece
        return self._complete_frames()

    def _complete_frames(self) -> list[tuple[bytes, bytearray]]:
        frames = []
        while len(self._buffer) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(self._buffer[1:_HEADER_BYTES], "little")
            if len(self._buffer) < end:
                break
            kind, body = bytes(self._buffer[:1]), self._buffer[_HEADER_BYTES:end]
            del self._buffer[:end]
            frames.append((kind, body))
        return frames

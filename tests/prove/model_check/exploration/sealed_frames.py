"""What a session makes of frames that come in any order, again, altered, or from elsewhere: all there are.

The search over the core lets a frame be lost, repeated or overtaken once. Here a session meets every sequence of frames
that an adversary could put together from those that it has seen, and may take only its own ones, in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from exploration.network import read_frame, session
from gradsync.rendezvous.frames import FrameType
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameError, FrameReader

_GENUINE = 3
_FIRST_SEQUENCE = 2
_CONNECTION, _OTHER_CONNECTION = 1, 2


def frames() -> list[bytes]:
    """The genuine ones, in order; then a reflected one, one of another connection, an altered one, one cut short."""
    own = session(_CONNECTION, is_server=False, sends=_FIRST_SEQUENCE, receives=0)
    genuine = [own.seal(FrameType.SET, f"key {number}", b"value") for number in range(_GENUINE)]
    reflected = session(_CONNECTION, is_server=True, sends=_FIRST_SEQUENCE, receives=0).seal(FrameType.PULSE)
    foreign = session(_OTHER_CONNECTION, is_server=False, sends=_FIRST_SEQUENCE, receives=0)
    altered = genuine[0][:20] + bytes([genuine[0][20] ^ 1]) + genuine[0][21:]
    renumbered = genuine[1][:12] + bytes([_FIRST_SEQUENCE]) + genuine[1][13:]
    return [*genuine, reflected, foreign.seal(FrameType.SET, "key 0", b"value"), altered, renumbered]


def wrongly_taken(length: int) -> Iterator[str]:
    """Returns each sequence of so many frames of which a session takes one that is not its next genuine one."""
    known = frames()
    for order in itertools.product(range(len(known)), repeat=length):
        end = session(_CONNECTION, is_server=True, sends=0, receives=_FIRST_SEQUENCE)
        for place, number in enumerate(order):
            try:
                end.open(read_frame(known[number]))
            except FrameError:
                if number == place < _GENUINE:
                    yield f"{order}: the genuine frame {number} was refused"
                break  # the connection has ended
            if not number == place < _GENUINE:
                yield f"{order}: frame {number} was taken as number {place}"


def wrongly_cut() -> Iterator[str]:
    """Returns each way to cut a stream of two frames into three parts after which they do not come out whole."""
    first, second, *_ = frames()
    stream = first + second
    for one, two in itertools.combinations_with_replacement(range(len(stream) + 1), 2):
        reader = FrameReader()
        reader.limit_bytes = MAX_FRAME_BYTES
        found = []
        for part in (stream[:one], stream[one:two], stream[two:]):
            reader.feed(part)
            while (frame := reader.next_frame()) is not None:
                found.append(frame.raw)
        if found != [first, second]:
            yield f"cut at {one} and {two}: {found}"

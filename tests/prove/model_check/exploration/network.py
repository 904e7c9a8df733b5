"""What lies between ranks and core: nothing, or real frames that an adversary loses, repeats and exchanges.

Without frames a message arrives the moment it is sent. That is enough: a request that arrives late is one that is sent
late; and what a rank does before it has read an answer or a push, the model lets it do after it, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from exploration.world import Wire, World
from gradsync.rendezvous.frames import FrameType, Message
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, Frame, FrameError, FrameReader, Session

TAMPERINGS = ("drop", "repeat", "exchange")


def session(connection: int, *, is_server: bool, sends: int, receives: int) -> Session:
    """Returns one end of a connection's session, with its counters where the wire has them."""
    to_server, to_client = (hashlib.sha256(b"%s %d" % (way, connection)).digest() for way in (b"up", b"down"))
    keys = (to_client, to_server) if is_server else (to_server, to_client)
    made = Session(send_key=keys[0], receive_key=keys[1], is_server=is_server)
    made.send_sequence, made._receive_sequence = sends, receives
    return made


def read_frame(data: bytes) -> Frame:
    """Returns the one frame in these bytes."""
    reader = FrameReader()
    reader.limit_bytes = MAX_FRAME_BYTES
    reader.feed(data)
    frame = reader.next_frame()
    assert frame is not None
    return frame


def send_to_server(world: World, connection: int, message: Message) -> None:
    """Puts a frame of a rank on its wire."""
    end = session(connection, is_server=False, sends=message.sequence, receives=0)
    world.wires[connection].to_server.append(end.seal(message.type, *message.fields))


def send_to_client(world: World, connection: int, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
    """Puts a frame of the server on the wire."""
    wire = world.wires.get(connection)
    if wire is not None:
        end = session(connection, is_server=True, sends=wire.sent_to_client, receives=0)
        wire.to_client.append(end.seal(frame_type, *fields))
        wire.sent_to_client += 1


def take_at_server(world: World, connection: int) -> Message | str:
    """Takes the next frame off the wire; returns its message, or why the connection ends."""
    wire = world.wires[connection]
    data = wire.to_server.pop(0)
    if data is None:
        return "connection closed"
    end = session(connection, is_server=True, sends=0, receives=wire.taken_by_server)
    try:
        message = end.open(read_frame(data))
    except FrameError as error:
        return str(error)
    wire.taken_by_server += 1
    return message


def take_at_client(world: World, connection: int) -> Message | None:
    """Takes the next frame off the wire; returns its message, or None where the connection is of no more use."""
    wire = world.wires[connection]
    data = wire.to_client.pop(0)
    if data is None:
        return None
    end = session(connection, is_server=False, sends=0, receives=wire.taken_by_client)
    try:
        message = end.open(read_frame(data))
    except FrameError:
        return None
    wire.taken_by_client += 1
    return message


def tamperings(wire: Wire) -> list[str]:
    """Returns what can be done to the frames under way, e.g. "drop up"."""
    found = []
    for way, queue in (("up", wire.to_server), ("down", wire.to_client)):
        frames = [frame for frame in queue if frame is not None]
        found += [f"{what} {way}" for what in TAMPERINGS if len(frames) > (what == "exchange")]
    return found


def tamper(wire: Wire, what: str) -> None:
    """Does it."""
    deed, way = what.split()
    _DEEDS[deed](wire.to_server if way == "up" else wire.to_client)


def _exchange(queue: list[bytes | None]) -> None:
    queue[0], queue[1] = queue[1], queue[0]


_DEEDS: dict[str, Callable[[list[bytes | None]], Any]] = {
    "drop": lambda queue: queue.pop(0),
    "repeat": lambda queue: queue.insert(0, queue[0]),
    "exchange": _exchange,
}

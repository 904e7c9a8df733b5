"""Sessions of the rendezvous as its state machines make them, frame by frame, and the two sides as an attacker meets
them: a side takes a stream of bytes, and it is told how much of it was accepted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from gradsync.errors import RendezvousError
from gradsync.rendezvous.frames import THE_WORLD, TO_GENERATION, FrameType
from gradsync.rendezvous.handshake import NONCE_BYTES, RANDOM_BYTES, ClientHandshake, ServerHandshake
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, Frame, FrameReader, Session

_SECRET_BYTES = 32


@dataclass(frozen=True)
class Side:
    """One side of a connection, with the randomness that it drew.

    Attributes:
        secret, run_id: of its run; a client learns the run id.
        nonce: its own.
        is_server: which side.
        generation: for which the client comes; a server learns it.
    """

    secret: bytes
    run_id: str
    nonce: bytes
    is_server: bool
    generation: int = 0

    def take(self, stream: bytes) -> tuple[int, RendezvousError | None]:
        """Reads a stream from its first byte, as the connections do.

        Returns:
            How many bytes lie before the end of the last frame that was accepted (the one that completed the
            handshake, and each that came out of `Session.open`), and what ended the reading.
        """
        reader = FrameReader()
        reader.feed(stream)
        taken_bytes = accepted_bytes = 0
        handshake, session = self._handshake(), None
        try:
            while (frame := reader.next_frame()) is not None:
                taken_bytes += len(frame.raw)
                if session is not None:
                    session.open(frame)
                elif (session := _session_after(handshake, frame)) is not None:
                    reader.limit_bytes = MAX_FRAME_BYTES
                else:
                    continue
                accepted_bytes = taken_bytes
        except RendezvousError as error:
            return accepted_bytes, error
        return accepted_bytes, None

    def answer_to(self, hello: bytes) -> bytes:
        """Returns what a server answers to a HELLO."""
        challenge = ServerHandshake(self.secret, self.run_id, self.nonce).receive(_frame_of(hello))
        assert isinstance(challenge, bytes)
        return challenge

    def _handshake(self) -> ServerHandshake | ClientHandshake:
        if self.is_server:
            return ServerHandshake(self.secret, self.run_id, self.nonce)
        return ClientHandshake(self.secret, self.nonce, self.generation)


@dataclass(frozen=True)
class Direction:
    """What one side of a recorded session was sent.

    Attributes:
        receiver: that side.
        frames: the frames, whole; those of the handshake first.
    """

    receiver: Side
    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Recorded:
    """A session between a client and a server."""

    to_server: Direction
    to_client: Direction

    def direction(self, *, is_to_server: bool) -> Direction:
        """Returns one of its directions."""
        return self.to_server if is_to_server else self.to_client


def record(secret: bytes, run_id: str, generation: int, rng: random.Random) -> Recorded:
    """Runs a handshake and sends messages of every kind both ways."""
    client_side = Side(secret, run_id, rng.randbytes(RANDOM_BYTES), is_server=False, generation=generation)
    server_side = Side(secret, run_id, rng.randbytes(NONCE_BYTES), is_server=True)
    client = ClientHandshake(secret, client_side.nonce, generation)
    server = ServerHandshake(secret, run_id, server_side.nonce)
    hello = client.hello()
    challenge = server.receive(_frame_of(hello))
    assert isinstance(challenge, bytes)
    proof, of_client = client.receive(_frame_of(challenge))
    of_server = server.receive(_frame_of(proof))
    assert isinstance(of_server, Session)
    requests = [of_client.seal(kind, *fields) for kind, *fields in _requests(generation, rng)]
    answers = [of_server.seal(kind, *fields) for kind, *fields in _answers(generation, rng)]
    return Recorded(
        Direction(server_side, (hello, proof, *requests)),
        Direction(client_side, (challenge, *answers)),
    )


def record_runs(rng: random.Random) -> list[Recorded]:
    """Records two generations of two runs that share a secret, and of one with another secret."""
    secrets = [rng.randbytes(_SECRET_BYTES) for _ in range(2)]
    runs = [(secrets[0], "one"), (secrets[0], "two"), (secrets[1], "one")]
    return [record(secret, run_id, generation, rng) for secret, run_id in runs for generation in (1, 2)]


def _session_after(handshake: ServerHandshake | ClientHandshake, frame: Frame) -> Session | None:
    """Returns the session that a frame of the handshake begins; None where another frame is due."""
    step = handshake.receive(frame)
    if isinstance(step, tuple):
        return step[1]
    return step if isinstance(step, Session) else None


def _frame_of(data: bytes) -> Frame:
    reader = FrameReader()
    reader.feed(data)
    frame = reader.next_frame()
    assert frame is not None
    return frame


def _requests(generation: int, rng: random.Random) -> list[tuple[Any, ...]]:
    """What a rank sends from joining to leaving; the same message twice, so that only its place tells them apart."""
    delete = (FrameType.DELETE, "steps")
    return [
        (FrameType.JOIN, 0, 2, generation, "machine", "host", 4200, None),
        (FrameType.SET, "key", rng.randbytes(rng.randrange(100)), True),
        (FrameType.EXCHANGE, "begin", None, b""),
        delete,
        delete,
        (FrameType.HEARTBEAT, {"world": rng.randrange(1000)}),
        (FrameType.AGREE, "world", 7, rng.randrange(2**64), None),
        (FrameType.LEAVE, THE_WORLD, None, 0),
    ]


def _answers(generation: int, rng: random.Random) -> list[tuple[Any, ...]]:
    return [
        (FrameType.PULSE,),
        (FrameType.REPLY, 2, (generation,)),
        (FrameType.REPLY, 4, None),
        (FrameType.PULSE,),
        (FrameType.PULSE,),
        (FrameType.REPLY, 5, rng.randbytes(8)),
        (FrameType.REPLY, 9, (0, 7)),
        (FrameType.FAILED, TO_GENERATION, 0, 1, "barrier", [], "rank 1/2 died"),
    ]

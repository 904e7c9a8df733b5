"""What an attacker who sees and alters everything on the wire, and has recorded earlier runs, can send to one side."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from recorded_sessions import Direction, Recorded, Side

from gradsync.rendezvous.handshake import NONCE_BYTES
from gradsync.rendezvous.wire import MAC_BYTES

_LENGTH_BYTES = 4
_SEQUENCE = slice(5, 13)  # in a frame; `wire` has the layout
_BODY_AT = 13


class Scene(NamedTuple):
    """Where an attack takes place.

    Attributes:
        rng: for all choices.
        own: the direction under attack: its receiver, and what its peer has really sent.
        back: the other direction of the same session.
        earlier: the same direction of another connection: of another generation, another run or another secret.
    """

    rng: random.Random
    own: Direction
    back: Direction
    earlier: Direction


class Attack(NamedTuple):
    """What is sent to whom; what its peer has really sent is `genuine`."""

    victim: Side
    stream: bytes
    genuine: bytes


def scene_of(rng: random.Random, runs: list[Recorded]) -> Scene:
    """Draws a session, a direction, and another session to take frames from."""
    session, other = rng.sample(runs, 2)
    is_to_server = rng.random() < 0.5
    own, back = (session.direction(is_to_server=way) for way in (is_to_server, not is_to_server))
    return Scene(rng, own, back, other.direction(is_to_server=is_to_server))


def _on_own_session(mutate: Callable[[Scene, list[bytes]], list[bytes]]) -> Callable[[Scene], Attack]:
    """An attack on a session while it goes on: its receiver gets an altered list of frames."""

    def attack(scene: Scene) -> Attack:
        frames = list(scene.own.frames)
        genuine = b"".join(frames)
        return Attack(scene.own.receiver, b"".join(mutate(scene, frames)), genuine)

    return attack


def flip_bits(scene: Scene, frames: list[bytes]) -> list[bytes]:
    data = bytearray(b"".join(frames))
    for _ in range(scene.rng.randint(1, 3)):
        data[scene.rng.randrange(len(data))] ^= 1 << scene.rng.randrange(8)
    return [bytes(data)]


def cut_and_go_on(scene: Scene, frames: list[bytes]) -> list[bytes]:
    at = scene.rng.randrange(len(frames))
    kept = frames[at][: scene.rng.randrange(len(frames[at]))]
    return [*frames[:at], kept, *frames[at + scene.rng.randint(0, 1) :]]


def splice_another_connection(scene: Scene, frames: list[bytes]) -> list[bytes]:
    at = scene.rng.randrange(len(frames))
    return frames[:at] + list(scene.earlier.frames[at:])


def insert_from_another_connection(scene: Scene, frames: list[bytes]) -> list[bytes]:
    at = scene.rng.randrange(len(frames))
    return [*frames[:at], scene.rng.choice(scene.earlier.frames), *frames[at:]]


def repeat_a_frame(scene: Scene, frames: list[bytes]) -> list[bytes]:
    source = scene.rng.randrange(len(frames))
    at = scene.rng.randrange(source + 1, len(frames) + 1)
    return [*frames[:at], frames[source], *frames[at:]]


def reorder(scene: Scene, frames: list[bytes]) -> list[bytes]:
    first, second = scene.rng.sample(range(len(frames)), 2)
    frames[first], frames[second] = frames[second], frames[first]
    return frames


def drop_a_frame(scene: Scene, frames: list[bytes]) -> list[bytes]:
    del frames[scene.rng.randrange(len(frames) - 1)]
    return frames


def reflect(scene: Scene, frames: list[bytes]) -> list[bytes]:
    """The victim's own frames come back to it."""
    at = scene.rng.randrange(len(frames))
    return [*frames[:at], scene.rng.choice(scene.back.frames), *frames[at:]]


def reflect_in_place(scene: Scene, frames: list[bytes]) -> list[bytes]:
    """The same, with the sequence that is due."""
    at = scene.rng.randrange(len(frames))
    frames[at] = _with_sequence(scene.rng.choice(scene.back.frames), frames[at])
    return frames


def reflect_a_mac(scene: Scene, frames: list[bytes]) -> list[bytes]:
    """A frame with the MAC of another one, such as a proof that is the other side's."""
    at = scene.rng.randrange(len(frames))
    source = scene.rng.choice((*scene.back.frames, *scene.earlier.frames, *scene.own.frames))
    frames[at] = frames[at][:-MAC_BYTES] + source[-MAC_BYTES:]
    return frames


def renumber(scene: Scene, frames: list[bytes]) -> list[bytes]:
    """An old frame with the sequence that is due."""
    at = scene.rng.randrange(len(frames))
    frames[at] = _with_sequence(scene.rng.choice(scene.own.frames), frames[at])
    return frames


def lie_about_length(scene: Scene, frames: list[bytes]) -> list[bytes]:
    at = scene.rng.randrange(len(frames))
    frame = frames[at]
    length = scene.rng.choice((0, 1, len(frame) - 5, len(frame) - 3, 508, 509, 65532, 65533, 2**31, 2**32 - 1))
    padding = scene.rng.randbytes(scene.rng.choice((0, 1, 600)))
    frames[at] = length.to_bytes(_LENGTH_BYTES, "big") + frame[_LENGTH_BYTES:] + padding
    return frames


def forge_a_body(scene: Scene, frames: list[bytes]) -> list[bytes]:
    """Another body of the same length under the frame's own header and MAC."""
    at = scene.rng.randrange(len(frames))
    frame = frames[at]
    body_bytes = len(frame) - _BODY_AT - MAC_BYTES
    frames[at] = frame[:_BODY_AT] + scene.rng.randbytes(body_bytes) + frame[-MAC_BYTES:]
    return frames


def send_the_wrong_direction(scene: Scene, _: list[bytes]) -> list[bytes]:
    return list(scene.back.frames)


def swap_nonces(scene: Scene, frames: list[bytes]) -> list[bytes]:
    """The first frame of another connection, then this one's: the proofs cover both nonces."""
    return [scene.earlier.frames[0], *frames[1:]]


def replay_to_a_fresh_connection(scene: Scene) -> Attack:
    fresh = replace(scene.own.receiver, nonce=scene.rng.randbytes(len(scene.own.receiver.nonce)))
    return Attack(fresh, b"".join(scene.own.frames), b"")


def replay_to_another_connection(scene: Scene) -> Attack:
    genuine = b"".join(scene.own.frames)
    return Attack(scene.own.receiver, b"".join(scene.earlier.frames), genuine)


def replay_to_another_secret(scene: Scene) -> Attack:
    other = replace(scene.own.receiver, secret=scene.rng.randbytes(32))
    return Attack(other, b"".join(scene.own.frames), b"")


def replay_to_another_run(scene: Scene) -> Attack:
    """Even with the same nonce, which no two connections share; a client knows no run id before it is told one."""
    if scene.own.receiver.is_server:
        other = replace(scene.own.receiver, run_id="other")
        return Attack(other, b"".join(scene.own.frames), b"")
    frames = list(scene.own.frames)
    run_id = scene.own.receiver.run_id.encode()
    frames[0] = frames[0][: -MAC_BYTES - len(run_id)] + run_id[::-1] + frames[0][-MAC_BYTES:]
    return Attack(scene.own.receiver, b"".join(frames), b"".join(scene.own.frames))


def prove_by_reflection(scene: Scene) -> Attack:
    """A stranger says HELLO to the server, and sends the proof in its answer back as its own."""
    server = scene.own.receiver if scene.own.receiver.is_server else scene.back.receiver
    hello, proof, *_ = scene.own.frames if scene.own.receiver.is_server else scene.back.frames
    hello = hello[: -MAC_BYTES - NONCE_BYTES] + scene.rng.randbytes(NONCE_BYTES) + hello[-MAC_BYTES:]
    challenge = server.answer_to(hello)
    return Attack(server, hello + proof[:-MAC_BYTES] + challenge[-MAC_BYTES:], b"")


ATTACKS: dict[str, Callable[[Scene], Attack]] = {
    "bits flipped": _on_own_session(flip_bits),
    "cut, then going on": _on_own_session(cut_and_go_on),
    "spliced with another connection": _on_own_session(splice_another_connection),
    "frame of another connection": _on_own_session(insert_from_another_connection),
    "frame repeated": _on_own_session(repeat_a_frame),
    "frames reordered": _on_own_session(reorder),
    "frame dropped": _on_own_session(drop_a_frame),
    "frame reflected": _on_own_session(reflect),
    "frame reflected, renumbered": _on_own_session(reflect_in_place),
    "MAC of another frame": _on_own_session(reflect_a_mac),
    "frame repeated, renumbered": _on_own_session(renumber),
    "length altered": _on_own_session(lie_about_length),
    "body forged": _on_own_session(forge_a_body),
    "directions swapped": _on_own_session(send_the_wrong_direction),
    "nonce of another connection": _on_own_session(swap_nonces),
    "proof reflected": prove_by_reflection,
    "replayed to a fresh connection": replay_to_a_fresh_connection,
    "replayed to another connection": replay_to_another_connection,
    "replayed to another secret": replay_to_another_secret,
    "replayed to another run": replay_to_another_run,
}


def _with_sequence(frame: bytes, like: bytes) -> bytes:
    return frame[: _SEQUENCE.start] + like[_SEQUENCE] + frame[_SEQUENCE.stop :]

"""No mutated or replayed transcript is accepted; and the check would tell, as weakened protocols show."""

from __future__ import annotations

import hmac
import random
from collections.abc import Callable

import pytest
import recorded_sessions
import transcripts

from gradsync.rendezvous import handshake, wire
from gradsync.rendezvous.wire import Frame, Session

COUNT = 100_000
COUNT_OF_WEAK = 4_000
SEED = 8
_HEADER_BYTES = 13


def accepted(count: int) -> dict[str, int]:
    tallies = transcripts.run(count, SEED)
    assert sum(tally.sent for tally in tallies.values()) == count
    return {name: tally.deceived for name, tally in tallies.items() if tally.deceived}


def test_no_mutated_transcript_is_accepted() -> None:
    assert accepted(COUNT) == {}


def accept_every_mac(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hmac, "compare_digest", lambda *_: True)


def compare_only_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """Half a byte of each MAC is looked at."""
    patch.setattr(hmac, "compare_digest", lambda one, other: one[0] >> 4 == other[0] >> 4)


def ignore_sequences(patch: pytest.MonkeyPatch) -> None:
    checked = Session.open

    def unchecked(self: Session, frame: Frame) -> object:
        self._receive_sequence = frame.sequence
        return checked(self, frame)

    patch.setattr(Session, "open", unchecked)


def sign_without_sequences(patch: pytest.MonkeyPatch) -> None:
    """The MAC of a frame leaves its number out, so that an old one can be renumbered."""
    whole = wire.sign
    patch.setattr(wire, "sign", lambda mac, data: whole(mac, data[:5] + data[13:]))


def sign_only_headers(patch: pytest.MonkeyPatch) -> None:
    whole = wire.sign
    patch.setattr(wire, "sign", lambda mac, data: whole(mac, data[:13]))


def prove_without_labels(patch: pytest.MonkeyPatch) -> None:
    """Both proofs become one: of what both have seen before them, without saying whose it is."""
    whole = handshake._sign

    def without(secret: bytes, label: bytes, transcript: bytes) -> bytes:
        if label == handshake._CLIENT_PROOF:
            label, transcript = handshake._SERVER_PROOF, transcript[:-_HEADER_BYTES]
        return whole(secret, label, transcript)

    patch.setattr(handshake, "_sign", without)


def use_one_key_for_both_directions(patch: pytest.MonkeyPatch) -> None:
    """And take what only the other side may send: either of the two would do."""
    patch.setattr(handshake, "_CLIENT_TO_SERVER", handshake._SERVER_TO_CLIENT)
    both = {**wire._FROM_CLIENTS, **wire._FROM_SERVER}
    patch.setattr(wire, "_FROM_CLIENTS", both)
    patch.setattr(wire, "_FROM_SERVER", both)


def use_one_nonce_for_all_connections(patch: pytest.MonkeyPatch) -> None:
    """What a client sent once opens the server's door again."""
    whole = handshake.ServerHandshake.__init__
    patch.setattr(
        handshake.ServerHandshake, "__init__", lambda self, secret, run_id, *_: whole(self, secret, run_id, bytes(32))
    )


def make_keys_of_the_secret_alone(patch: pytest.MonkeyPatch) -> None:
    """The keys of all connections of a run are the same: what one generation sent holds in the next."""
    whole = handshake._sign

    def without(secret: bytes, label: bytes, transcript: bytes) -> bytes:
        is_key = label in (handshake._CLIENT_TO_SERVER, handshake._SERVER_TO_CLIENT)
        return whole(secret, label, b"" if is_key else transcript)

    patch.setattr(handshake, "_sign", without)


def leave_the_run_id_out(patch: pytest.MonkeyPatch) -> None:
    whole = handshake._sign

    def without(secret: bytes, label: bytes, transcript: bytes) -> bytes:
        for run_id in (b"one", b"two", b"eno", b"owt", b"other"):
            transcript = transcript.replace(run_id, b"")
        return whole(secret, label, transcript)

    patch.setattr(handshake, "_sign", without)


WEAKENED = [
    accept_every_mac,
    compare_only_the_beginning,
    ignore_sequences,
    sign_without_sequences,
    sign_only_headers,
    prove_without_labels,
    use_one_key_for_both_directions,
    use_one_nonce_for_all_connections,
    make_keys_of_the_secret_alone,
    leave_the_run_id_out,
]


@pytest.mark.parametrize("weaken", WEAKENED)
def test_a_weakened_protocol_is_found_out(weaken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        weaken(patch)
        assert accepted(COUNT_OF_WEAK)


def test_what_one_generation_sent_is_not_taken_in_the_next() -> None:
    """A connection joins one generation, and its keys are its own: any frame of another one fails its MAC."""
    rng = random.Random(SEED)
    earlier, later = (recorded_sessions.record(b"s" * 32, "run", generation, rng) for generation in (1, 2))
    for old, new in ((earlier.to_server, later.to_server), (earlier.to_client, later.to_client)):
        first_message = 2 if new.receiver.is_server else 1
        genuine = b"".join(new.frames[:first_message])
        for frame in old.frames:
            accepted_bytes, error = new.receiver.take(genuine + frame)
            assert accepted_bytes == len(genuine)
            assert isinstance(error, wire.FrameError)

"""Times a rendezvous message from fields to bytes and back: msgpack, MAC, framing and checks."""

import pytest

from gradsync.rendezvous.frames import MAX_VALUE_BYTES, FrameType
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameReader, Session

UP, DOWN = bytes(32), bytes(range(32))


@pytest.fixture
def sessions():
    client = Session(send_key=UP, receive_key=DOWN, send_sequence=0, receive_sequence=0, is_server=False)
    server = Session(send_key=DOWN, receive_key=UP, send_sequence=0, receive_sequence=0, is_server=True)
    return client, server


@pytest.mark.parametrize("value_bytes", [128, MAX_VALUE_BYTES])
def test_seal_and_open_a_value(benchmark, sessions, value_bytes):
    client, server = sessions
    reader = FrameReader()
    reader.limit_bytes = MAX_FRAME_BYTES
    value = bytes(value_bytes)

    def round_trip():
        reader.feed(client.seal(FrameType.SET, "group/world", value, True))
        return server.open(reader.next_frame())

    message = benchmark(round_trip)
    assert message.type is FrameType.SET
    assert message.fields[1] == value

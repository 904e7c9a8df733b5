import os
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.launching.in_rank import result as report_pipe
from gradsync.launching.rank_report import FrameReader


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)


@settings(deadline=None, max_examples=50)
@given(
    bodies=st.lists(st.binary(max_size=300), max_size=6),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    limit=st.sampled_from([None, 1, 3]),
)
def test_frames_arrive_whole_whatever_the_pieces(bodies, cuts, limit):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    frames = FrameReader(reader)
    stream = b"".join(report_pipe.RESULT + len(body).to_bytes(8, "little") + body for body in bodies)
    received, piece = [], 0
    while stream:
        cut = cuts[piece % len(cuts)]
        piece += 1
        os.write(writer, stream[:cut])
        stream = stream[cut:]
        received += frames.read(limit)
    os.close(writer)
    while not frames.ended:
        received += frames.read(limit)
    os.close(reader)
    assert received == [(report_pipe.RESULT, bytearray(body)) for body in bodies]


def test_body_larger_than_the_pipe(pipe):
    reader, writer = pipe
    body = os.urandom(5 << 20)

    def write():
        report_pipe.write_frame(writer, report_pipe.ERROR, body)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    frames = FrameReader(reader)
    received = []
    while not frames.ended:
        received += frames.read()
    thread.join()
    assert received == [(report_pipe.ERROR, bytearray(body))]


def test_frame_cut_off_by_a_death_is_dropped(pipe):
    reader, writer = pipe
    os.write(writer, report_pipe.RESULT + (100).to_bytes(8, "little") + b"half")
    os.close(writer)
    frames = FrameReader(reader)
    assert frames.read() == []
    assert frames.ended


def test_memory_is_taken_for_what_has_come_and_not_for_what_was_announced(pipe):
    reader, writer = pipe
    os.write(writer, report_pipe.RESULT + (2**30).to_bytes(8, "little") + b"body")
    frames = FrameReader(reader)
    tracemalloc.start()
    try:
        assert frames.read() == []
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert not frames.ended
    os.close(writer)


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 2**60])
def test_a_length_beyond_all_memory_ends_the_reading(pipe, length):
    reader, writer = pipe
    os.write(writer, report_pipe.RESULT + length.to_bytes(8, "little") + b"body")
    frames = FrameReader(reader)
    assert frames.read() == []
    assert (frames.ended, frames.refused_bytes) == (True, length)
    os.close(writer)

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.launching.output import MAX_LINE_BYTES, RANK_COLOURS, LineCutter, Tail, begin_lines_with

# Bytes in which line ends, and characters of several bytes, whole and cut, are frequent.
CHUNKS = st.lists(
    st.lists(
        st.sampled_from(
            [b"a", b"bc", b"\n", b"\r", b"\r\n", "é".encode(), b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"\xff"]
        )
    )
    .map(b"".join)
    .filter(bool)
)


def lines_of(data):
    return re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", data)


@given(CHUNKS)
def test_whole_lines_whatever_the_chunks(chunks):
    cutter = LineCutter()
    pieces = [cutter.feed(chunk) for chunk in chunks]
    rest = cutter.take_rest()
    assert b"".join(pieces) + rest == b"".join(chunks)
    assert all(piece.endswith((b"\n", b"\r")) for piece in pieces if piece)
    # \r\n is never cut, so cutting the pieces gives the lines of the whole.
    assert [line for piece in [*pieces, rest] for line in lines_of(piece)] == lines_of(b"".join(chunks))


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_return_goes_with_the_state_of_a_progress_bar_that_follows(cut):
    cutter = LineCutter()
    assert [cutter.feed(b"\r 10%\r"[:cut]), cutter.feed(b"\r 10%\r"[cut:])] == [b"", b""]
    assert cutter.feed(b" 20%") == b"\r 10%\r"
    assert cutter.take_rest() == b" 20%"


@given(CHUNKS)
def test_every_line_that_has_begun_has_a_prefix(chunks):
    data = b"".join(chunks)
    begun = data[len(re.match(rb"(?:\r(?!\n))*", data)[0]) :]
    assert begin_lines_with(b"[\\1] ", data) == b"".join(map(prefixed, lines_of(begun)))
    assert begin_lines_with(b"", data) == data


@given(CHUNKS)
def test_a_line_that_is_continued_has_its_prefix_already(chunks):
    data = b"".join(chunks)
    first, *others = lines_of(data) or [b""]
    assert begin_lines_with(b"[\\1] ", data, is_inside_line=True) == first + b"".join(map(prefixed, others))


def prefixed(line):
    return line if line == b"\r" else b"[\\1] " + line


@given(CHUNKS)
def test_no_character_is_cut_in_two(chunks):
    cutter = LineCutter()
    taken = b""
    for chunk in chunks:
        taken += cutter.feed(chunk) + cutter.take_characters()
        left = b"".join(chunks)[len(taken) :]
        # A cut inside a character would make both sides invalid there.
        assert taken.decode("utf-8", "surrogateescape") + left.decode("utf-8", "surrogateescape") == b"".join(
            chunks
        ).decode("utf-8", "surrogateescape")
    assert taken + cutter.take_rest() == b"".join(chunks)


def test_endless_line_passes_in_pieces():
    cutter = LineCutter()
    pieces = [cutter.feed(b"x" * 65536) for _ in range(64)]
    assert sum(map(len, pieces)) + len(cutter.take_rest()) == 64 * 65536
    assert max(map(len, pieces)) <= MAX_LINE_BYTES + 65536


@given(CHUNKS, st.integers(1, 4))
def test_tail_is_the_last_lines_as_a_terminal_shows_them(chunks, size):
    tail = Tail(size)
    for chunk in chunks:
        tail.feed("stdout", chunk)
    lines = b"".join(chunks).split(b"\n")
    if not lines[-1]:
        lines.pop()
    shown = [line.rstrip(b"\r").split(b"\r")[-1].decode("utf-8", "replace") for line in lines]
    assert tail.lines() == shown[-size:]


def test_tail_has_both_streams_in_order_of_arrival():
    tail = Tail(20)
    for stream, chunk in [("out", b"1\n2 "), ("err", b"3\n4 "), ("out", b"2\n"), ("err", b"4")]:
        tail.feed(stream, chunk)
    assert tail.lines() == ["1", "3", "2 2", "4 4"]
    assert Tail(0).lines() == []


def test_tail_of_an_endless_line_is_short():
    tail = Tail(3)
    for _ in range(100):
        tail.feed("out", b"x" * 65536)
    assert len(tail.lines()[0]) == 4096


def luminance(number):
    """Relative luminance, by the formula of WCAG, of one of the 216 colours of the cube."""
    levels = (0, 95, 135, 175, 215, 255)
    channels = [levels[(number - 16) // step % 6] / 255 for step in (36, 6, 1)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("number", RANK_COLOURS)
def test_colours_are_readable_on_black_and_on_white(number):
    assert (luminance(number) + 0.05) / 0.05 >= 4
    assert 1.05 / (luminance(number) + 0.05) >= 4


def test_neighbouring_ranks_differ_in_colour():
    assert len(set(RANK_COLOURS)) == len(RANK_COLOURS) == 8

"""The last lines of a rank, as the report of a failure shows them, and the colours of the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.launching.output import RANK_COLOURS, RankOutput

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


@given(CHUNKS)
def test_tail_is_the_last_lines_as_a_terminal_shows_them(chunks):
    output = RankOutput(None)
    for chunk in chunks:
        assert output.add(chunk) is None
    lines = b"".join(chunks).split(b"\n")
    if not lines[-1]:
        lines.pop()
    assert output.last_lines() == [line.rstrip(b"\r").split(b"\r")[-1].decode("utf-8", "replace") for line in lines]


def test_tail_of_an_endless_line_is_short():
    output = RankOutput(None)
    for _ in range(100):
        output.add(b"x" * 65536)
    assert len(output.last_lines()[0]) == 16384


@pytest.mark.parametrize("separator", ["\n", ""])
@pytest.mark.parametrize("extra", range(3))
def test_the_tail_begins_with_a_whole_line_or_at_least_a_whole_character(separator, extra):
    output = RankOutput(None)
    line = "\N{EURO SIGN}" * 100
    output.add((f"{line}{separator}" * 1000 + "x" * extra).encode())
    first = output.last_lines()[0]
    assert first == line if separator else set(first) <= {"\N{EURO SIGN}", "x"}


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

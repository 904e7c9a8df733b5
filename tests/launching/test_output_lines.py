"""The last lines of a rank, as the report of a failure shows them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.launching.output import RankOutput

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

"""Live text takes its own place on a terminal, and shows nothing elsewhere."""

import fcntl
import io
import os
import struct
import termios

import pytest

from gradsync.bench.live_text import LiveText


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 4, 10, 0, 0))
    with os.fdopen(master, "rb", buffering=0) as reader, os.fdopen(slave, "w") as writer:
        yield reader, writer


def assert_shown(reader, expected):
    """What is written to a terminal comes out of it in pieces, and a moment later."""
    shown = b""
    while len(shown) < len(expected):
        shown += reader.read(1000)
    assert shown == expected


def test_the_next_text_takes_the_place_of_the_last(terminal):
    reader, writer = terminal
    live = LiveText(writer)
    live.show("one\ntwo")
    live.show("three")
    live.clear()
    live.clear()
    assert_shown(reader, b"one\r\ntwo\r\n\x1b[2A\x1b[Jthree\r\n\x1b[1A\x1b[J")


def test_what_does_not_fit_is_left_out(terminal):
    reader, writer = terminal
    LiveText(writer).show("0123456789\n1\n2\n3\n4")
    assert_shown(reader, b"012345678\r\n1\r\n2\r\n")


def test_a_terminal_that_cannot_go_up_gets_nothing(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not LiveText(terminal[1]).shows


def test_elsewhere_nothing_is_shown():
    stream = io.StringIO()
    live = LiveText(stream)
    live.show("text")
    live.clear()
    assert (stream.getvalue(), live.shows) == ("", False)
    LiveText(None).show("text")

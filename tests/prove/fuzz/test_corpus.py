"""What fuzzing has found is refused in typed errors, and takes little memory; `run.py` finds more."""

from __future__ import annotations

import random
import socket
import tracemalloc

import pytest
import run
import targets
from seeds import seeds

from gradsync.rendezvous import wire

_MOST_BYTES, _MOST_BYTES_PER_BYTE = 2 * 2**20, 200
_MUTATIONS = 150


def inputs_of(name: str) -> list[bytes]:
    return seeds()[name] + [file.read_bytes() for file in run.files_of(name)]


@pytest.mark.parametrize("name", targets.TARGETS)
def test_nothing_but_typed_errors_comes_out(name: str) -> None:
    known, rng = inputs_of(name), random.Random(name)
    assert run.files_of(name), "no corpus: run `python tests/prove/fuzz/run.py`"
    for data in known + [run.mutate(rng, known) for _ in range(_MUTATIONS)]:
        targets.TARGETS[name](data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_no_input_takes_much_memory(name: str) -> None:
    for data in inputs_of(name):
        assert peak_bytes(name, data) <= _MOST_BYTES + _MOST_BYTES_PER_BYTE * len(data), data


def peak_bytes(name: str, data: bytes) -> int:
    tracemalloc.start()  # counts what is allocated from here on only
    try:
        targets.TARGETS[name](data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_corpus_and_targets_are_the_same() -> None:
    assert sorted(folder.name for folder in run.CORPUS.iterdir()) == sorted(targets.TARGETS)
    assert seeds().keys() == targets.TARGETS.keys()


def test_an_untyped_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "look_up", socket.getaddrinfo)  # which raises UnicodeError
    with pytest.raises(UnicodeError):
        for data in inputs_of("addresses"):
            targets.addresses(data)


def test_a_length_that_is_believed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that makes room for what the peer announces."""
    whole = wire.FrameReader.next_frame

    def believing(self: wire.FrameReader) -> wire.Frame | None:
        bytearray(min(int.from_bytes(self._buffer[:4], "big"), 2**27))
        return whole(self)

    monkeypatch.setattr(wire.FrameReader, "next_frame", believing)
    assert max(peak_bytes("frames", data) for data in inputs_of("frames")) > _MOST_BYTES + 200 * 4096


def test_a_stranger_who_is_let_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    monkeypatch.setattr(hmac, "compare_digest", lambda *_: True)
    with pytest.raises(AssertionError, match="a stranger has proved"):
        for data in inputs_of("server_handshake"):
            targets.server_handshake(data)

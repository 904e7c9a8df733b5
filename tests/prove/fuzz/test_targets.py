"""Bytes from outside, altered at random, are refused in typed errors, and take little memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import targets
from seeds import seeds

_MOST_BYTES, _MOST_BYTES_PER_BYTE = 2 * 2**20, 200
_MUTATIONS = 2000


def mutate(rng: random.Random, known: list[bytes]) -> bytes:
    """Returns one of the known inputs with some bytes altered, left out, repeated, or taken from another one."""
    data = bytearray(rng.choice(known))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 8))
        other = rng.choice(known)
        start = rng.randrange(len(other) + 1)
        pieces = (rng.randbytes(end - at), b"", bytes(data[at:end]) * 2, other[start : start + rng.randint(1, 30)])
        data[at:end] = rng.choice((*pieces, b"\xff" * (end - at)))
    return bytes(data[:4096])


@pytest.mark.parametrize("name", targets.TARGETS)
def test_nothing_but_typed_errors_comes_out(name: str) -> None:
    known, rng = seeds()[name], random.Random(name)
    for data in known + [mutate(rng, known) for _ in range(_MUTATIONS)]:
        targets.TARGETS[name](data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_no_input_takes_much_memory(name: str) -> None:
    known, rng = seeds()[name], random.Random(name)
    for data in known + [mutate(rng, known) for _ in range(20)]:
        tracemalloc.start()  # counts what is allocated from here on only
        try:
            targets.TARGETS[name](data)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes <= _MOST_BYTES + _MOST_BYTES_PER_BYTE * len(data), data

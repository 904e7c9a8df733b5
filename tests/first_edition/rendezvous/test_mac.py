"""The MAC that is prepared once is the one of the standard library."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.rendezvous.mac import Mac


@given(key=st.binary(max_size=64), data=st.lists(st.binary(max_size=300), min_size=1, max_size=3))
def test_it_is_hmac_sha256_for_every_frame(key: bytes, data: list[bytes]) -> None:
    mac = Mac(key)
    assert [mac.sign(frame) for frame in data] == [hmac.digest(key, frame, "sha256") for frame in data]


def test_a_known_answer() -> None:
    """Source: RFC 4231, test case 2."""
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert Mac(b"Jefe").sign(b"what do ya want for nothing?").hex() == expected


def test_a_long_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes, got 65"):
        Mac(bytes(65))

"""The files that make the rendezvous TLS: what is wrong with one is told before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Authority, environment
from cryptography.hazmat.primitives import serialization
from rendezvous_ranks import SECRET

from gradsync.environment import TLS_CA, TLS_CERTIFICATE, TLS_KEY
from gradsync.errors import InvalidArgument
from gradsync.rendezvous.server import RendezvousServer


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def test_files_that_do_not_fit(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.certificate(), authority.certificate()
    text = tmp_path / "text"
    text.write_text("no certificate\n")
    key_alone = {TLS_CERTIFICATE: good[TLS_KEY], TLS_KEY: good[TLS_KEY]}
    for variables, said in [
        ({TLS_CERTIFICATE: good[TLS_CERTIFICATE]}, f"{TLS_CERTIFICATE} is set, but {TLS_KEY} is not"),
        ({TLS_KEY: good[TLS_KEY]}, f"{TLS_KEY} is set, but {TLS_CERTIFICATE} is not"),
        (authority.trusted, f"needs a certificate of its own: set {TLS_CERTIFICATE} and {TLS_KEY}"),
        (good | {TLS_KEY: "missing.pem"}, f"{TLS_KEY}='missing.pem' cannot be opened: No such file"),
        (good | {TLS_CERTIFICATE: "missing.pem"}, f"{TLS_CERTIFICATE}='missing.pem' cannot be opened"),
        (good | {TLS_CA: "missing.pem"}, f"{TLS_CA}='missing.pem' cannot be opened"),
        (good | {TLS_CA: str(text)}, f"{TLS_CA}={str(text)!r} needs to hold certificates in PEM"),
        (good | {TLS_KEY: other[TLS_KEY]}, "is not the key of the certificate"),
        (good | {TLS_CERTIFICATE: str(text)}, "need to hold a certificate and its key in PEM"),
        (key_alone, "need to hold a certificate and its key in PEM"),
        (good | {TLS_CA: str(tmp_path)}, "cannot be opened: Is a directory"),
    ]:
        with environment(variables), pytest.raises(InvalidArgument) as caught:
            RendezvousServer(1, secret=SECRET)
        assert said in str(caught.value)


def test_encrypted_key_is_not_asked_for(authority: Authority, tmp_path: Path) -> None:
    good = authority.certificate()
    key = serialization.load_pem_private_key(Path(good[TLS_KEY]).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"password")))
    with environment(good | {TLS_KEY: str(locked)}), pytest.raises(InvalidArgument, match="is encrypted"):
        RendezvousServer(1, secret=SECRET)

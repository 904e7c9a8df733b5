"""Certificates for the tests of TLS, made on the spot, and the environment that names them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from gradsync.environment import TLS_CA, TLS_CERTIFICATE, TLS_KEY

_LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc)
Variables = dict[str, str]


@contextlib.contextmanager
def environment(variables: Variables) -> Iterator[None]:
    """Names files for what is made inside: a server and its clients may be told different things."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (TLS_CERTIFICATE, TLS_KEY, TLS_CA):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


class Authority:
    """A CA, its files in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self._count = 0
        self.path = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.path)

    def certificate(self, *, has_expired: bool = False, chain: int = 0) -> Variables:
        """Returns the variables that name a new certificate of this CA, with so many others behind it, and its key."""
        self._count += 1
        made = self._ca.issue_cert("gradsync.test", not_after=_LONG_AGO if has_expired else None)
        paths = [self._folder / f"{self._count}.{kind}.pem" for kind in ("certificate", "key")]
        made.cert_chain_pems[0].write_to_path(paths[0])
        for _ in range(chain):
            trustme.CA().cert_pem.write_to_path(paths[0], append=True)
        made.private_key_pem.write_to_path(paths[1])
        return {TLS_CERTIFICATE: str(paths[0]), TLS_KEY: str(paths[1])}

    @property
    def trusted(self) -> Variables:
        """The variable that names this CA."""
        return {TLS_CA: str(self.path)}

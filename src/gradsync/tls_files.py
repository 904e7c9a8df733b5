"""The files that make the rendezvous TLS: which ones the environment names; what is in them is for `rendezvous/tls`.

Kept apart so that a process without them, as nearly all are, loads neither that nor OpenSSL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from gradsync.environment import TLS_CA, TLS_CERTIFICATE, TLS_KEY
from gradsync.errors import InvalidArgument
from gradsync.variable_values import value_of


class TlsFiles(NamedTuple):
    """Paths of files in PEM; None where the environment names none.

    Attributes:
        certificate: this side's own, and those that lead to its CA.
        key: of that certificate.
        ca: the certificates that sign those of the other side.
    """

    certificate: str | None
    key: str | None
    ca: str | None


def read_tls_files(environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """Reads which files make the rendezvous TLS; None where no variable is set: then it is plain TCP.

    Raises:
        InvalidArgument: a certificate without a key, or the reverse.
    """
    files = TlsFiles(*(value_of(environ, name) for name in (TLS_CERTIFICATE, TLS_KEY, TLS_CA)))
    if files == (None, None, None):
        return None
    if (files.certificate is None) != (files.key is None):
        there, lacking = (TLS_KEY, TLS_CERTIFICATE) if files.certificate is None else (TLS_CERTIFICATE, TLS_KEY)
        raise InvalidArgument(f"{there} is set, but {lacking} is not; set both or neither")
    return files


def check_tls_files(environ: Mapping[str, str] = os.environ, *, hosts: bool) -> None:
    """Reads the files that the environment names, if it names any, so that what is wrong is told before ranks start.

    Args:
        environ: the variables.
        hosts: whether this process is to host a server, which needs a certificate.

    Raises:
        InvalidArgument: one is missing, or is not what it should be, or the key is another certificate's.
    """
    files = read_tls_files(environ)
    if files is not None:
        from gradsync.rendezvous.tls import ClientTls, ServerTls  # here: OpenSSL is large, and few runs need it

        ServerTls(files) if hosts else ClientTls(files)

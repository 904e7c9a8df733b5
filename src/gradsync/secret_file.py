"""The secret of a run, as a user keeps it in a file: read only where nobody else can have read or planted it.

`environment.py`, `meeting_file.py` and `gradsync serve` use it for runs that our launcher does not start.
"""

from __future__ import annotations

import errno
import os
import stat

from gradsync.errors import InvalidArgument

HOW_TO_MAKE_A_SECRET_FILE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > gradsync.secret)"
_MINIMUM_SECRET_BYTES = 16
_MAXIMUM_FILE_BYTES = 4096


def read_secret_file(path: str) -> bytes:
    """Reads a secret in hexadecimal from a file that nobody else can read.

    Args:
        path: the file; a symbolic link is refused, because whoever made it chooses the file.

    Returns:
        The secret.

    Raises:
        InvalidArgument: the file is missing, not a regular file, not this user's own, open to others, or
            holds no secret.
    """
    return parse_secret(read_private_file(path), f"secret file {path!r}")


def read_secret_option(path: str) -> bytes:
    """Reads the secret that `--secret-file` names: a file, or "-" for a line of standard input.

    Raises:
        InvalidArgument: see `read_secret_file`.
    """
    return parse_secret(_line_of_standard_input(), "standard input") if path == "-" else read_secret_file(path)


def _line_of_standard_input() -> str:
    """Returns the first line, and leaves what follows it to whoever reads on: a rank."""
    line = b""
    try:
        while len(line) < _MAXIMUM_FILE_BYTES and not line.endswith(b"\n") and (byte := os.read(0, 1)):
            line += byte
    except OSError as error:  # such as one that is closed
        raise InvalidArgument(f"the secret cannot be read from standard input: {error.strerror}") from None
    return line.decode("ascii", "replace")


def read_private_file(path: str) -> str:
    """Reads a short text from a file that nobody else can read.

    Args:
        path: the file; a symbolic link is refused.

    Raises:
        InvalidArgument: the file is missing, not a regular file, not this user's own, open to others, or too long.
    """
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:  # O_NOFOLLOW
            raise InvalidArgument(f"secret file {path!r} is a symbolic link; name the file itself") from None
        raise InvalidArgument(
            f"secret file {path!r} cannot be opened: {error.strerror}; make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    try:
        # The descriptor is examined, not the path: the path may be exchanged between two looks.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"secret file {path!r} needs to be a regular file")
        if status.st_size > _MAXIMUM_FILE_BYTES:
            raise InvalidArgument(
                f"secret file {path!r} needs to hold a secret of at most {_MAXIMUM_FILE_BYTES} bytes, "
                f"it has {status.st_size}"
            )
        if status.st_uid != os.geteuid():
            raise InvalidArgument(
                f"secret file {path!r} needs to belong to user {os.geteuid()}, it belongs to {status.st_uid}"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise InvalidArgument(
                f"secret file {path!r} needs mode 0600, got {stat.S_IMODE(status.st_mode):04o}; run: chmod 600 {path}"
            )
        return os.read(descriptor, _MAXIMUM_FILE_BYTES).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def parse_secret(text: str, origin: str) -> bytes:
    """Decodes a secret written in hexadecimal.

    Args:
        text: the digits, with white space around them allowed.
        origin: where they came from; errors name it, and never quote the text.

    Returns:
        The secret.

    Raises:
        InvalidArgument: not hexadecimal, or too short to be a secret.
    """
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < _MINIMUM_SECRET_BYTES:
        raise InvalidArgument(
            f"{origin} needs to hold a secret of at least {2 * _MINIMUM_SECRET_BYTES} hexadecimal digits; "
            f"make one with: {HOW_TO_MAKE_A_SECRET_FILE}"
        ) from None
    return secret

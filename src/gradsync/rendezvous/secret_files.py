"""Secret files: processes of one machine find a server and its secret in a folder that only this user can open.

Ranks that gradsync's launcher did not start use them (hosting.py), and several launchers of one run
(launching/nodes.py); who writes the file, and who waits for it, is decided there. Its name has the server's address or
the name of the run. Rank 0 removes its file when all ranks have joined, a launcher when its run ends.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from gradsync.environment import SECRET_FILE, parse_secret, read_private_file
from gradsync.errors import AuthenticationError, InvalidArgument

_READ_EVERY_SECONDS = 0.005
_NOTICE_EVERY_SECONDS = 5.0


class Endpoint(NamedTuple):
    """The address of a rendezvous server, and the secret of its run.

    Attributes:
        address: host:port.
        secret: the secret, at least 16 bytes.
    """

    address: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"


def secret_path(name: str) -> str:
    """Returns the path of a secret file, in a directory that only this user can open.

    Args:
        name: the run's name, or the server's address.

    Raises:
        AuthenticationError: the user has no private runtime directory, and the folder in its place is open to others.
        InvalidArgument: that folder cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if not _is_private(base):  # missing, or owned by another user, as after su
        base = _private_folder()
    return os.path.join(base, f"gradsync-{name.replace('localhost', '127.0.0.1')}.secret")


def publish(path: str, endpoint: Endpoint) -> None:
    """Writes a secret file atomically; replaces the file of an earlier run.

    Raises:
        OSError: the file cannot be written.
    """
    fresh = f"{path}.{os.urandom(8).hex()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{endpoint.secret.hex()}\n{endpoint.address}\n")
        os.replace(fresh, path)
    except BaseException:  # e.g. the disk is full: leave no secret behind
        os.unlink(fresh)
        raise


def wait_for(
    path: str, stale: Endpoint | None, deadline: float, notice: Callable[[], None] = lambda: None
) -> Endpoint | None:
    """Waits for a secret file, and returns its endpoint.

    Args:
        path: the file.
        stale: the endpoint of an earlier run, whose file does not count.
        deadline: monotonic seconds.
        notice: is called every 5 s meanwhile.

    Returns:
        The endpoint, or None at the deadline.

    Raises:
        InvalidArgument: the file is not a regular file of this user with mode 0600, or it holds no secret.
    """
    notice_at = time.monotonic() + _NOTICE_EVERY_SECONDS
    while (now := time.monotonic()) < deadline:
        found = _read(path)
        if found is not None and found != stale:
            return found
        if now >= notice_at:
            notice_at = now + _NOTICE_EVERY_SECONDS
            notice()
        time.sleep(_READ_EVERY_SECONDS)
    return None


def _read(path: str) -> Endpoint | None:
    if not os.path.exists(path):
        return None
    try:
        secret, _, address = read_private_file(path).partition("\n")
        return Endpoint(address.strip(), parse_secret(f"secret file {path!r}", secret))
    except InvalidArgument:
        if os.path.exists(path):
            raise
        return None  # the file was removed between two steps


def _private_folder() -> str:
    import tempfile  # imported here to keep the start of a rank short

    try:
        folder = os.path.join(tempfile.gettempdir(), f"gradsync-{os.geteuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            "ranks find each other by a file, and there is no folder for it where this user may write: set "
            f"XDG_RUNTIME_DIR to one of mode 0700 ({error.strerror})"
        ) from None
    if not _is_private(folder):
        raise AuthenticationError(
            f"{folder} needs to be a directory of mode 0700 that belongs to this user; remove it, "
            f"or name a secret file in {SECRET_FILE}"
        )
    return folder


def _is_private(folder: str) -> bool:
    """Returns whether a directory exists, belongs to this user and is closed to other users."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077

"""How processes of one machine find a server and its secret: a file in the user's runtime directory.

Ranks that our launcher did not start meet through it (`hosting.py`), and so do several launchers of one run
(`launching/hosting.py`): those decide who writes it and who waits for it. It is named after what all of them
know, an address or the run, lies where only this user can enter, and goes away when they have met, or with the run
that the first launcher hosts.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from gradsync.environment import SECRET_FILE, parse_secret, read_private_file
from gradsync.errors import AuthenticationError, InvalidArgument

_LOOK_EVERY_SECONDS = 0.005
_NOTICE_EVERY_SECONDS = 5.0


class Endpoint(NamedTuple):
    """Where a rendezvous server listens, as host:port, and the secret of its run.

    Attributes:
        address, secret: these.
        start: on a server that launchers share with their ranks, the start of the ranks that meet there.
    """

    address: str
    secret: bytes
    start: str | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.address!r})"


def secret_path(name: str) -> str:
    """Returns the path of the file for a name, in a directory that only this user can enter.

    Args:
        name: of the run, or its address.

    Raises:
        AuthenticationError: there is no such directory, and none can be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if not _is_private(base):  # missing, or another user's, as after su
        base = _private_folder()
    return os.path.join(base, f"gradsync-{name.replace('localhost', '127.0.0.1')}.secret")


def publish(path: str, endpoint: Endpoint) -> None:
    """Writes the file, whole at once, over one that an earlier run has left."""
    fresh = f"{path}.{os.urandom(8).hex()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{endpoint.secret.hex()}\n{endpoint.address}\n")
        os.replace(fresh, path)
    except BaseException:  # such as a full disk: no secret is left behind
        os.unlink(fresh)
        raise


def wait_for(
    path: str, stale: Endpoint | None, deadline: float, notice: Callable[[], None] = lambda: None
) -> Endpoint | None:
    """Waits until there is a file with something else than an earlier run has left.

    Args:
        path: the file.
        stale: what has been found there, and was no use.
        deadline: monotonic seconds.
        notice: called every 5 s, to say what is waited for.

    Returns:
        What it says, or None at the deadline.

    Raises:
        InvalidArgument: the file could have been read or planted by others, or holds something else.
    """
    notice_at = time.monotonic() + _NOTICE_EVERY_SECONDS
    while (now := time.monotonic()) < deadline:
        found = _read(path)
        if found is not None and found != stale:
            return found
        if now >= notice_at:
            notice_at = now + _NOTICE_EVERY_SECONDS
            notice()
        time.sleep(_LOOK_EVERY_SECONDS)
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
        return None  # removed between the two looks


def _private_folder() -> str:
    import tempfile  # here: start-up counts

    folder = os.path.join(tempfile.gettempdir(), f"gradsync-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise AuthenticationError(
            f"{folder} must be a directory of mode 0700 that belongs to this user; remove it, "
            f"or name a secret in {SECRET_FILE}"
        )
    return folder


def _is_private(folder: str) -> bool:
    """Whether a directory is there, this user's, and closed to others."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077

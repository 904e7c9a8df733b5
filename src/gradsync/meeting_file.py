"""How ranks of one machine find the server and the secret that rank 0 made: a file in the user's runtime directory.

Only for ranks that our launcher did not start; `bootstrap.py` decides who writes it and who waits for it. It is named
after what all ranks know, an address or the run (`run_name.py`), lies where only this user can enter, and goes away
when they have met.
"""

from __future__ import annotations

import os
import stat
import time
from typing import NamedTuple

from gradsync.errors import AuthenticationError, InvalidArgument
from gradsync.secret_file import parse_secret, read_private_file

_LOOK_EVERY_SECONDS = 0.005


class Meeting(NamedTuple):
    """Where a server listens, and the secret it wants to see."""

    address: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Meeting({self.address!r})"


def meeting_path(name: str) -> str:
    """Gives the path of the file for a name, in a directory that only this user can enter.

    Raises:
        AuthenticationError: there is no such directory, and none can be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if not os.path.isdir(base):
        base = _private_folder()
    return os.path.join(base, f"gradsync-{name}.secret")


def publish(path: str, meeting: Meeting) -> None:
    """Writes the file, whole at once, over one that an earlier run has left."""
    fresh = f"{path}.{os.urandom(8).hex()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{meeting.secret.hex()}\n{meeting.address}\n")
    os.replace(fresh, path)


def wait_for(path: str, stale: Meeting | None, deadline: float) -> Meeting | None:
    """Waits until there is a file with something else than an earlier run has left.

    Args:
        path: the file.
        stale: what has been found there, and was no use.
        deadline: monotonic seconds.

    Returns:
        What it says, or None at the deadline.

    Raises:
        InvalidArgument: the file could have been read or planted by others, or holds something else.
    """
    while time.monotonic() < deadline:
        found = _read(path)
        if found is not None and found != stale:
            return found
        time.sleep(_LOOK_EVERY_SECONDS)
    return None


def _read(path: str) -> Meeting | None:
    if not os.path.exists(path):
        return None
    try:
        secret, _, address = read_private_file(path).partition("\n")
        return Meeting(address.strip(), parse_secret(secret, f"secret file {path!r}"))
    except InvalidArgument:
        if os.path.exists(path):
            raise
        return None  # removed between the two looks


def _private_folder() -> str:
    import tempfile  # here: start-up counts

    folder = os.path.join(tempfile.gettempdir(), f"gradsync-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise AuthenticationError(
            f"{folder} must be a directory of mode 0700 that belongs to this user; remove it, "
            "or name a secret in GRADSYNC_SECRET_FILE"
        )
    return folder

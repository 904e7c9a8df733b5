"""Runs a process with an /etc/hosts of its own, so that loopback's name needs no name server.

TCPStore's server looks the name of every peer up as it accepts it, and waits for the answer. Where /etc/hosts has not
the address in the very form that it asks for, each is a question to the network's name server, and a lost one costs all
ranks five seconds. That is not to be measured, so its server gets an /etc/hosts of its own.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

_HOSTS = "127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n::1 localhost\n"
_NAMESPACE = ["unshare", "--map-root-user", "--mount"]
_SCRIPT = 'mount --bind "$0" /etc/hosts && exec "$@"'


@functools.cache
def can_give_names() -> bool:
    """Returns whether this machine lets a process have a file system of its own."""
    try:
        return subprocess.run([*_NAMESPACE, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def with_names(command: list[str], folder: Path) -> list[str]:
    """Returns the command with that file; the process id of what it starts stays the command's.

    Args:
        command: to run.
        folder: where the file may stand as long as the process lives.
    """
    if not can_give_names():
        return command
    hosts = folder / "hosts"
    hosts.write_text(_HOSTS)
    return [*_NAMESPACE, "sh", "-c", _SCRIPT, str(hosts), *command]

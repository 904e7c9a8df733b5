"""Room for connections and pipes among the files that a process may have open."""

from __future__ import annotations

import contextlib
import logging

_OTHERS = 256  # what else the process has open

_log = logging.getLogger("gradsync.rendezvous")


def make_room(connections: int) -> None:
    """Raises the process's limit of open files where so many connections do not fit; says so where it may not."""
    allowed = raise_limit(connections)
    if allowed is not None:
        _log.warning(
            "gradsync: this process may have %d files open, and a rendezvous of this size may need up to %d; raise the "
            "hard limit (ulimit -Hn) if ranks cannot connect",
            allowed,
            connections + _OTHERS,
        )


def raise_limit(files: int) -> int | None:
    """Raises the process's limit of open files to so many beside what else it has open, as far as it may.

    The usual limit is 1,024, which the server of a thousand ranks passes, and the launcher of 130. What the process
    starts from now on inherits the new one.

    Returns:
        The limit, where it is too low even so; else None.
    """
    with contextlib.suppress(ImportError):  # there is no such limit elsewhere
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = files + _OTHERS
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return None
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, soft), hard))
        return allowed if allowed < needed else None
    return None

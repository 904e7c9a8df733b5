"""Room for the server's connections among the files that its process may have open."""

from __future__ import annotations

import contextlib
import logging

_OTHERS = 256  # what else the process has open

_log = logging.getLogger("gradsync.rendezvous")


def make_room(connections: int) -> None:
    """Raises the process's limit of open files where so many connections do not fit; says so where it may not.

    The usual limit is 1,024, which the server of a thousand ranks passes. What the process starts from now on inherits
    the new one.
    """
    with contextlib.suppress(ImportError):  # there is no such limit elsewhere
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = connections + _OTHERS
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, soft), hard))
        if allowed < needed:
            _log.warning(
                "this process may have %d files open, and a rendezvous of this size may need %d; raise the hard limit "
                "(ulimit -Hn) if ranks cannot connect",
                allowed,
                needed,
            )

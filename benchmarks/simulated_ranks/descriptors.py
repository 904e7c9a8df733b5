"""Room for many open files in this process."""

from __future__ import annotations

import resource


def raise_limit() -> None:
    """Raises the limit of open files as far as possible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

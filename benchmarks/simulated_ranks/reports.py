"""A process that is many ranks: commands on standard input, reports on standard output, room for many open files."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(obey: Callable[[str, str], dict[str, Any]]) -> None:
    """Runs commands until standard input ends. A command is a word, a colon and an argument; a report has times."""
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(":")
        cpu, began = time.process_time(), time.monotonic()
        found = obey(word, rest)
        times = {"began": began, "ended": time.monotonic(), "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(times | found), flush=True)


def chosen(rest: str) -> slice:
    """Returns which of the process's ranks a command is for, of "FIRST-" or "FIRST-END"."""
    first, _, end = rest.partition("-")
    return slice(int(first), int(end) if end else None)


def raise_limit() -> None:
    """Raises the limit of open files as far as possible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

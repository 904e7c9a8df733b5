"""What /proc tells of a process that is not a child."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Gives its state: "R" runs, "S" sleeps, "T" is stopped, "Z" has ended and is not yet reaped.

    Raises:
        OSError: there is no such process.
    """
    return _fields(pid)[0]


def parent_of(pid: int) -> int:
    """Gives its parent's process id.

    Raises:
        OSError: there is no such process.
    """
    return int(_fields(pid)[1])


def _fields(pid: int) -> list[str]:
    # The name before them may hold blanks and brackets of its own.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

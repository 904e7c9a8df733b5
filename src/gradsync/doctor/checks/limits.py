"""Limits of a process: open files, and memory that network cards may lock."""

from __future__ import annotations

from gradsync.doctor.finding import Finding, ok, warning
from gradsync.doctor.surroundings import Surroundings

_ENOUGH_FILES, _WANTED_FILES = 256, 4096
_ENOUGH_LOCKED_BYTES = 1024**3


def check_limits(here: Surroundings) -> list[Finding]:
    """What `ulimit` allows."""
    soft, hard = here.limits.get("open files", (-1, -1))
    files = "any number of" if soft < 0 else f"{soft:,}"
    if 0 <= soft < _ENOUGH_FILES:
        can_raise = hard < 0 or hard >= _WANTED_FILES
        advice = f"ulimit -n {_WANTED_FILES}" if can_raise else f"as root: prlimit --pid $$ --nofile={_WANTED_FILES}"
        return [warning("limits", f"{soft} open files: the launcher needs some for each of its ranks", advice)]
    locked, _ = here.limits.get("locked memory", (-1, -1))
    has_rdma = (here.root / "sys/class/infiniband").is_dir() and any((here.root / "sys/class/infiniband").iterdir())
    if has_rdma and 0 <= locked < _ENOUGH_LOCKED_BYTES:
        text = f"{locked // 1024:,} KB of locked memory: InfiniBand and RoCE fail, or fall back to TCP"
        return [warning("limits", text, "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1")]
    return [ok("limits", f"{files} open files{'; locked memory is enough for RDMA' if has_rdma else ''}")]

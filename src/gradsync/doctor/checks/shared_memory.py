"""Memory that ranks share: anonymous (memfd), which the backend shm takes, and /dev/shm, which MPI and NCCL take."""

from __future__ import annotations

import re

from gradsync.doctor.finding import Finding, broken, ok, unusable, warning
from gradsync.doctor.surroundings import Surroundings

_MEGABYTE = 1024**2
_ENOUGH_BYTES = 256 * _MEGABYTE  # Docker gives 64 MB
_COLLAPSE_SINCE = (6, 1)  # Linux, with MADV_COLLAPSE


def check_anonymous_memory(here: Surroundings) -> list[Finding]:
    """Whether a memfd can be made, and whether it can lie on huge pages."""
    if here.memory_error:
        return [broken("shared memory", f"memfd: {here.memory_error}", "free memory, or raise the container's limit")]
    return [ok("shared memory", f"memfd works; {_huge_pages(here)}")]


def _huge_pages(here: Surroundings) -> str:
    setting = here.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or ""
    chosen = re.search(r"\[(\w+)\]", setting)
    if chosen is not None and chosen[1] in ("always", "advise", "within_size", "force"):
        return f"huge pages by the system's setting ({chosen[1]})"
    release = re.match(r"(\d+)\.(\d+)", here.kernel)
    if release and (int(release[1]), int(release[2])) >= _COLLAPSE_SINCE and (chosen is None or chosen[1] != "deny"):
        return "huge pages on request"
    return "no huge pages (slower by up to a third from 100 MB on)"


def check_shared_memory_folder(here: Surroundings) -> list[Finding]:
    """The size of /dev/shm."""
    what = "/dev/shm"
    if here.shared_memory_bytes is None:
        return [unusable(what, "there is none: MPI and NCCL need it, shm does not", "mount -t tmpfs tmpfs /dev/shm")]
    size_bytes, free_bytes = here.shared_memory_bytes
    text = f"{_shown(size_bytes)}, {_shown(free_bytes)} free"
    if size_bytes < _ENOUGH_BYTES:
        advice = "start the container with --shm-size=1g (or --ipc=host); as root: mount -o remount,size=1g /dev/shm"
        return [
            warning(what, f"{text}: too small for NCCL, and for MPI with large arrays; shm does not need it", advice)
        ]
    if free_bytes < _ENOUGH_BYTES // 4:
        return [warning(what, f"{text}: NCCL and MPI may find no room", "see what fills it: ls -l /dev/shm")]
    return [ok(what, text)]


def _shown(size_bytes: int) -> str:
    if size_bytes >= 1024 * _MEGABYTE:
        return f"{size_bytes / 1024 / _MEGABYTE:.1f} GB"
    return f"{size_bytes / _MEGABYTE:.0f} MB" if size_bytes >= _MEGABYTE else f"{size_bytes // 1024} KB"

"""The limits of a container or a batch job: cores and memory by control groups."""

from __future__ import annotations

from gradsync.doctor.finding import Finding, ok, warning
from gradsync.doctor.surroundings import Surroundings

_GIGABYTE = 1024**3
_LITTLE_MEMORY_BYTES = 1 * _GIGABYTE


def check_container(here: Surroundings) -> list[Finding]:
    """What control groups leave of cores and memory."""
    what = "container" if is_container(here) else "control group"
    cores, memory_bytes = _cores_allowed(here), _memory_allowed(here)
    limits = [f"{cores:.1f} cores"] if cores is not None else []
    limits += [f"{memory_bytes / _GIGABYTE:.1f} GB of memory"] if memory_bytes is not None else []
    text = f"limited to {' and '.join(limits)}" if limits else "no limit of cores or memory"
    if cores is not None and cores < here.cores - 0.5:
        text += f", though {here.cores} cores are shown: more ranks than that are paused in turns"
        return [warning(what, text, f"start at most {max(int(cores), 1)} ranks, or give it more: docker run --cpus=N")]
    if memory_bytes is not None and memory_bytes < _LITTLE_MEMORY_BYTES:
        return [warning(what, f"{text}: the kernel ends ranks that need more", "give it more: docker run --memory=8g")]
    return [ok(what, text)]


def is_container(here: Surroundings) -> bool:
    """Whether this looks like the inside of one."""
    if any((here.root / name).exists() for name in (".dockerenv", "run/.containerenv")):
        return True
    groups = here.read("/proc/1/cgroup") or ""
    return any(word in groups for word in ("docker", "kubepods", "containerd", "lxc"))


def _group(here: Surroundings) -> str:
    """Returns the path of this process's group in the second version's one tree."""
    for line in (here.read("/proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").strip().rstrip("/")
    return ""


def _of_group(here: Surroundings, name: str) -> str | None:
    """Returns a setting of this process's group, or of the one at the top, which is a container's own."""
    return here.read(f"/sys/fs/cgroup{_group(here)}/{name}") or here.read(f"/sys/fs/cgroup/{name}")


def _cores_allowed(here: Surroundings) -> float | None:
    quota, _, period = (_of_group(here, "cpu.max") or "").partition(" ")
    if not quota:  # the first version
        quota = here.read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or ""
        period = here.read("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or ""
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def _memory_allowed(here: Surroundings) -> int | None:
    text = _of_group(here, "memory.max") or here.read("/sys/fs/cgroup/memory/memory.limit_in_bytes") or ""
    if not text.isdigit() or int(text) >= 1 << 60:  # the first version writes a huge number for none
        return None
    return int(text)

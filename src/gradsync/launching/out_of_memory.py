"""Tells an end by want of memory from others: the kernel's out-of-memory killer, and exceptions that mean the same.

That killer sends SIGKILL, as anybody may. It counts what it ends: for each control group (memory.events in version 2,
memory.oom_control in version 1), and for the whole machine (/proc/vmstat).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_KILLED = "the kernel's out-of-memory killer ended it"
_GIB, _MIB = 1 << 30, 1 << 20

_GPU_MEMORY = re.compile(
    r"\bCUDA(?: error:)? out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
    r"CU(?:BLAS|DNN|FFT|SPARSE|SOLVER|RAND)_(?:STATUS_)?ALLOC(?:ATION)?_FAILED"
)


class OomWatch:
    """Counts what the kernel's out-of-memory killer ends from now on. What cannot be read counts as 0.

    Args:
        proc: where the proc file system is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._vmstat = proc / "vmstat"
        self._groups = _memory_groups(proc)
        self._killed_before = self._killed()
        self._hits_before = [group.limit_hits() for group in self._groups]

    def kills(self) -> int:
        """Returns how many processes it has ended: of our control group, or where there is none of the machine.

        Not of the groups above ours, whose counts have our neighbours in them.
        """
        return max(0, self._killed() - self._killed_before)

    def describe(self) -> str:
        """Says what happened, to follow "rank 1 was killed by SIGKILL: "; empty when nothing was ended."""
        if self.kills() == 0:
            return ""
        if not self._groups:
            return "perhaps the kernel's out-of-memory killer: it has ended a process on this machine meanwhile"
        # The innermost group whose limit was met is the one to give more.
        for group, before in zip(self._groups, self._hits_before, strict=True):
            limit = group.limit()
            if limit is not None and group.limit_hits() > before:
                return f"{_KILLED} (memory limit of the control group: {_size(limit)})"
        return f"{_KILLED} (the machine was out of memory)"

    def _killed(self) -> int:
        return (self._groups[0].kills() if self._groups else _count(self._vmstat, "oom_kill")) or 0


def kind_of_memory(summary: str) -> str | None:
    """Tells which memory an exception says was too small.

    Args:
        summary: its type, with or without the module, and its message: the last line of its traceback.

    Returns:
        "host memory", "GPU memory", or None when it speaks of neither.
    """
    type_name, _, message = summary.partition(": ")
    name = type_name.strip().rpartition(".")[2]
    # CuPy's and PyTorch's; the libraries tell the same as a RuntimeError or an error of their own.
    if name == "OutOfMemoryError" or _GPU_MEMORY.search(summary):
        return "GPU memory"
    if name in ("MemoryError", "_ArrayMemoryError") or (name == "OSError" and message.startswith("[Errno 12]")):
        return "host memory"
    return None


class _GroupV1:
    """The memory control group in a directory, version 1."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def kills(self) -> int | None:
        """Returns how many of its processes were ended; None when that is not counted."""
        return _count(self._directory / "memory.oom_control", "oom_kill")

    def limit_hits(self) -> int:
        """Returns how often its limit stood in the way."""
        return _number(self._directory / "memory.failcnt") or 0

    def limit(self) -> int | None:
        """Returns its limit in bytes, where it has one."""
        limit = _number(self._directory / "memory.limit_in_bytes")
        return None if limit is None or limit >= 1 << 60 else limit  # near 2**63 says "none"


class _GroupV2:
    """The same in version 2. Its counts have those of the groups inside it in them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def kills(self) -> int | None:
        """Returns how many of its processes were ended; None when that is not counted."""
        return _count(self._directory / "memory.events", "oom_kill")

    def limit_hits(self) -> int:
        """Returns how often its limit stood in the way."""
        return _count(self._directory / "memory.events", "oom") or 0

    def limit(self) -> int | None:
        """Returns its limit in bytes, where it has one."""
        return _number(self._directory / "memory.max")


def _memory_groups(proc: Path) -> Sequence[_GroupV1 | _GroupV2]:
    """Gives this process's memory control group and those above it, innermost first."""
    paths = _group_paths(proc / "self/cgroup")
    for kind, path in (("cgroup", paths.get("memory")), ("cgroup2", paths.get(""))):
        if path is None:
            continue
        for root, mount_point in _mounts(proc / "self/mountinfo", kind):
            # Other controllers' hierarchies have no such file.
            version = _GroupV1 if kind == "cgroup" else _GroupV2
            groups = [version(directory) for directory in _upwards(root, mount_point, path)]
            if groups[0].kills() is not None:
                return groups
    return []


def _group_paths(file: Path) -> dict[str, str]:
    """Reads /proc/self/cgroup: the path in each hierarchy by controller; version 2 has the controller ""."""
    paths: dict[str, str] = {}
    for line in _lines(file):
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _mounts(file: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Reads /proc/self/mountinfo: root and mount point of the mounts of one kind."""
    for line in _lines(file):
        mount, _, system = line.partition(" - ")
        fields = mount.split()
        if len(fields) >= 5 and system.split()[:1] == [kind]:
            yield _unescaped(fields[3]), Path(_unescaped(fields[4]))


def _upwards(root: str, mount_point: Path, path: str) -> list[Path]:
    """Gives the directory of a group and those above it, as far as they are mounted here."""
    # In a container the mount may show a part of the hierarchy only, and the path may lead out of it.
    inside = Path(path).parts[1:] if root == "/" else Path(path).parts[len(Path(root).parts) :]
    if ".." in Path(path).parts or not (path + "/").startswith(root.rstrip("/") + "/"):
        inside = ()
    return [mount_point.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)]


def _unescaped(field: str) -> str:
    """Undoes the kernel's way to write blanks in paths."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _count(file: Path, name: str) -> int | None:
    """Reads one of a file's lines of name and number."""
    for line in _lines(file):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None


def _number(file: Path) -> int | None:
    """Reads a file with a number alone; version 2 writes "max" for no limit."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _size(count: int) -> str:
    """Gives "24.0 GiB" for that many bytes."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"

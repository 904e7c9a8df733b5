"""What a process holds: counted before and after, to see whether anything stays behind. Imported by ranks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple


class Belongings(NamedTuple):
    """What this process holds at one moment; all but the memory is equal where nothing leaks.

    Attributes:
        descriptors: what each open descriptor is, without the numbers of sockets and pipes.
        shared_maps: mappings of memory that is shared with other processes.
        threads: number of threads.
        children: number of child processes.
        resident_bytes: memory in use.
    """

    descriptors: tuple[str, ...]
    shared_maps: int
    threads: int
    children: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Belongings:
        gc.collect()
        return cls(_descriptors(), _shared_maps(), len(os.listdir("/proc/self/task")), _children(), _resident_bytes())

    def without_memory(self) -> tuple[Any, ...]:
        return self[:-1]


def _descriptors() -> tuple[str, ...]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}").partition(":[")[0])
        except OSError:  # the one that listed them
            continue
    return tuple(sorted(found))


def _shared_maps() -> int:
    return sum(line.split()[1].endswith("s") for line in Path("/proc/self/maps").read_text().splitlines())


def _children() -> int:
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

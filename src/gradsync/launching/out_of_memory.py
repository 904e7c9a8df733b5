"""Recognises ranks that ran out of memory, by the kernel's out-of-memory killer or by the rank's exception.

The out-of-memory killer sends SIGKILL, which other programs may send too. To distinguish the two, this module reads the
kernel's counts of processes that the killer has ended: for each control group (memory.events in version 2,
memory.oom_control in version 1), and for the whole machine (/proc/vmstat).
"""

from __future__ import annotations

import re

from gradsync.errors import size_text
from gradsync.machine import memory_groups, numbered_line

_KILLED = "the kernel's out-of-memory killer ended it"

_GPU_MEMORY = re.compile(
    r"\bCUDA(?: error:)? out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
    r"CU(?:BLAS|DNN|FFT|SPARSE|SOLVER|RAND)_(?:STATUS_)?ALLOC(?:ATION)?_FAILED"
)


class OomWatch:
    """Counts the processes that the kernel's out-of-memory killer has ended since this object was made.

    Args:
        proc: the directory where the proc file system is mounted.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._vmstat = f"{proc}/vmstat"
        self._groups = memory_groups(proc)
        self._killed_before = self._killed()
        self._hits_before = [group.limit_hits() or 0 for group in self._groups]

    def kills(self) -> int:
        """Returns how many processes the killer has ended in this process's control group; 0 if this cannot be read.

        If this process is in no control group, returns the number for the whole machine. The numbers of parent control
        groups are not used, because they include processes of other programs.
        """
        return max(0, self._killed() - self._killed_before)

    def describe(self) -> str:
        """Returns the words that follow "rank 1 was killed by SIGKILL: "; "" if the killer has ended no process."""
        if self.kills() == 0:
            return ""
        if not self._groups:
            return "perhaps the kernel's out-of-memory killer, which ended a process on this machine during the run"
        # The innermost group that has reached its limit needs more memory.
        for group, before in zip(self._groups, self._hits_before, strict=True):
            limit = group.limit()
            if limit is not None and (group.limit_hits() or 0) > before:
                return f"{_KILLED} (memory limit of the control group: {size_text(limit)})"
        return f"{_KILLED} (the machine was out of memory)"

    def _killed(self) -> int:
        return (self._groups[0].kills() if self._groups else numbered_line(self._vmstat, "oom_kill")) or 0


def kind_of_memory(summary: str) -> str | None:
    """Returns the kind of memory that ran out, according to an exception.

    Args:
        summary: the last line of the exception's traceback: its type, with or without the module, and its message.

    Returns:
        "host memory", "GPU memory", or None if the exception does not mean lack of memory.
    """
    type_name, _, message = summary.partition(": ")
    name = type_name.strip().rpartition(".")[2]
    # CuPy and PyTorch have this type; the CUDA libraries raise a RuntimeError or an error of their own.
    if name == "OutOfMemoryError" or _GPU_MEMORY.search(summary):
        return "GPU memory"
    if name in ("MemoryError", "_ArrayMemoryError") or (name == "OSError" and message.startswith("[Errno 12]")):
        return "host memory"
    return None

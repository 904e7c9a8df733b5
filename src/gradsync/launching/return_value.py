"""What a function returned on a rank, on its way to the caller: pickled, in the rank's result file."""

from __future__ import annotations

import fcntl
import os
import pickle
import weakref
from typing import Any

from gradsync.launching.in_rank.rank_result import BOUNDS
from gradsync.launching.private_map import map_privately


class ReturnValue:
    """A return value in a rank's result file. Its large arrays stay there: they are mapped, and a write copies a page.

    Args:
        file: descriptor of the file; taken over.
        told: where in it the pickled value lies, and then each of its buffers: pairs of BOUNDS.

    Raises:
        ValueError, OSError: the file does not hold what was told; the descriptor stays the caller's.
    """

    def __init__(self, file: int, told: bytearray) -> None:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # else reading what is gone would kill this process
        size = os.fstat(file).st_size
        if not told or len(told) % BOUNDS.size:
            raise ValueError(f"{len(told)} bytes are no bounds of a result")
        self._bounds = list(BOUNDS.iter_unpack(told))
        for begin, end in self._bounds:
            if not begin <= end <= size:
                raise ValueError(f"a result file of {size} bytes does not hold bytes {begin} to {end}")
        self._file, self._size_bytes = file, size
        self._close = weakref.finalize(self, os.close, file)

    def load(self) -> Any:
        """Gives the value: each call another copy. Raises what its unpickling does."""
        # Private: a value that is loaded twice is two, and a process that is forked later shares none of it.
        content = memoryview(map_privately(self._file, self._size_bytes))
        pickled, *buffers = [content[begin:end] for begin, end in self._bounds]
        return pickle.loads(pickled, buffers=buffers)

    def forget(self) -> None:
        """Closes the file: the value cannot be loaded any more."""
        self._close()

"""NaN and infinity in random places of random steps: all ranks tell what a look at every rank's gradients tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators.shared_memory.shm_backend import CHUNK_BYTES
from rank_processes import run_ranks

Gradients = list[np.ndarray[Any, Any]]


def reduce_all(callback: gs.AllreduceCallback, arrays: Gradients) -> Gradients:
    with np.errstate(all="ignore"), callback.backward():
        futures = [callback(f"w{place}", array) for place, array in enumerate(arrays)]
    return [future.result() for future in futures]


def spoil_every_chunk(comm: Any) -> None:
    """Each chunk of a large array in turn, and the same one on several ranks, or another one later."""
    size, ranks = 12 * CHUNK_BYTES // 4 + 5, range(comm.world_size)
    callback = gs.AllreduceCallback("mean", comm, nonfinite="raise")
    array = np.empty(size, np.float32)
    for step in range(24):
        at = step * (CHUNK_BYTES // 8) + 3
        bad = [rank for rank in ranks if (rank + step) % comm.world_size == 0 or step % 5 == 0]
        for later in (0, size // 3):
            array[...] = 1.0
            if comm.rank in bad:
                array[at] = np.nan
            if later and comm.rank not in bad:
                array[(at + later) % size] = np.inf
            error = expect(gs.NonFiniteGradient, lambda: reduce_all(callback, [array]))
            assert error.parameters == dict.fromkeys(ranks if later else bad, "w0")
        array[...] = 1.0
        reduce_all(callback, [array])
        assert (array == 1.0).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_chunk_is_looked_at(world_size: int) -> None:
    run_ranks(world_size, spoil_every_chunk, timeout=200)

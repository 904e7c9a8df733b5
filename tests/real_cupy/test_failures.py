"""What fails while ranks wait in a call of NCCL: another thread aborts CuPy's communicator, and ranks go on."""

from __future__ import annotations

import os

import numpy as np
import pytest

import gradsync as gs


def ones():
    import cupy

    return cupy.asarray(np.ones(3, np.float32))


@pytest.mark.ranks(2, 3, on=("cupy",), ends={1: 3})
def test_a_rank_that_dies_is_named(comm) -> None:
    assert comm.all_reduce(ones()).get().tolist() == [comm.world_size] * 3
    if comm.rank == 1:
        os._exit(3)
    with pytest.raises(gs.RankFailed) as caught:
        for _ in range(100):  # the death may come between two calls
            comm.all_reduce(ones())
    assert caught.value.rank == 1
    with pytest.raises(gs.CommunicatorClosed):
        comm.all_reduce(ones())


@pytest.mark.ranks(2, on=("cupy",), fresh=True)
def test_abort_ends_the_call_of_the_other_rank(comm) -> None:
    for _ in range(10):  # after equal calls a rank launches the next one before it knows of the others
        comm.all_reduce(ones())
    if comm.rank == 1:
        comm.abort("on purpose")
    else:
        with pytest.raises(gs.RankFailed) as caught:
            comm.all_reduce(ones())
        assert caught.value.rank == 1

"""What fails while ranks wait in a call of NCCL: another thread ends CuPy's communicator, and ranks go on."""

from __future__ import annotations

import os

import numpy as np
import pytest

import gradsync as gs
from commands import wait_until


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
def test_a_call_is_revoked_and_has_returned_before_the_abort(comm) -> None:
    """An abort frees what the call still uses."""
    from real_cupy import nccl_between_processes

    comm.all_reduce(ones())
    if comm.rank == 1:
        comm.abort("on purpose")
    else:
        with pytest.raises(gs.RankFailed) as caught:
            comm.all_reduce(ones())
        assert caught.value.rank == 1
        wait_until(lambda: "abort" in nccl_between_processes.ends)
        assert nccl_between_processes.ends == ["revoke", "collective", "abort"]


@pytest.mark.ranks(3, on=("cupy",), ends={1: 3})
def test_the_others_rebuild_the_world(comm) -> None:
    sync = gs.AllreduceCallback("sum", name="survivors")
    for size in (3, 2):
        assert comm.world_size == size
        with sync.backward():
            sync("w", ones())
        assert sync.results()["w"].get().tolist() == [size] * 3
        if comm.member == 1:
            os._exit(3)
        if size == 3:
            with pytest.raises(gs.RankFailed):
                for _ in range(100):
                    comm.all_reduce(ones())
            comm = gs.rebuild()
    assert comm.objects.all_gather(comm.member) == [0, 2]

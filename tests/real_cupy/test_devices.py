"""What a rank does to the devices that are not its own."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gradsync as gs


@pytest.mark.ranks(2, on=("cupy",), fresh=True)
def test_no_thread_makes_a_context_on_the_device_of_another_rank(comm) -> None:
    """A context costs half a gigabyte of that GPU, and fails where GPUs are exclusive to a process."""
    import cupy

    from real_cupy.redirect import devices_with_a_context

    array = cupy.asarray(np.ones(3, np.float32))
    for stream in (None, cupy.cuda.Stream(non_blocking=True)):
        comm.all_reduce(array, stream=stream)
        comm.asynchronous.all_reduce(array, stream=stream).result()
    with comm.new_group(range(2)) as group:
        group.all_reduce(array)
    callback = gs.AllreduceCallback("mean", comm)
    with callback.backward(weight=2.0):
        callback("w", array)
    results = []
    thread = threading.Thread(target=lambda: results.append(comm.all_reduce(array)))  # its own device is the first
    thread.start()
    thread.join()
    assert results[0] is array
    assert devices_with_a_context() == {comm.rank}


@pytest.mark.ranks(2, on=("cupy",), fresh=True)
def test_two_ranks_on_one_device_are_refused(rank) -> None:
    with pytest.raises(gs.BackendUnavailable):
        gs.init_process_group("nccl", device="cuda:3")


@pytest.mark.ranks(2, on=("cupy",), fresh=True)
def test_device_chooses(rank) -> None:
    import cupy

    with gs.init_process_group("nccl", device=f"cuda:{4 - rank}") as comm:
        assert comm.device == f"cuda:{4 - rank}"
        assert cupy.cuda.Device().id == 4 - rank
        assert comm.all_reduce(cupy.asarray(np.ones(2))).get().tolist() == [2, 2]

"""The stand-in for NCCL under tests/stand_in: where NCCL would hang, it raises, or hangs when told to."""

from __future__ import annotations

import os
import threading

import pytest

from stand_in_processes import FLOAT, Rank, run


def _mismatch(r: Rank) -> str:
    communicator, array = r.communicator(), r.full(1)
    if r.rank == 0:
        r.launch(communicator, array)
    else:
        communicator.broadcast(array.data.ptr, array.data.ptr, 3, FLOAT, 1, 0)
    event = r.cupy.cuda.get_current_stream().record()
    event.synchronize()
    assert event.done
    with pytest.raises(r.nccl.NcclError) as caught:
        communicator.check_async_error()
    assert caught.value.status == 5
    with pytest.raises(r.nccl.NcclError):
        r.launch(communicator, array)
    communicator.abort()
    array += 1  # the device is sound
    array.get()
    return str(caught.value)


def test_a_mismatch_is_told_to_all_ranks() -> None:
    for text in run(_mismatch, 2):
        assert "rank 0: allReduce(count 4, float32, sum), rank 1: broadcast(count 3, float32, root 1)" in text


def _missing_peer(r: Rank) -> None:
    communicator, array = r.communicator(), r.full(1)
    if r.rank == 0:
        os.environ["GRADSYNC_STAND_IN_TIMEOUT"] = "0.2"  # not before: joining has that limit too
        r.launch(communicator, array)
        array.get()
        with pytest.raises(r.nccl.NcclError, match="a peer did not come in time; .*rank 1: nothing") as caught:
            communicator.check_async_error()
        assert caught.value.status == 6
    r.barrier.wait()


def test_a_peer_that_does_not_come() -> None:
    run(_missing_peer, 2)


def _lost_peer(r: Rank) -> None:
    communicator, array = r.communicator(), r.full(1)
    if r.rank == 1:
        communicator.abort()
        return
    r.launch(communicator, array)
    array.get()
    with pytest.raises(r.nccl.NcclError, match="a peer has left; .*rank 1: left"):
        communicator.check_async_error()


def test_a_peer_that_leaves() -> None:
    run(_lost_peer, 2)


def _hang(r: Rank) -> None:
    communicator, array = r.communicator(), r.full(1)
    if r.rank == 0:
        stream = r.cupy.cuda.Stream(non_blocking=True)
        r.cupy.cuda.Device().synchronize()
        r.launch(communicator, array, stream)
        r.launch(communicator, array, stream)
        event = stream.record()
        ending = threading.Thread(target=stream.synchronize)
        ending.start()
        ending.join(0.3)  # longer than a missing peer may take where it is an error
        assert ending.is_alive()
        assert not event.done
        communicator.check_async_error()
        communicator.abort()
        ending.join()
        assert event.done
        with pytest.raises(r.nccl.NcclError, match="aborted"):
            communicator.check_async_error()
        r.full(1).get()
    r.barrier.wait()


def test_a_hang_ends_by_abort() -> None:
    run(_hang, 2, GRADSYNC_STAND_IN_HANG="1", GRADSYNC_STAND_IN_TIMEOUT="0.1")


def _two_threads(r: Rank) -> None:
    communicator, array = r.communicator(), r.full(1)
    if r.rank == 0:
        r.launch(communicator, array)
        destroying = threading.Thread(target=communicator.destroy)
        destroying.start()
        while not communicator._calling.locked():
            threading.Event().wait(1e-3)
        with pytest.raises(r.nccl.NcclError, match="two threads"):
            r.launch(communicator, array)
        r.barrier.wait()
        destroying.join()
    else:
        r.barrier.wait()
        r.launch(communicator, array)
    assert array.get().tolist() == [2] * 4


def test_two_threads_at_once_are_refused() -> None:
    run(_two_threads, 2)


def _waits_to_join(r: Rank) -> None:
    joining = threading.Thread(target=r.nccl.NcclCommunicator, args=(2, r.nccl.get_unique_id(), 0), daemon=True)
    joining.start()
    joining.join(0.3)
    assert joining.is_alive()


def test_joining_without_a_peer_hangs() -> None:
    run(_waits_to_join, GRADSYNC_STAND_IN_HANG="1", GRADSYNC_STAND_IN_TIMEOUT="0.1")

"""The stand-in for NCCL under tests/stand_in: what it computes, and what it refuses."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest
from stand_in_processes import FLOAT, SUM, Gate, Rank, run


def _collectives(r: Rank) -> None:
    communicator, n = r.communicator(), r.world_size
    assert (communicator.size(), communicator.rank_id(), communicator.device_id()) == (n, r.rank, r.rank)
    values = [np.arange(1, 4) * (rank + 1) for rank in range(n)]
    # codes of NCCL: sum, prod, max, min, avg; types by name
    for name, datatype in (("int32", 2), ("uint64", 5), ("float16", 6), ("float32", 7), ("float64", 8)):
        operands = np.array(values).astype(name)
        for op, expected in enumerate(
            [operands.sum(0), operands.prod(0), operands.max(0), operands.min(0), operands.sum(0) / n]
        ):
            source, target = r.cupy.asarray(operands[r.rank]), r.cupy.empty(3, name)
            communicator.allReduce(source.data.ptr, target.data.ptr, 3, datatype, op, 0)
            rounding = 1e-3 if name == "float16" else 1e-6  # at each hop, and of 1 / n
            np.testing.assert_allclose(target.get(), expected.astype(name), rtol=rounding)
    half = r.cupy.full(1, 2**-8 if r.rank else 1.0, ml_dtypes.bfloat16)
    communicator.allReduce(half.data.ptr, half.data.ptr, 1, 9, SUM, 0)
    assert float(half) == float(ml_dtypes.bfloat16(1 + (n - 1) * 2**-8))  # rounded where a hop ends
    whole, part = r.cupy.empty(3 * n, np.int32), r.cupy.full(3, r.rank, np.int32)
    communicator.allGather(part.data.ptr, whole.data.ptr, 3, 2, 0)
    assert whole.get().tolist() == [rank for rank in range(n) for _ in range(3)]
    communicator.reduceScatter(whole.data.ptr, part.data.ptr, 3, 2, SUM, 0)
    assert part.get().tolist() == [r.rank * n] * 3
    communicator.broadcast(part.data.ptr, part.data.ptr, 3, 2, n - 1, 0)
    assert part.get().tolist() == [(n - 1) * n] * 3
    communicator.reduce(part.data.ptr, whole.data.ptr, 3, 2, SUM, 1, 0)
    assert whole[:3].get().tolist() == ([(n - 1) * n * n] * 3 if r.rank == 1 else [0] * 3)
    communicator.allReduce(0, 0, 0, 2, SUM, 0)  # nothing: no rank has to come
    communicator.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives(world_size) -> None:
    run(_collectives, world_size)


def _edges_of_values(r: Rank) -> None:
    communicator = r.communicator()
    array = r.cupy.asarray(np.array([np.nan, 1, np.nan] if r.rank else [2, np.nan, np.nan], np.float32))
    communicator.allReduce(array.data.ptr, array.data.ptr, 3, FLOAT, 2, 0)
    np.testing.assert_array_equal(array.get(), [2, 1, np.nan])  # a number wins over NaN
    whole = r.cupy.asarray(np.array([-3, 3], np.int32) * (r.rank == 0))
    communicator.allReduce(whole.data.ptr, whole.data.ptr, 2, 2, 4, 0)
    assert whole.get().tolist() == [-1, 1]  # towards zero
    large = r.full(r.rank + 1, 1_000_000)
    r.launch(communicator, large)
    assert float(large.min()) == float(large.max()) == 3


def test_the_edges_of_values() -> None:
    run(_edges_of_values, 2)


def _messages(r: Rank) -> None:
    communicator, peer = r.communicator(), 1 - r.rank
    mine, theirs = r.full(r.rank, 100_000), r.full(-1, 100_000)
    r.nccl.groupStart()
    communicator.recv(theirs.data.ptr, theirs.size, FLOAT, peer, 0)
    communicator.send(mine.data.ptr, mine.size, FLOAT, peer, 0)
    r.nccl.groupEnd()
    assert float(theirs.sum()) == peer * 100_000
    r.nccl.groupStart()
    for array in (mine, theirs):
        r.launch(communicator, array)
    r.nccl.groupEnd()
    assert [float(mine[0]), float(theirs[0])] == [1, 1]
    with pytest.raises(r.nccl.NcclError, match="groupEnd without"):
        r.nccl.groupEnd()
    # Both send first, without a group: neither receives.
    communicator.send(mine.data.ptr, 1, FLOAT, peer, 0)
    r.cupy.cuda.Stream.null.synchronize()
    with pytest.raises(
        r.nccl.NcclError, match=r"wait for each other; rank 0: send\(count 1, float32, peer 1\), rank 1"
    ):
        communicator.check_async_error()


def test_messages_and_groups() -> None:
    run(_messages, 2)


def _streams_of_one_communicator(r: Rank) -> None:
    communicator = r.communicator()
    first, second = (r.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    arrays = [r.full(1), r.full(2)]
    r.cupy.cuda.Device().synchronize()
    gate = Gate(first)
    r.launch(communicator, arrays[0], first)
    r.launch(communicator, arrays[1], second)
    event = second.record()
    r.barrier.wait()
    assert not event.done  # behind the one that was launched first
    gate.open()
    assert [array.get(stream=second).tolist()[0] for array in arrays] == [2, 4]


def test_one_communicator_on_two_streams_keeps_its_order() -> None:
    run(_streams_of_one_communicator, 2)


def _refusals(r: Rank) -> None:
    communicator, error = r.communicator(), r.nccl.NcclError
    array, host = r.full(0, 256), np.zeros(4, np.float32)
    ptr = array.data.ptr
    with r.cupy.cuda.Device(1 - r.rank):
        elsewhere, other_stream = r.full(0), r.cupy.cuda.Stream()
    for refused, text in [
        (lambda: communicator.allReduce(ptr, ptr, 4, 10, 0, 0), "invalid type 10"),
        (lambda: communicator.allReduce(ptr, ptr, 4, 7, 5, 0), "invalid reduction operation 5"),
        (lambda: communicator.broadcast(ptr, ptr, 4, 7, 2, 0), "invalid root 2"),
        (lambda: communicator.allReduce(0, ptr, 4, 7, 0, 0), "sendbuff 0x0 of 16 bytes is not in device memory"),
        (lambda: communicator.allReduce(ptr, host.ctypes.data, 4, 7, 0, 0), "recvbuff .* is not in device memory"),
        (lambda: communicator.allReduce(ptr, ptr, 257, 7, 0, 0), "is not in device memory"),
        (lambda: communicator.allReduce(ptr, elsewhere.data.ptr, 4, 7, 0, 0), "recvbuff is on device"),
        (lambda: communicator.allReduce(ptr, ptr + 4, 4, 7, 0, 0), "overlap"),
        (lambda: communicator.allReduce(ptr, ptr, 4, 7, 0, 12345), "has no stream"),
        (lambda: communicator.allReduce(ptr, ptr, 4, 7, 0, other_stream.ptr), "has no stream"),
    ]:
        with pytest.raises(error, match=f"NCCL_ERROR_INVALID_ARGUMENT: .*{text}") as caught:
            refused()
        assert caught.value.status == 4
    with pytest.raises(OverflowError):
        communicator.allReduce(ptr, ptr, -1, 7, 0, 0)
    communicator.allGather(ptr + 8 * r.rank, ptr, 2, 7, 0)  # in place, as NCCL defines it
    communicator.check_async_error()
    communicator.destroy()
    communicator.destroy()
    assert communicator.comm == 0
    for call in (communicator.size, communicator.check_async_error, lambda: r.launch(communicator, array)):
        with pytest.raises(error, match="aborted or destroyed"):
            call()


def test_what_is_refused_at_once() -> None:
    run(_refusals, 2)


def _refused_ids(r: Rank) -> None:
    with pytest.raises(r.nccl.NcclError, match="invalid rank"):
        r.nccl.NcclCommunicator(2, r.nccl.get_unique_id(), 2)
    with pytest.raises(ValueError, match="commId length 3"):
        r.nccl.NcclCommunicator(1, b"abc", 0)
    with pytest.raises(TypeError):
        r.nccl.NcclCommunicator(1, (0,) * 128, 0)
    with pytest.raises(r.nccl.NcclError, match="nobody serves"):
        r.nccl.NcclCommunicator(1, b"no such id".ljust(128, b"\0"), 0)
    with pytest.raises(r.nccl.NcclError, match=r"ranks \[1\] of 2 did not join"):
        r.nccl.NcclCommunicator(2, r.nccl.get_unique_id(), 0)
    assert (r.nccl.get_version(), r.nccl.get_build_version(), len(r.nccl.get_unique_id())) == (22403, 22501, 128)


def test_ids_and_ranks_that_are_refused() -> None:
    run(_refused_ids, FAKE_CUPY_TIMEOUT="0.2", FAKE_CUPY_NCCL_VERSION="22403")


def _join(r: Rank) -> str:
    os.environ["NCCL_HOSTID"] = os.environ.get("NCCL_HOSTID", "host").format(rank=r.rank)
    rank, world_size = (int(word.format(rank=r.rank)) for word in os.environ.get("PLACE", "{rank} 2").split())
    try:
        r.nccl.NcclCommunicator(world_size, r.unique_id(), rank).destroy()
    except r.nccl.NcclError as error:
        return str(error)
    return "joined"


@pytest.mark.parametrize(
    ("environment", "outcome"),
    [
        ({}, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0000:00:00.0"),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "joined"),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "FAKE_CUPY_NCCL_VERSION": "22900"}, "Duplicate GPU"),
        ({"NCCL_HOSTID": "host{rank}", "FAKE_CUPY_NCCL_VERSION": "22900"}, "joined"),
        ({"PLACE": "1 2"}, "rank 1 joined twice"),
        ({"PLACE": "0{rank} 1{rank}"}, "one joins"),
    ],
)
def test_ranks_that_cannot_join(environment, outcome) -> None:
    outcomes = run(_join, 2, FAKE_CUPY_DEVICES="1", **environment)
    assert all(outcome in text for text in outcomes), outcomes


def _refused_within_a_group(r: Rank) -> None:
    communicator, array = r.communicator(), r.full(1)
    r.nccl.groupStart()
    r.launch(communicator, array)
    with pytest.raises(r.nccl.NcclError, match="invalid root 9"):
        communicator.broadcast(array.data.ptr, array.data.ptr, 4, FLOAT, 9, 0)
    with pytest.raises(r.nccl.NcclError, match="invalid root 9"):
        r.nccl.groupEnd()
    r.launch(communicator, array)
    assert array.get().tolist() == [2] * 4  # launched once: nothing of the group was


def test_a_group_with_a_refused_call_launches_nothing() -> None:
    run(_refused_within_a_group, 2)

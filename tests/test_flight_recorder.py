"""The flight recorder remembers the last collectives, in order, and which of them still run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "10000000", "٣"])
def test_a_wrong_size_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GRADSYNC_FLIGHT_RECORDER_ENTRIES", text)
    with pytest.raises(gs.InvalidArgument, match="GRADSYNC_FLIGHT_RECORDER_ENTRIES needs to be an integer from 1 to"):
        local_communicator()


# What communicators record.


def headlines(comm: gs.Communicator) -> list[str]:
    return [entry.what.headline() for entry in comm.recorder.entries()]


def test_every_collective_is_recorded() -> None:
    comm = local_communicator()
    comm.all_reduce(np.ones((256, 1000), np.float32), "mean")
    comm.broadcast(np.ones(3))
    comm.barrier()
    gs.bcast_list_([np.ones(2), np.ones(5)], communicator=comm)
    gs.pack_allreduce_split([np.ones(2)], [(2,)], comm, "sum")
    assert headlines(comm) == [
        "all_reduce(mean) float32[256, 1000] 1,000 KB",
        "broadcast(root 0) float64[3] 24 bytes",
        "barrier",
        "bcast_list_ of 2 arrays from root 0",
        "all_reduce(sum) float64[2] 16 bytes",
    ]
    assert all(entry.ended is not None and not entry.failed for entry in comm.recorder.entries())


def test_a_bucket_names_its_parameters() -> None:
    comm = local_communicator()
    callback = gs.AllreduceCallback("sum", comm)
    with callback.backward():
        for name in ["conv1.weight", "conv1.bias", *(f"layer{i}" for i in range(12))]:
            callback(name, np.ones(1000, np.float32))
    assert headlines(comm) == [
        "all_reduce(sum) float32 54.7 KB [conv1.weight, conv1.bias, 12 more]",
        "flush(sum) after 14 gradients",
    ]


def test_the_recorder_shows_the_last_collectives_the_newest_first() -> None:
    comm = local_communicator()
    for _ in range(9):
        comm.barrier()
    comm.broadcast(np.ones(3))
    title, newest, *others = repr(comm.recorder).splitlines()
    assert title == "<FlightRecorder of group 'local': 10 collectives begun>"
    assert newest.startswith("#10 broadcast(root 0) float64[3] 24 bytes done in ")
    assert [line.partition(" ")[0] for line in others] == [f"#{number}" for number in range(9, 2, -1)]


def test_what_is_refused_before_it_begins_is_not_recorded() -> None:
    comm = local_communicator()
    with pytest.raises(gs.InvalidArgument):
        comm.all_reduce("no array")
    comm.close()
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()
    assert comm.recorder.begun == 0


def test_a_failed_collective_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = local_communicator()

    def fail(*arguments: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(comm._backend, "broadcast", fail)
    with pytest.raises(RuntimeError):
        comm.broadcast(np.ones(3))
    assert "failed after" in comm.recorder.describe()


def test_no_array_is_kept_alive() -> None:
    comm = local_communicator()
    callback = gs.AllreduceCallback("sum", comm)
    arrays = [np.ones(3) for _ in range(4)]
    comm.all_reduce(arrays[0])
    comm.broadcast(arrays[1])
    gs.bcast_list_(arrays[2:3], communicator=comm)
    with callback.backward():
        callback("w", arrays[3])
    references = [weakref.ref(array) for array in arrays]
    del arrays, callback
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert len(comm.recorder.entries()) == 5

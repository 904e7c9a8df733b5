"""Groups, process groups and callbacks that come and go leave nothing: descriptors, mappings, threads, children."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from commands import wait_until


def held():
    """What this process holds: its descriptors by kind, shared mappings, threads and child processes."""
    gc.collect()
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            descriptors.append(os.readlink(f"/proc/self/fd/{number}").partition(":[")[0])
    shared = sum(line.split()[1].endswith("s") for line in Path("/proc/self/maps").read_text().splitlines())
    children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    return sorted(descriptors), shared, len(os.listdir("/proc/self/task")), children


def groups(comm):
    with comm.new_group(range(comm.world_size)) as group, group.split(0, key=-group.rank) as inner:
        assert inner.asynchronous.all_gather(np.ones(3)).result().size == 3 * inner.world_size
        assert inner.objects.all_gather(inner.rank) == list(range(inner.world_size))
        group.all_reduce(np.ones(500_000))
    return weakref.ref(group)


def callbacks(comm):
    sync = gs.AllreduceCallback("mean", comm)
    for _ in range(2):
        with sync.backward():
            futures = [sync(name, np.ones(1000)) for name in "abc"]
    assert all(future.result()[0] == 1 for future in futures)
    return weakref.ref(sync)


def rebuilt_worlds(comm):
    """With groups that nobody closes."""
    world = gs.get_communicator()
    kept = [world.new_group(range(world.world_size)), gs.AllreduceCallback()]
    callbacks(world)
    gs.rebuild()
    return weakref.ref(kept[0])


def process_groups(comm):
    """With groups that nobody closes."""
    gs.destroy_process_group()
    world = gs.init_process_group(comm.backend)
    kept = [world.new_group(range(world.world_size)), world.split(0)]
    assert kept[0].all_reduce(np.ones(5))[0] == world.world_size
    assert all(not group.closed for group in kept)
    return weakref.ref(kept[0])


@pytest.mark.ranks(on={"shm": (1, 2), "local": (1,)}, fresh=True)
@pytest.mark.parametrize("cycle", [groups, callbacks, rebuilt_worlds, process_groups], ids=lambda cycle: cycle.__name__)
def test_nothing_stays(comm, cycle):
    for _ in range(5):  # what is made once, on first use, is no leak
        cycle(comm)
    gs.get_communicator().barrier()
    before = held()
    references = [cycle(comm) for _ in range(25)]
    gs.get_communicator().barrier()
    wait_until(lambda: held() == before, "what was held before")  # threads may take a moment to end
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 1  # that of the process group that lives


@pytest.mark.ranks(2, fresh=True)
def test_a_step_in_which_the_ranks_differ_keeps_nothing(comm):
    with comm.split(0) as group:
        sync = gs.AllreduceCallback("mean", group)
        with pytest.raises(gs.PlanMismatch), sync.backward():
            sync("w", np.ones(1000 + comm.rank))
    kept = weakref.ref(group)
    del group, sync
    gc.collect()
    assert kept() is None


@pytest.mark.ranks(2, on=("shm", "fake"), fresh=True)
def test_worlds_that_failed_and_were_rebuilt_are_collected(comm):
    gs.rebuild()  # the test holds `comm`
    gone = []
    for turn in range(10):
        comm = gs.get_communicator()
        gone.append(weakref.ref(comm))
        if comm.rank == turn % 2:
            comm.abort("in a test")
        else:
            with pytest.raises(gs.RankFailed):
                while True:
                    comm.barrier()
        del comm
        gs.rebuild().barrier()
    gc.collect()
    wait_until(lambda: not any(reference() for reference in gone), "that they are collected")

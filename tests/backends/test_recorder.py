"""The flight recorder remembers the last collectives; the report of the stacks says where the user's threads are."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

import numpy as np
import pytest

import gradsync as gs
from gradsync.diagnostics import stacks  # what a rank sends when others miss it: a user sees it only in errors


@pytest.fixture
def comm():
    with gs.init_process_group("local") as comm:
        yield comm
    gs.destroy_process_group()


def headlines(comm):
    return [entry.what.headline() for entry in comm.recorder.entries()]


def test_every_collective_is_recorded(comm):
    comm.all_reduce(np.ones((256, 1000), np.float32), "mean")
    comm.broadcast(np.ones(3))
    comm.barrier()
    gs.bcast_list_([np.ones(2), np.ones(5)], communicator=comm)
    gs.pack_allreduce_split([np.ones(2)], [(2,)], comm, "sum")
    with pytest.raises(gs.InvalidArgument):
        comm.all_reduce("no array")  # is refused before it begins
    assert headlines(comm) == [
        "all_reduce(mean) float32[256, 1000] 1,000 KB",
        "broadcast(root 0) float64[3] 24 bytes",
        "barrier",
        "bcast_list_ of 2 arrays from root 0",  # whether each rank can take them
        "bcast_list_ of 2 arrays from root 0",
        "all_reduce(sum) float64[2] 16 bytes",
    ]
    assert all(entry.ended is not None and not entry.failed for entry in comm.recorder.entries())
    title, newest, *others = repr(comm.recorder).splitlines()
    assert "6 collectives begun" in title
    assert newest.startswith("#6 all_reduce(sum)")
    assert [line.partition(" ")[0] for line in others] == ["#5", "#4", "#3", "#2", "#1"]


def test_a_bucket_names_its_parameters(comm):
    callback = gs.AllreduceCallback("sum", comm)
    with callback.backward():
        for name in ["conv1.weight", "conv1.bias", *(f"layer{i}" for i in range(12))]:
            callback(name, np.ones(1000, np.float32))
    assert headlines(comm) == ["all_reduce(sum) float32 54.7 KB [conv1.bias, conv1.weight, 12 more]"]


@pytest.mark.ranks(2, options={"collective_timeout_seconds": 1}, fresh=True)
def test_a_collective_that_failed_says_so(comm):
    if comm.rank == 0:
        with pytest.raises(gs.GradsyncError):
            comm.all_reduce(np.ones(3))
    else:
        with pytest.raises(gs.GradsyncError):
            while True:
                comm.split(0)  # another one than the other rank's, until that has given up
    assert comm.recorder.entries()[-1].failed
    assert "failed after" in comm.recorder.describe()


def test_no_array_is_kept_alive(comm):
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


# -- Stacks ------------------------------------------------------------------------------------------------------------


def wait_here(ready, end):
    ready.set()
    end.wait()  # where it waits


def test_equal_stacks_are_one_and_the_main_thread_comes_first():
    end = threading.Event()
    names = ["loader 0", "loader 1", "loader 2", "loader 3", "gradsync-liveness"]
    threads = []
    for name in names:
        ready = threading.Event()
        threads.append(threading.Thread(target=wait_here, args=(ready, end), name=name))
        threads[-1].start()
        assert ready.wait(60)
    try:
        text = ""
        while "4 threads (" not in text:  # until they have come to their wait, which no event can tell
            text = stacks.stack_report()
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert "4 threads (loader 0, loader 1, loader 2, ...), innermost call first:" in text
    assert text.count("in wait_here\n    end.wait()  # where it waits") == 1  # gradsync's own thread is left out
    assert text.startswith(f"MainThread, innermost call first:\n  {__file__}:")


def deep(calls):
    return stacks.stack_report() if calls == 0 else deep(calls - 1)


def test_a_long_report_keeps_the_innermost_calls():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        text = deep(5000)
    finally:
        sys.setrecursionlimit(limit)
    assert 1 <= text.count("in deep") < 5000
    assert "\n  ..." in text


def test_a_file_system_that_hangs_costs_no_more_than_the_lines(tmp_path):
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)  # in place of a file on a server that is gone: to open it hangs
    names = {"stack_report": stacks.stack_report}
    exec(compile("def train():\n    return stack_report()\n", pipe, "exec"), names)
    for _ in range(2):
        lines = names["train"]().splitlines()
        assert lines[1] == f"  {pipe}:2 in train"
        assert lines[2].startswith(f"  {__file__}:")
    pipe.write_text("lets it go on")


def test_what_called_the_users_code_is_left_out(cli, script):
    path = script("from gradsync.diagnostics.stacks import stack_report\nprint(stack_report())\n")
    done = cli("run", "-n", 1, "--no-prefix", path)
    assert done.out == f"MainThread, innermost call first:\n  {path}:2 in <module>\n    print(stack_report())\n"

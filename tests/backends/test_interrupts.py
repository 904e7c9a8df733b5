"""Ctrl-C may strike at any call of a wait: the communicator can be ended all the same, and the others learn of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from functools import partial

import numpy as np
import pytest

import gradsync as gs
from interrupts import interrupted

WAIT_SECONDS = 0.002  # for what does not come


ENDS = (KeyboardInterrupt, TimeoutError, gs.GradsyncError)


def comes_back(function):
    """Calls a function in a thread, and waits for it."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.mark.ranks(2, fresh=True)
def test_at_any_call_of_a_collective(comm):
    for number in range(1, 120, 3):
        group = comm.split(0)
        if comm.rank == 0:
            assert interrupted(group.barrier, number, ends=ENDS)
            assert comes_back(group.close), f"call {number} of barrier() was interrupted"
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(gs.RankFailed):
                group.barrier()


@pytest.mark.ranks(2, fresh=True)
def test_at_any_call_of_a_wait_for_a_future(comm):
    number, struck = 1, True
    while struck:
        group = comm.split(0)
        struck = False
        if comm.rank == 0:
            future = group.asynchronous.all_reduce(np.ones(3))
            struck = interrupted(partial(future.result, timeout=WAIT_SECONDS), number, ends=ENDS)
            assert comes_back(partial(group.abort, "enough")), f"call {number} of result() was interrupted"
            with pytest.raises(gs.GradsyncError):
                future.result(timeout=60)
        struck = comm.objects.broadcast(struck)
        number += 3
        if comm.rank == 1:
            with pytest.raises(gs.RankFailed):
                group.barrier()
    assert number > 10


def test_at_any_call_of_a_wait_for_spawned_ranks():
    number, struck = 1, True
    while struck:
        context = gs.spawn(signal.pause, (), 1, join=False)
        struck = interrupted(partial(context.join, WAIT_SECONDS), number, ends=ENDS)
        for process in context.processes:
            process.kill()  # a Ctrl-C before join has begun leaves it

        def await_end(context=context):
            with contextlib.suppress(gs.RankFailed):
                context.join()

        assert comes_back(await_end), f"call {number} of join() was interrupted"
        number += 5
    assert number > 6

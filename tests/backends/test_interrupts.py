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
@pytest.mark.parametrize("what", ["barrier", "all_reduce", "recv", "objects.all_gather", "close"])
def test_at_any_call_of_what_waits(comm, what):
    """Its messages have failed then: close() waits for them, and the others wait with what is called."""
    for number in range(1, 150, 3 if what == "barrier" else 7):
        group = comm.split(0)
        if comm.rank == 0:
            calls = {
                "barrier": group.barrier,
                "all_reduce": partial(group.all_reduce, np.asfortranarray(np.ones((3, 4)))),
                "recv": partial(group.recv, np.ones(3), 1),
                "objects.all_gather": partial(group.objects.all_gather, 1),
                "close": group.close,
            }
            future = group.asynchronous.recv(np.ones(3), 1)
            assert interrupted(calls[what], number, ends=ENDS)
            assert comes_back(partial(group.abort, "enough")), f"call {number} of {what} was interrupted"
            assert future.done()
            with pytest.raises(gs.GradsyncError):
                future.result(timeout=60)
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(gs.RankFailed):
                group.barrier()


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("what", ["recv", "result", "done"])
def test_at_any_call_about_a_message_that_does_not_come(comm, what):
    number, struck = 1, True
    while struck:
        group = comm.split(0)
        struck = False
        if comm.rank == 0:
            form, array = group.asynchronous, np.ones(3)
            future = form.recv(array, 1)
            call = {
                "recv": partial(form.recv, array, 1),
                "result": partial(future.result, timeout=WAIT_SECONDS),
                "done": future.done,
            }[what]
            struck = interrupted(call, number, ends=ENDS)
            assert comes_back(partial(group.abort, "enough")), f"call {number} of {what} was interrupted"
            assert future.done()
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

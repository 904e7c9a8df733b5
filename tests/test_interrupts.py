"""Ctrl-C may strike at any call of a wait: the communicator can be ended all the same, and the others are told."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import gradsync as gs
from contract import IS_EVERYWHERE, expect
from kits import interrupt
from places import SHM

WAIT = 0.002  # seconds for what does not come
ENDS_WITHIN_SECONDS = 20.0  # milliseconds on an idle machine


def ends(function: Callable[[], Any]) -> bool:
    """Calls a function in a thread; returns whether it comes back."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(ENDS_WITHIN_SECONDS)
    return not thread.is_alive()


def interrupt_each_call_of_a_wait(comm: Any) -> int:
    number, struck = 0, True
    while struck:
        group = comm.split(color=0)
        number, struck = number + 1, False
        if comm.rank == 0:
            future = group.asynchronous.all_reduce(np.ones(3))
            struck = interrupt(lambda future=future: future.result(timeout=WAIT), number)
            assert ends(lambda group=group: group.abort("enough")), f"call {number} of result() was interrupted"
            expect(gs.GradsyncError, lambda future=future: future.result(timeout=ENDS_WITHIN_SECONDS))
        struck = comm.objects.broadcast(struck)
        if comm.rank == 1:
            expect(gs.RankFailed, group.barrier)
    return number


def interrupt_each_call_of_a_collective(comm: Any, calls: int) -> None:
    for number in range(1, calls + 1, 1 if IS_EVERYWHERE else 2):
        group = comm.split(color=0)
        if comm.rank == 0:
            assert interrupt(group.barrier, number)
            assert ends(group.close), f"call {number} of barrier() was interrupted"
        comm.barrier()
        if comm.rank == 1:
            expect(gs.RankFailed, group.barrier)


def test_at_any_call_of_a_collective() -> None:
    SHM.run(2, interrupt_each_call_of_a_collective, 120)


def test_at_any_call_of_a_wait_for_a_future() -> None:
    assert min(SHM.run(2, interrupt_each_call_of_a_wait)) > 10


def test_at_any_call_of_a_wait_for_spawned_ranks() -> None:
    number, struck = 0, True
    while struck:
        number += 1 if IS_EVERYWHERE else 3
        context = gs.spawn(signal.pause, (), 1, join=False)
        struck = interrupt(partial(context.join, WAIT), number)
        for process in context.processes:
            process.kill()  # a Ctrl-C before join has begun leaves it

        def await_end(context: Any = context) -> None:
            with contextlib.suppress(gs.RankFailed):
                context.join()

        assert ends(await_end), f"call {number} of join() was interrupted"
    assert number > 6

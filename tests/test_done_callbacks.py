"""Done-callbacks must not call collectives, on any backend: refused there, and told again where somebody hears it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import comm as functions
from kits import make_kit, values_of
from places import SHM, STAND_IN, STAND_IN_STAGED, Place, always_on, on

LOCAL = Place("local", "numpy", {"backend": "local"})
PLACES = [*on(LOCAL, 1), *on(SHM, 2, 3), *on(STAND_IN, 1, 2), *always_on(STAND_IN_STAGED, 2)]
SEVERAL = [*on(SHM, 2, 3), *on(STAND_IN, 2)]
WAIT = 60.0  # seconds for what must come at all


class Attempt:
    """A done-callback that calls something, and keeps what it got.

    Args:
        call: what it calls.
        after: it waits for that first.
    """

    def __init__(self, call: Callable[[], Any], after: threading.Event | None = None) -> None:
        self._call = call
        self._after = after
        self._got: SimpleQueue[BaseException | None] = SimpleQueue()

    def __call__(self, future: Any) -> None:
        if self._after is not None:
            assert self._after.wait(WAIT)
        try:
            self._call()  # in the callback
        except BaseException as error:
            self._got.put(error)
            raise
        self._got.put(None)

    def refused(self) -> str:
        """Waits for it, and returns the text of the refusal, which names the line of the call."""
        error = self._got.get(timeout=WAIT)
        assert isinstance(error, gs.InvalidArgument), error
        assert f" in a done-callback, at {__file__}:" in str(error)
        assert "call the collective after flush() or result() has returned" in str(error)
        return str(error)

    def went_well(self) -> bool:
        return self._got.get(timeout=WAIT) is None


def told_again(refused: str, call: Callable[[], Any]) -> None:
    """Checks that a call of the program raises what a done-callback was refused, and whence it came."""
    error = expect(gs.InvalidArgument, call)
    assert str(error) == refused
    assert isinstance(error.__cause__, gs.InvalidArgument)
    assert error.__cause__.__traceback__ is not None


def collectives(comm: Any, kit: Any, sync: Any) -> dict[str, Callable[[], Any]]:
    array = kit.put(np.ones(2 * comm.world_size))
    peer = (comm.rank + 1) % comm.world_size
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(array),
        "broadcast": lambda: comm.broadcast(array),
        "all_gather": lambda: comm.all_gather(array),
        "reduce_scatter": lambda: comm.reduce_scatter(array),
        "all_to_all": lambda: comm.all_to_all(array),
        "barrier": comm.barrier,
        "exchange": lambda: comm.exchange(array, dest=peer, out=array, source=peer),
        "objects": lambda: comm.objects.all_gather("an object"),
        "asynchronous all_reduce": lambda: comm.asynchronous.all_reduce(array),
        "asynchronous barrier": comm.asynchronous.barrier,
        "a gradient": lambda: sync("late", array),
        "flush": sync.flush,
        "gradient_buffers": sync.gradient_buffers,
        "average_gradients": lambda: gs.average_gradients({"w": array}, communicator=comm),
        "bcast_list_": lambda: gs.bcast_list_([array], 0, comm),
        "broadcast_tree": lambda: gs.broadcast_tree({"w": array}, communicator=comm),
        "new_group": lambda: comm.new_group([comm.rank]),
        "split": lambda: comm.split(0),
        "synchronize": functions.synchronize,
        "reduce_dict": lambda: functions.reduce_dict({"loss": 1.0}),
    }
    if comm.world_size > 1:
        calls["send"] = lambda: comm.send(array, peer)
        calls["recv"] = lambda: comm.recv(array, peer)
    return calls


def refuse_each(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    parameters = {"w": ((3,), "float32")}
    sync = gs.AllreduceCallback("sum", comm, parameters=parameters, gradient_as_bucket_view=True)
    if comm.device == "cpu":
        sync.gradient_buffers()
    for number, call in enumerate(collectives(comm, kit, sync).values()):
        attempt = Attempt(call)
        future = comm.asynchronous.all_reduce(kit.put(np.ones(3)))
        if number % 2:
            future.result()
        future.add_done_callback(attempt)
        told_again(attempt.refused(), (comm.barrier, future.result, comm.asynchronous.barrier)[number % 3])
        assert float(values_of(future, kit)[0]) == comm.world_size
        comm.barrier()


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_every_collective_is_refused_and_the_error_comes_again_once(place: Place, world_size: int) -> None:
    place.run(world_size, refuse_each, place.kit)


def refuse_in_gradients(comm: Any, kit_name: str) -> list[float]:
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    flushed = threading.Event()
    runs_beside = comm.device != "cpu"  # callbacks run on a thread of their own then
    attempt = Attempt(lambda: sync("late", kit.put(np.ones(3))), flushed if runs_beside else None)
    first = sync("a", kit.put(np.ones(3)))
    first.add_done_callback(attempt)
    if runs_beside:
        sync.flush()
        flushed.set()
        told_again(attempt.refused(), sync.flush)
    else:
        error = expect(gs.InvalidArgument, sync.flush)  # it was called in the flush
        assert str(error) == attempt.refused()
    results = []
    for call in (first.result, lambda: sync("b", kit.put(np.ones(3))), sync.flush):
        future = sync("a", kit.put(np.ones(3)))
        sync.flush()
        attempt = Attempt(comm.barrier)
        future.result()
        if runs_beside:
            kit.get(future.result())
        future.add_done_callback(attempt)  # it is done
        told_again(attempt.refused(), call)
        results.append(float(values_of(future, kit)[0]))
    return results


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_callbacks_of_gradients_are_no_exception(place: Place, world_size: int) -> None:
    assert place.run(world_size, refuse_in_gradients, place.kit) == [[float(world_size)] * 3] * world_size


def what_is_allowed(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    seen: list[Any] = []
    future = sync("a", kit.put(np.ones(3)))
    attempt = Attempt(lambda: seen.append((future.result(), future.numpy(), future.shape, future.done(), sync.norm)))
    future.add_done_callback(attempt)
    sync.flush()
    assert attempt.went_well()
    assert seen[0][1][0] == comm.world_size
    comm.barrier()


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_what_is_no_collective_is_allowed(place: Place, world_size: int) -> None:
    place.run(world_size, what_is_allowed, place.kit)


def one_rank_calls(comm: Any, kit_name: str, how: str) -> None:
    """Rank 0's callback calls a collective; then all go on until an error."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=24)
    attempt = Attempt(comm.barrier)
    for step in range(100):
        with sync.backward():
            for name in "abc":
                future = sync(name, kit.put(np.ones(3)))
                if comm.rank == 0 and step == 0 and name == "b":
                    future.add_done_callback(attempt)
        if comm.rank == 0:
            attempt.refused()
        if how == "collective":
            comm.all_reduce(kit.put(np.ones(3)))


@pytest.mark.parametrize("how", ["steps", "collective"])
@pytest.mark.parametrize(("place", "world_size"), SEVERAL)
def test_the_others_of_a_rank_that_did_it_are_told(place: Place, world_size: int, how: str) -> None:
    first, *others = place.outcomes(world_size, one_rank_calls, place.kit, how)
    assert isinstance(first.error, gs.InvalidArgument), first
    assert "barrier in a done-callback, at " in str(first.error)
    for outcome in others:
        assert isinstance(outcome.error, gs.RankFailed), outcome


def test_it_is_the_line_of_the_callback_that_is_named() -> None:
    lines = Path(__file__).read_text().splitlines()
    called = next(number for number, line in enumerate(lines, 1) if line.endswith("# named here"))
    with gs.init_process_group("local", rank=0, world_size=1) as comm:
        sync = gs.AllreduceCallback("sum", comm)

        def report(_future: Any) -> None:
            comm.barrier()  # named here

        sync("w", np.ones(3)).add_done_callback(report)
        with pytest.raises(
            gs.InvalidArgument, match=f"rank 0/1: barrier in a done-callback, at .*:{called} in report: "
        ):
            sync.flush()
        comm.barrier()


def refuse_after_the_last_call(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    over = threading.Event()
    attempt = Attempt(comm.barrier, over)
    future = comm.asynchronous.all_reduce(kit.put(np.ones(3)))
    future.add_done_callback(attempt)
    future.result()
    over.set()
    error = attempt.refused()
    assert str(expect(gs.InvalidArgument, gs.destroy_process_group)) == error
    gs.destroy_process_group()


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_leaving_the_group_raises_what_no_call_has_raised(place: Place, world_size: int) -> None:
    place.run(world_size, refuse_after_the_last_call, place.kit)


def end_at_once(comm: Any, kit_name: str) -> None:
    """Nothing waits for the callbacks but the end of their communicators: of a group, then of the world."""
    kit, called = make_kit(comm, kit_name), []

    def dawdle(future: Any) -> None:
        time.sleep(0.1)
        called.append(future)

    group = comm.split(0)
    for communicator, end in ((group, group.close), (comm, gs.destroy_process_group)):
        future = communicator.asynchronous.all_reduce(kit.put(np.ones(3)))
        future.add_done_callback(dawdle)
        end()
        assert called.pop() is future


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_callbacks_are_called_before_their_communicator_ends(place: Place, world_size: int) -> None:
    """A program's last ones were lost on a GPU, and with them the error of one that had called a collective."""
    place.run(world_size, end_at_once, place.kit)


LAST_CALLBACK = """
import threading
import numpy as np
import gradsync as gs

comm = gs.init_process_group("local", rank=0, world_size=1)
over, refused = threading.Event(), threading.Event()

def report(_future):
    over.wait(60)
    try:
        comm.barrier()
    finally:
        refused.set()

future = comm.asynchronous.all_reduce(np.ones(3))
future.add_done_callback(report)
future.result()
over.set()
refused.wait(60)
"""


def test_a_program_whose_last_callback_was_refused_logs_it() -> None:
    done = subprocess.run([sys.executable, "-c", LAST_CALLBACK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done
    assert "error: rank 0/1: barrier in a done-callback" in done.stderr.splitlines()[-1]

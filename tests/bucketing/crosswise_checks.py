"""Two callbacks of one program, and ranks that use them in another order; run inside rank processes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import gradsync as gs
from contract import expect
from kits import make_kit, values_of

Step = Callable[[Any, float], float]


def stepper(comm: Any, kit_name: str) -> Step:
    """Returns a function that makes one step of a callback, and returns what its one gradient was reduced to."""
    kit = make_kit(comm, kit_name)

    def step(callback: Any, value: float) -> float:
        with callback.backward():
            future = callback("w", kit.put(np.full(4, float(value))))
        return float(values_of(future, kit)[0])

    return step


def is_odd_one(comm: Any) -> bool:
    return bool(comm.rank == comm.world_size - 1)


def cross(comm: Any, first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Calls the two, on the last rank the other way round."""
    for call in (second, first) if is_odd_one(comm) else (first, second):
        call()


def line_of(made: int) -> str:
    """Returns the line that made the generator (0) or the discriminator (1) in `make_two`."""
    return f"crosswise_checks.py:{make_two.__code__.co_firstlineno + 2 + made}"


def make_two(comm: Any, **knobs: Any) -> tuple[Any, Any]:
    """Makes two callbacks, at two lines."""
    generator = gs.AllreduceCallback("mean", comm, **knobs)
    discriminator = gs.AllreduceCallback("mean", comm, **knobs)
    return generator, discriminator


def cross_at_first(comm: Any, kit_name: str, knobs: dict[str, Any]) -> None:
    """The very first use is crosswise: all ranks learn it, and can go on in one order."""
    step = stepper(comm, kit_name)
    for _ in range(2):
        generator, discriminator = make_two(comm, **knobs)
        error = expect(
            gs.PlanMismatch, lambda g=generator, d=discriminator: cross(comm, lambda: step(g, 1), lambda: step(d, 1000))
        )
        assert sorted(error.descriptions) == list(range(comm.world_size))
        for rank, text in error.descriptions.items():
            assert line_of(int(rank == comm.world_size - 1)) in text, text
        assert 'name="generator"' in str(error)
        assert "the ranks use different callbacks" in str(error)
        for _ in range(3):
            assert (step(generator, 1), step(discriminator, 1000)) == (1.0, 1000.0)


def cross_later(comm: Any, kit_name: str) -> None:
    """The first steps are right; then one rank takes them the other way round."""
    step = stepper(comm, kit_name)
    generator, discriminator = make_two(comm)
    for _ in range(3):
        assert (step(generator, 1), step(discriminator, 1000)) == (1.0, 1000.0)
    error = expect(gs.PlanMismatch, lambda: cross(comm, lambda: step(generator, 1), lambda: step(discriminator, 1000)))
    for rank, text in error.descriptions.items():
        number = 1 + (rank == comm.world_size - 1)
        assert f"(callback {number}, made at {line_of(number - 1)})" in text, text
    assert "the ranks use different callbacks" in str(error)


def cross_from_one_line(comm: Any, kit_name: str) -> None:
    """Callbacks that a helper makes: what differs is who called it; those of one loop differ in their number."""
    step = stepper(comm, kit_name)

    def make() -> Any:
        return gs.AllreduceCallback("mean", comm)

    generator = make()
    discriminator = make()
    error = expect(gs.PlanMismatch, lambda: cross(comm, lambda: step(generator, 1), lambda: step(discriminator, 1000)))
    assert "difference, line 1:\n    rank 0: called from crosswise_checks.py:" in str(error)
    several = [make() for _ in range(3)]
    error = expect(gs.PlanMismatch, lambda: cross(comm, lambda: step(several[1], 1), lambda: step(several[2], 1000)))
    assert "    rank 0: number 2 of the callbacks made at this line" in str(error)
    assert "the ranks use different callbacks" in str(error)
    assert f"    rank {comm.world_size - 1}: number 3 of the callbacks made at this line" in str(error)


def cross_names(comm: Any, kit_name: str) -> None:
    """With names it does not matter where callbacks are made; crosswise they are found all the same."""
    step = stepper(comm, kit_name)
    if is_odd_one(comm):
        discriminator = gs.AllreduceCallback("mean", comm, name="discriminator")
        generator = gs.AllreduceCallback("mean", comm, name="generator")
    else:
        generator = gs.AllreduceCallback("mean", comm, name="generator")
        discriminator = gs.AllreduceCallback("mean", comm, name="discriminator")
    error = expect(gs.PlanMismatch, lambda: cross(comm, lambda: step(generator, 1), lambda: step(discriminator, 1000)))
    assert "rank 0: the first use of callback 'generator' (made at crosswise_checks.py:" in str(error)
    assert f"rank {comm.world_size - 1}: the first use of callback 'discriminator' (made at" in str(error)
    for _ in range(3):
        assert (step(generator, 1), step(discriminator, 1000)) == (1.0, 1000.0)
    error = expect(gs.PlanMismatch, lambda: cross(comm, lambda: step(generator, 1), lambda: step(discriminator, 1000)))
    assert "(callback 'generator', made at crosswise_checks.py:" in str(error)
    assert "(callback 'discriminator', made at crosswise_checks.py:" in str(error)


def name_on_one_rank(comm: Any, kit_name: str) -> None:
    step = stepper(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm, name="generator" if comm.rank == 0 else None)
    error = expect(gs.PlanMismatch, lambda: step(callback, 1))
    assert "rank 0: the first use of callback 'generator' (made at crosswise_checks.py:" in str(error)
    assert "rank 1: the first use of a callback (made at crosswise_checks.py:" in str(error)
    other = gs.AllreduceCallback("mean", comm, name="a" if comm.rank == 0 else "b")
    expect(gs.PlanMismatch, lambda: step(other, 1), "callback 'a' (made at")


def cross_first_with_later(comm: Any, kit_name: str) -> None:
    """One rank's first use of a callback meets the others' later use of another one."""
    step = stepper(comm, kit_name)
    generator, discriminator = make_two(comm)
    assert step(generator, 1) == 1.0
    error = expect(gs.PlanMismatch, lambda: step(discriminator if is_odd_one(comm) else generator, 1))
    assert f"(callback 1, made at {line_of(0)})" in error.descriptions[0]
    assert f"the first use of a callback (made at {line_of(1)}" in error.descriptions[comm.world_size - 1]
    assert "the ranks use different callbacks" in str(error)


EVENTS = (
    "empty flush",
    "flush",
    "bucket",
    "gradient_buffers",
    "missing",
    "zero",
    "hook",
    "average_gradients",
    "norm",
    "views",
)


def cross_event(comm: Any, kit_name: str, event: str) -> None:
    """Whatever is first done with a callback finds out that it is another one on another rank."""
    kit = make_kit(comm, kit_name)
    parameters = dict.fromkeys("wb", ((4,), "float64"))
    knobs: dict[str, dict[str, Any]] = {
        "gradient_buffers": {"parameters": parameters, "gradient_as_bucket_view": True},
        "views": {"parameters": parameters, "gradient_as_bucket_view": True},
        "missing": {"parameters": parameters},
        "zero": {"parameters": parameters, "missing": "zero"},
        "bucket": {"threshold_bytes": 1},
        "norm": {"clip_norm": 1.0, "nonfinite": "skip"},
    }

    def use(callback: Any) -> None:
        grad = kit.put(np.ones(4))
        if event == "gradient_buffers":
            callback.gradient_buffers()
        elif event == "average_gradients":
            gs.average_gradients({"w": grad}, callback)
        elif event == "hook":
            callback.register_hook(hook)
            with callback.backward():
                callback("w", grad)
        elif event == "bucket":
            callback("w", grad)
            callback("b", kit.put(np.ones(4)))
            callback.flush()
        else:
            with callback.backward():
                if event != "empty flush":
                    callback("w", grad)
                if event == "views":
                    callback("b", kit.put(np.ones(4)))

    def hook(bucket: Any) -> None:
        bucket.communicator.all_reduce(bucket.buffer, "sum")

    generator, discriminator = make_two(comm, **knobs.get(event, {}))
    error = expect(gs.PlanMismatch, lambda: cross(comm, lambda: use(generator), lambda: use(discriminator)))
    assert "the ranks use different callbacks" in str(error), str(error)
    for callback in (generator, discriminator):
        try:
            use(callback)
        except gs.MissingGradient:
            assert event == "missing"


def start_with_an_empty_flush(comm: Any, kit_name: str) -> None:
    """Ranks whose first event differs make the same number of exchanges before they find out."""
    kit = make_kit(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm)
    if is_odd_one(comm):
        callback("w", kit.put(np.ones(4)))
    error = expect(gs.PlanMismatch, callback.flush)
    assert "flush (mean) after 0 gradients" in str(error)
    assert "all_reduce (mean) of a bucket of 1 gradient" in str(error)
    assert "callback" not in error.descriptions[0]
    assert stepper(comm, kit_name)(callback, 3) == 3.0


# -- Programs that are right ---------------------------------------------------------------------------------------


def make_more_on_one_rank(comm: Any, kit_name: str) -> None:
    """Callbacks that only one rank makes and never uses, before, between and after those that all use."""
    step = stepper(comm, kit_name)
    spare = []
    for epoch in range(3):
        if comm.rank == 0:
            spare.append(gs.AllreduceCallback("mean", comm))
        generator = gs.AllreduceCallback("mean", comm)
        if comm.rank == 0:
            spare += [gs.AllreduceCallback("mean", comm), gs.AllreduceCallback("sum")]
        discriminator = gs.AllreduceCallback("mean", comm)
        if epoch == 1 and is_odd_one(comm):
            spare.append(gs.AllreduceCallback("mean", comm))
        for _ in range(2):
            assert (step(generator, epoch), step(discriminator, 1000)) == (epoch, 1000.0)


def make_at_different_lines(comm: Any, kit_name: str) -> None:
    step = stepper(comm, kit_name)
    for _ in range(3):
        if comm.rank == 0:
            generator = gs.AllreduceCallback("mean", comm)
            discriminator = gs.AllreduceCallback("mean", comm)
        else:
            discriminator = gs.AllreduceCallback("mean", comm)
            generator = gs.AllreduceCallback("mean", comm)
        for _ in range(2):
            assert (step(generator, 1), step(discriminator, 1000)) == (1.0, 1000.0)


class InACircle:
    def __init__(self, comm: Any) -> None:
        self.callback = gs.AllreduceCallback("mean", comm)
        self.itself = self


def drop_one_in_a_circle(comm: Any, kit_name: str) -> None:
    """What one rank has made and cannot use any more does not count, also before Python has collected it."""
    step = stepper(comm, kit_name)
    gc.disable()
    try:
        owners = []
        for _ in range(2 if comm.rank == 0 else 1):
            owners = [InACircle(comm)]
        assert step(owners[0].callback, 5) == 5.0
    finally:
        gc.enable()


def make_in_threads(comm: Any, kit_name: str, rounds: int) -> None:
    """Two threads make a callback each, in whatever order; then they are used in one order."""
    step = stepper(comm, kit_name)
    for number in range(rounds):
        made: dict[str, Any] = {}
        barrier = threading.Barrier(2)

        def make(which: str, made: dict[str, Any] = made, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            made[which] = gs.AllreduceCallback("mean", comm)

        threads = [threading.Thread(target=make, args=(which,)) for which in ("generator", "discriminator")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (step(made["generator"], number), step(made["discriminator"], 1000)) == (number, 1000.0)


def train_in_threads(comm: Any, kit_name: str, rounds: int) -> None:
    """Two threads train a model each, on communicators of their own."""
    step = stepper(comm, kit_name)
    groups = [comm.new_group(list(range(comm.world_size))) for _ in range(2)]
    results: list[list[float]] = [[], []]

    def train(which: int) -> None:
        for number in range(rounds):
            results[which].append(step(gs.AllreduceCallback("mean", groups[which]), number + 1000 * which))

    threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[number + 1000.0 * which for number in range(rounds)] for which in range(2)]


def use_on_two_communicators(comm: Any, kit_name: str) -> None:
    """A callback of the world goes on with the communicator that stands in for it; there the ranks meet once more."""
    step = stepper(comm, kit_name)
    generator, discriminator = gs.AllreduceCallback(), gs.AllreduceCallback()
    assert (step(generator, 1), step(discriminator, 1000)) == (1.0, 1000.0)
    for _ in range(2):
        with gs.override_backend(comm.backend):
            assert (step(discriminator, 1000), step(generator, 1)) == (1000.0, 1.0)
        assert (step(generator, 1), step(discriminator, 1000)) == (1.0, 1000.0)
    inner = gs.new_group(list(range(comm.world_size)))
    both = gs.AllreduceCallback("mean", inner), gs.AllreduceCallback()
    assert (step(both[1], 1), step(both[0], 1000)) == (1.0, 1000.0)


def count_collectives(comm: Any, kit_name: str) -> list[int]:
    """Returns how many collectives each step of a callback takes."""
    step = stepper(comm, kit_name)
    callback = gs.AllreduceCallback("mean", comm)
    counts = []
    for _ in range(4):
        before = comm.recorder.begun
        step(callback, 1)
        counts.append(comm.recorder.begun - before)
    return counts


def what_is_recorded(comm: Any, kit_name: str) -> list[str]:
    """Returns the flight recorder's lines of a callback without a name, alone and beside another, and of one with."""
    step = stepper(comm, kit_name)
    before = comm.recorder.begun
    alone = gs.AllreduceCallback("mean", comm)
    step(alone, 1)
    lines = [entry.what.headline() for entry in comm.recorder.entries()[before:]]
    named = gs.AllreduceCallback("mean", comm, name="generator")
    step(named, 1)
    step(alone, 1)
    assert comm.recorder.entries()[-1].what.headline().endswith(" (callback 1)")
    return lines + [entry.what.headline() for entry in comm.recorder.entries()[before + len(lines) :]]

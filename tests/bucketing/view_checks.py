"""What AllreduceCallback(gradient_as_bucket_view=True) must do on every backend; run inside rank processes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from naive_reference import (
    SPECS,
    THRESHOLDS,
    by_rank,
    expect_equal,
    fill,
    on_host,
    put_all,
    reduced,
    step,
    values_for,
)

import gradsync as gs
from contract import expect
from kits import make_kit

SMALL = {name: SPECS[name] for name in ("matrix", "one", "double", "scalar", "empty", "two", "half")}


def bounds_of(array: Any) -> tuple[int, int]:
    begin = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return begin, begin + array.nbytes


def expect_to_lie_in_buckets(buffers: Mapping[str, Any]) -> None:
    """No gradient overlaps another, and those of a dtype that share a bucket lie end to end."""
    ranges = sorted(bounds_of(array) for array in buffers.values() if array.size)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def thresholds(comm: Any, beside_the_host: bool) -> None:
    """Unless one is passed, buckets are larger where nothing is copied and nothing runs beside the program."""
    mebibytes = {f"p{number}": ((2**18,), "float32") for number in range(66)}

    def buckets(**options: Any) -> tuple[int, int]:
        callback = gs.AllreduceCallback("sum", comm, parameters=mebibytes, **options)
        gradient = np.ones(2**18, np.float32)
        for name in mebibytes:
            callback(name, gradient if "gradient_as_bucket_view" in options else gradient.copy())
        callback.flush()
        return callback.threshold_bytes, callback.statistics.all_reduces

    expected = (10 * 2**20, 7) if beside_the_host else (64 * 2**20, 2)
    assert buckets(gradient_as_bucket_view=True) == expected
    assert buckets(gradient_as_bucket_view=True, threshold_bytes=2**22) == (2**22, 17)
    assert buckets() == (10 * 2**20, 7)


CASES = (("mean", 1), ("sum", 700), ("mean", 10 * 1024**2))


def live_in_buckets(comm: Any, kit_name: str, cases: tuple[tuple[str, int], ...]) -> None:
    """Gradients that are written where they live, handed over from elsewhere, or by turns."""
    kit = make_kit(comm, kit_name)
    for method, threshold_bytes in cases:
        for told in ("as arrays", "as shapes"):
            parameters: Any = SPECS if told == "as shapes" else put_all(kit, values_for(0, 0))
            callback = gs.AllreduceCallback(
                method,
                comm,
                threshold_bytes=threshold_bytes,
                gradient_as_bucket_view=True,
                parameters=parameters,
            )
            buffers = callback.gradient_buffers()
            assert list(buffers) == list(SPECS)
            for name, (shape, dtype) in SPECS.items():
                assert (buffers[name].shape, buffers[name].dtype) == (shape, np.dtype(dtype))
                assert not on_host(buffers[name]).any()
            expect_to_lie_in_buckets(buffers)
            addresses = {name: bounds_of(array) for name, array in buffers.items()}
            elsewhere = put_all(kit, values_for(comm.rank, 0))
            for number in range(6):
                values = values_for(comm.rank, number)
                gradients = {}
                for at, name in enumerate(SPECS):
                    is_foreign = (number + at + comm.rank) % 3 == 0 if number > 2 else number == 2
                    gradients[name] = elsewhere[name] if is_foreign else buffers[name]
                    fill(gradients[name], values[name])
                with callback.backward():
                    futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
                # What lives in its bucket is what the future gives; of the others the future gives their place in it.
                for name, future in futures.items():
                    result = future.result()
                    if gradients[name] is buffers[name]:
                        assert result is buffers[name]
                    elif result.size:
                        assert bounds_of(result) == addresses[name]
                        assert on_host(elsewhere[name]).tobytes() == values[name].tobytes()
                got = {name: on_host(array) for name, array in buffers.items()}
                wanted = reduced(by_rank(comm.world_size, number), method)
                expect_equal(comm, got, wanted, (number, threshold_bytes, told))
                assert {name: bounds_of(array) for name, array in buffers.items()} == addresses


def copy_into_the_buckets(comm: Any, kit_name: str) -> None:
    """Nobody asks for the buffers: futures give places in the buckets all the same, which can be handed over, too."""
    kit = make_kit(comm, kit_name)
    for threshold_bytes in THRESHOLDS:
        callback = gs.AllreduceCallback(
            "mean", comm, threshold_bytes=threshold_bytes, parameters=SPECS, gradient_as_bucket_view=True
        )
        arrays = put_all(kit, values_for(comm.rank, 0))
        views: dict[str, Any] = {}
        for number in range(5):
            values = values_for(comm.rank, number)
            names = list(values)
            if number > 1:
                np.random.default_rng([comm.rank, number]).shuffle(names)
            if number == 4:
                arrays = views
            for name in names:
                fill(arrays[name], values[name])
            with callback.backward():
                futures = {name: callback(name, arrays[name]) for name in names}
            views = {name: futures[name].result() for name in values}
            for name, view in views.items():
                assert (view is arrays[name]) == (number == 4), (number, name)
                assert number == 4 or on_host(arrays[name]).tobytes() == values[name].tobytes(), (number, name)
            got = {name: on_host(view) for name, view in views.items()}
            expect_equal(comm, got, reduced(by_rank(comm.world_size, number)), (number, threshold_bytes))
        expect_to_lie_in_buckets(views)
        expect(gs.InvalidArgument, lambda c=callback: c("other", kit.put(np.ones(3))), "is not among")


def make_them_again(comm: Any, kit_name: str) -> None:
    """Arrays of an earlier call are like any other; by name or by array, the answer has the form of the question."""
    kit = make_kit(comm, kit_name)
    parameters = put_all(kit, values_for(0, 0, SMALL))
    options: dict[str, Any] = {"threshold_bytes": 700, "gradient_as_bucket_view": True}
    callback = gs.AllreduceCallback("mean", comm, parameters=parameters, **options)
    first = callback.gradient_buffers()
    rounds: list[tuple[Any, Any]] = [(first, first)]
    for number in range(3):
        again = callback.gradient_buffers()
        assert list(again) == list(SMALL)
        assert not any(on_host(array).any() for array in again.values()), "new ones are zero"
        rounds.append((again, rounds[-1][0]))
        for buffers, handed in [(again, again), (again, rounds[-1][1]), (again, again)]:
            values = values_for(comm.rank, number, SMALL)
            for name, array in handed.items():
                fill(array, values[name])
            step(callback, handed)
            got = {name: on_host(array) for name, array in buffers.items()}
            expect_equal(comm, got, reduced(by_rank(comm.world_size, number, SMALL)), number)
    by_array = gs.AllreduceCallback("mean", comm, parameters=list(parameters.values()), **options)
    listed = by_array.gradient_buffers()
    assert isinstance(listed, list)
    for number in range(3):
        values = values_for(comm.rank, number, SMALL)
        for array, name in zip(listed, SMALL, strict=True):
            fill(array, values[name])
        with by_array.backward():
            for param, array in zip(reversed(parameters.values()), reversed(listed), strict=True):
                by_array(param, array)
        got = dict(zip(SMALL, map(on_host, listed), strict=True))
        expect_equal(comm, got, reduced(by_rank(comm.world_size, number, SMALL)), number)


def refuse_another_place(comm: Any) -> None:
    """Views of the buckets' memory are taken for their own parameter only; what was refused leaves no trace."""
    callback = gs.AllreduceCallback("mean", comm, gradient_as_bucket_view=True, parameters=SMALL)
    buffers = callback.gradient_buffers()
    for number in range(4):
        values = values_for(comm.rank, number, SMALL)
        for name, array in buffers.items():
            fill(array, values[name])
        expect(gs.InvalidArgument, lambda: callback("one", buffers["two"]), "but not in the part for this")
        expect(
            gs.InvalidArgument,
            lambda: callback("one", buffers["one"][::-1]),
            "but not in the part for this",
        )
        callback("one", buffers["one"][:] if number % 2 else buffers["one"])
        expect(gs.InvalidArgument, lambda: callback("two", buffers["one"]), "but not in the part for this")
        for name, array in buffers.items():
            if name != "one":
                callback(name, array)
        callback.flush()
        got = {name: on_host(array) for name, array in buffers.items()}
        expect_equal(comm, got, reduced(by_rank(comm.world_size, number, SMALL)), number)
    callback("one", buffers["one"])
    expect(gs.InvalidArgument, callback.gradient_buffers, "before handed-over gradients are reduced")
    expect(gs.MissingGradient, callback.flush)


def ask_for_different_memory(comm: Any) -> None:
    """Ranks whose gradients differ are told on all, and so is memory that cannot be had; then it goes on."""

    def viewed(parameters: Any) -> gs.AllreduceCallback:
        return gs.AllreduceCallback("mean", comm, parameters=parameters, gradient_as_bucket_view=True)

    other = {**SMALL, "one": ((41 if comm.rank == comm.world_size - 1 else 40,), np.float32)}
    if comm.world_size > 1:
        error = expect(gs.PlanMismatch, viewed(other).gradient_buffers, "first difference, line ")
        assert "'one': float32[41]" in error.descriptions[comm.world_size - 1]
    if comm.backend == "shm":
        huge = {"a": ((2**50,), np.float32)}
        expect(gs.BackendUnavailable, viewed(huge).gradient_buffers)
    callback = viewed(SMALL)
    buffers = callback.gradient_buffers()
    for name, values in values_for(comm.rank, 0, SMALL).items():
        fill(buffers[name], values)
    expect_equal(comm, step(callback, buffers), reduced(by_rank(comm.world_size, 0, SMALL)))


def outlive_their_communicator(comm: Any) -> None:
    group = comm.split(0)
    callback = gs.AllreduceCallback("sum", group, parameters=SMALL, gradient_as_bucket_view=True)
    buffers = callback.gradient_buffers()
    for name, values in values_for(comm.rank, 0, SMALL).items():
        fill(buffers[name], values)
    step(callback, buffers)
    group.close()
    got = {name: on_host(array) for name, array in buffers.items()}
    expect_equal(comm, got, reduced(by_rank(comm.world_size, 0, SMALL), "sum"))
    expect(gs.CommunicatorClosed, lambda: step(callback, buffers), "closed")
    for name, values in values_for(comm.rank, 1, SMALL).items():
        fill(buffers[name], values)
    assert on_host(buffers["one"]).tobytes() == values_for(comm.rank, 1, SMALL)["one"].tobytes()
    other = gs.AllreduceCallback("sum", comm)  # for another callback they are arrays like any other
    expect_equal(comm, step(other, buffers), reduced(by_rank(comm.world_size, 1, SMALL), "sum"))


def all_of_it(comm: Any, kit_name: str) -> None:
    copy_into_the_buckets(comm, kit_name)
    make_them_again(comm, kit_name)
    refuse_another_place(comm)
    ask_for_different_memory(comm)
    outlive_their_communicator(comm)

"""What an AllreduceCallback with a hook must do, and combinations of its knobs; run inside rank processes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from naive_reference import (
    SPECS,
    Values,
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
from contract import IS_EVERYWHERE, expect
from kits import make_kit

# -- Hooks --------------------------------------------------------------------------------------------------------


class Recording:
    """Reduces the buffer in place, or a copy of it; notes what it was given."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.seen: list[tuple[int, tuple[str, ...]]] = []

    def __call__(self, bucket: Any) -> Any:
        self.seen.append((bucket.index, bucket.names))
        assert bucket.buffer.ndim == 1
        assert bucket.buffer.flags.c_contiguous
        assert type(bucket.op) is str
        if self.way == "in place":
            return bucket.communicator.all_reduce(bucket.buffer, bucket.op)  # the buffer itself, which is no mistake
        bucket.buffer[...] = bucket.communicator.all_reduce(bucket.buffer.copy(), bucket.op)
        return None


def hand_buckets_to_hooks(comm: Any, kit_name: str) -> None:
    """A hook that does what would have been done gives what it would have given."""
    kit = make_kit(comm, kit_name)
    n = comm.world_size
    ways = itertools.product(("copy", "in place"), (1, 700, 10**7), (False, True))
    for way, threshold_bytes, is_view in ways if IS_EVERYWHERE else itertools.islice(ways, 0, None, 3):
        if (way == "copy") != (threshold_bytes == 700):  # not all of them
            continue
        callback = gs.AllreduceCallback(
            "mean",
            comm,
            threshold_bytes=threshold_bytes,
            parameters=SPECS if is_view else None,
            gradient_as_bucket_view=is_view,
        )
        arrays = callback.gradient_buffers() if is_view else put_all(kit, values_for(comm.rank, 0))
        hook = Recording(way)
        for number in range(5):
            callback.register_hook(None if number == 3 else hook)
            values = values_for(comm.rank, number)
            gradients = awkward(kit, arrays, values) if number == 2 else arrays
            for name, array in gradients.items():
                if number != 2:
                    fill(array, values[name])
            hook.seen.clear()
            with callback.backward():
                futures = {name: callback(name, gradient) for name, gradient in gradients.items()}
                if number == 2:
                    expect(gs.InvalidArgument, lambda c=callback: c.register_hook(None), "before handed-over")
            got = {name: on_host(future.result()) for name, future in futures.items()}
            expect_equal(comm, got, reduced(by_rank(n, number)), (way, threshold_bytes, is_view, number))
            if number != 3:
                assert [index for index, _ in hook.seen] == list(dict.fromkeys(index for index, _ in hook.seen))
                assert {name for _, names in hook.seen for name in names} == set(SPECS)


def awkward(kit: Any, arrays: dict[str, Any], values: Values) -> dict[str, Any]:
    """Returns gradients that cannot be written to, or lie apart, in place of some."""
    gradients = put_all(kit, values)
    strided = kit.put(np.repeat(values["two"], 3).copy())[::3]
    gradients["two"] = strided
    if isinstance(gradients["one"], np.ndarray):
        gradients["one"].setflags(write=False)
    assert arrays.keys() == gradients.keys()
    return gradients


def refuse_what_hooks_do_wrong(comm: Any, kit_name: str) -> None:
    """The same error on every rank where the hook does the same; each in a group of its own, which it breaks."""
    kit = make_kit(comm, kit_name)

    def returns_a_copy(bucket: Any) -> Any:
        return bucket.communicator.all_reduce(bucket.buffer.copy(), bucket.op)

    def raises(bucket: Any) -> Any:
        raise KeyError("no such hook")

    for hook, kind in ((returns_a_copy, gs.InvalidArgument), (raises, KeyError)):
        group = comm.split(0)
        callback = gs.AllreduceCallback("mean", group)
        for wrong in (3, Recording):
            expect(gs.InvalidArgument, lambda c=callback, w=wrong: c.register_hook(w), "needs a function")
        callback.register_hook(hook)
        gradients = put_all(kit, {"a": np.ones(3, np.float32), "b": np.ones(4, np.float32)})
        futures = []
        try:
            for name, gradient in gradients.items():
                futures.append(callback(name, gradient))
            callback.flush()
        except kind as error:
            assert kind is KeyError or "a hook must leave the reduced values in bucket.buffer" in str(error)
        else:
            raise AssertionError(f"{hook} was not refused")
        assert all(isinstance(future.exception(), kind) for future in futures)
        callback.register_hook(None)  # it can go on where all ranks have got the same
        expect_equal(group, step(callback, put_all(kit, {"a": np.ones(3)})), {"a": np.ones(3)})
        group.close()


# -- Settings on which ranks differ -------------------------------------------------------------------------------


def in_place(bucket: Any) -> None:
    bucket.communicator.all_reduce(bucket.buffer, bucket.op)


SETTINGS: tuple[tuple[dict[str, Any], dict[str, Any], str, str], ...] = (
    ({"nonfinite": "raise"}, {"nonfinite": "skip"}, 'nonfinite "raise"', 'nonfinite "skip"'),
    ({"clip_norm": 1.0}, {"clip_norm": 2.0}, "clip_norm 1.0", "clip_norm 2.0"),
    ({"hook": in_place}, {}, "(mean, hook)", "(mean)"),
    ({"reduce_method": "sum"}, {}, "(sum)", "(mean)"),
    ({"threshold_bytes": 64}, {}, "", ""),
    ({"gradient_as_bucket_view": True}, {}, "gradient_buffers", "all_reduce"),
    ({"missing": "zero"}, {"missing": "error"}, "all_reduce", "without a gradient for"),
)


def differ(comm: Any, kit_name: str) -> list[str]:
    """The last rank's callback has other settings: all ranks are told both, before data moves, and can go on."""
    kit = make_kit(comm, kit_name)
    told = []
    for at, (first, last, text_of_first, text_of_last) in enumerate(SETTINGS):
        names = {f"{at} {name}": SPECS[name] for name in ("matrix", "one", "two")}
        options = dict(last if comm.rank == comm.world_size - 1 else first)
        hook = options.pop("hook", None)
        is_told = "missing" in options or "gradient_as_bucket_view" in {*first, *last}
        if is_told:
            options["parameters"] = names
        callback = gs.AllreduceCallback(options.pop("reduce_method", "mean"), comm, **options)
        if hook is not None:
            callback.register_hook(hook)
        values = values_for(comm.rank, 0, names)
        if "missing" in options:
            del values[f"{at} one"]
        gradients = put_all(kit, values)
        error = expect(gs.PlanMismatch, lambda c=callback, g=gradients: step(c, g))
        assert text_of_first in error.descriptions[0], error.descriptions
        assert text_of_last in error.descriptions[comm.world_size - 1], error.descriptions
        assert set(error.descriptions) == set(range(comm.world_size))
        for name, gradient in gradients.items():
            assert on_host(gradient).tobytes() == values[name].tobytes(), "data moved"
        told.append(str(sorted(error.descriptions.items())))
        alike = gs.AllreduceCallback("sum", comm)
        expect_equal(
            comm,
            step(alike, gradients),
            reduced(
                [
                    {name: each for name, each in values_for(rank, 0, names).items() if name in values}
                    for rank in range(comm.world_size)
                ],
                "sum",
            ),
        )
    return told


# -- Knobs together -----------------------------------------------------------------------------------------------

COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"nonfinite": "skip", "clip_norm": 20.0},
    {"hook": True, "nonfinite": "raise", "clip_norm": 20.0},
    {"missing": "zero", "nonfinite": "skip", "clip_norm": float("inf")},
)


def combine(comm: Any, kit_name: str) -> None:
    """With gradients in buckets, and with parameters that are told, knobs do what they do without."""
    kit = make_kit(comm, kit_name)
    n = comm.world_size
    every = itertools.product(COMBINATIONS, (700, 10**7))
    for options, threshold_bytes in every if IS_EVERYWHERE else itertools.islice(every, 0, None, 3):
        callbacks = {}
        for mode in ("told", "viewed", "plain"):
            chosen = {key: value for key, value in options.items() if key != "hook"}
            if mode == "plain":
                chosen.pop("missing", None)
            callbacks[mode] = gs.AllreduceCallback(
                "mean",
                comm,
                threshold_bytes=threshold_bytes,
                parameters=None if mode == "plain" else SPECS,
                gradient_as_bucket_view=mode == "viewed",
                **chosen,
            )
            if "hook" in options:
                callbacks[mode].register_hook(Recording("in place"))
        buffers = callbacks["viewed"].gradient_buffers()
        own = {mode: put_all(kit, values_for(comm.rank, 0)) for mode in ("told", "plain")}
        for number in range(4):
            given = by_rank(n, number)
            is_bad = number == 2 and "nonfinite" in options
            if is_bad:
                given[n - 1]["two"][3] = np.nan
            left_out = "double" if options.get("missing") == "zero" and number == 3 else None
            for values in given if left_out else ():
                values[left_out][...] = 0
            outcomes = {}
            for mode, callback in callbacks.items():
                arrays = buffers if mode == "viewed" else own[mode]
                for name, array in arrays.items():
                    fill(array, given[comm.rank][name])
                gradients = {name: each for name, each in arrays.items() if name != left_out or mode == "plain"}
                if is_bad and options["nonfinite"] == "raise":
                    error = expect(gs.NonFiniteGradient, lambda c=callback, g=gradients: step(c, g))
                    assert error.parameters == {n - 1: "two"}
                    continue
                got = step(callback, gradients)
                got |= {name: on_host(each) for name, each in callback.filled.items()}
                outcomes[mode] = {name: got[name] for name in SPECS}
                assert callback.skip_step is is_bad
                if callback.norm is not None and not is_bad:
                    squares = [np.sum(np.abs(each.astype(complex)) ** 2) for each in outcomes[mode].values()]
                    norm = float(np.sqrt(np.sum(squares)))
                    np.testing.assert_allclose(min(callback.norm, options["clip_norm"]), norm, rtol=2e-3)
            for mode in ("told", "viewed") if outcomes and not is_bad else ():
                for name, each in outcomes["plain"].items():
                    # The squares of a bucket are added up in other places where it is one array.
                    wide = np.complex128 if each.dtype.kind == "c" else np.float64
                    np.testing.assert_allclose(
                        outcomes[mode][name].astype(wide), each.astype(wide), rtol=1e-2 if each.itemsize == 2 else 2e-6
                    )
                    if "clip_norm" not in options and comm.backend != "nccl":
                        assert outcomes[mode][name].tobytes() == each.tobytes(), (mode, name, options)

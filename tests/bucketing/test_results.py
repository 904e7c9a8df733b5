"""results(): the reduced arrays of the last step, so that a loop keeps no futures."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, read_only
from bucketing.reference import SPECS, given, step

KNOWN = dict.fromkeys("abc", ((2,), "float64"))


@pytest.mark.ranks(on={"shm": (1, 2), "fake": (2,)})
@pytest.mark.parametrize("options", [{}, {"parameters": SPECS}, {"parameters": SPECS, "gradient_as_bucket_view": True}])
def test_results_are_the_very_objects_that_the_futures_give(comm, options):
    """In the order of hand-over; whatever the layout of what was handed over."""
    arrays, sync = arrays_of(comm), gs.AllreduceCallback("mean", comm, **options)
    assert sync.results() == {}
    for number in range(3):
        gradients = {name: arrays.put(values) for name, values in given(comm.rank, number).items()}
        gradients["one"] = read_only(gradients["one"])
        gradients["two"] = arrays.put(np.zeros(80, "float32"))[::2]
        gradients["scalar"] = 2.5
        results = step(sync, {name: gradients[name] for name in reversed(gradients)})
        found = sync.results()
        assert list(found) == list(reversed(gradients))
        assert all(found[name] is result for name, result in results.items())
        assert found is not sync.results()  # a program may change it
        found.clear()


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_zeros_that_were_filled_in_are_fresh_arrays_that_the_user_may_keep(comm):
    arrays, kept = arrays_of(comm), []
    sync = gs.AllreduceCallback("mean", comm, parameters=KNOWN, missing="zero")
    for number in range(3):
        with sync.backward():
            sync("a", arrays.put(np.ones(2)))
            if comm.rank:
                sync("b", arrays.put(np.full(2, 10.0 * (number + 1))))
        kept.append(sync.results())
        assert list(kept[-1]) == (["a", "b", "c"])
    assert [arrays.get(each["b"]).tolist() for each in kept] == [[5.0] * 2, [10.0] * 2, [15.0] * 2]
    assert [arrays.get(each["c"]).tolist() for each in kept] == [[0.0] * 2] * 3
    kept[0]["c"][...] = 7  # this rank's own
    with sync.backward():
        pass
    assert not any(arrays.get(each).any() for each in sync.results().values())


@pytest.mark.ranks(2)
def test_results_of_a_list_of_arrays_are_a_list_in_its_order(comm):
    """Those of arrays as names without `parameters` have names as text."""
    weights = [np.full(2, 1.0 + i) for i in range(3)]
    sync = gs.AllreduceCallback("sum", comm, parameters=weights, missing="zero")
    with sync.backward():
        for i in (2, 0):
            sync(weights[i], np.full(2, float(i)))
    assert [each.tolist() for each in sync.results()] == [[0.0] * 2, [0.0] * 2, [4.0] * 2]
    sync = gs.AllreduceCallback("sum", comm, name="unknown")
    step(sync, dict(zip("xyz", weights, strict=True)))
    with sync.backward():
        for i in (2, 0):
            sync(weights[i], np.full(2, float(i)))
    assert [each.tolist() for each in sync.results().values()] == [[4.0] * 2, [0.0] * 2]
    assert all(isinstance(name, str) for name in sync.results())


def test_results_are_there_from_the_end_of_a_step_to_the_next_backward(alone):
    sync = gs.AllreduceCallback("mean", alone)
    with sync.backward():
        with pytest.raises(gs.FutureNotReady, match=r"after the `with sync.backward\(\):` block, or after flush"):
            sync.results()
        future = sync("a", np.ones(2))
        with pytest.raises(gs.FutureNotReady):
            sync.results()
        sync.flush()
        assert sync.results()["a"] is future.result()
    assert sync.results()["a"] is future.result()
    sync("b", np.ones(2))  # without backward()
    with pytest.raises(gs.FutureNotReady):
        sync.results()
    sync.flush()
    assert list(sync.results()) == ["b"]
    with sync.backward():  # a step without gradients
        pass
    assert sync.results() == {}


@pytest.mark.ranks(2)
def test_a_step_that_failed_has_no_results(comm):
    sync = gs.AllreduceCallback("mean", comm, parameters=KNOWN, nonfinite="raise")
    step(sync, {name: np.ones(2) for name in KNOWN})
    for error, bad in ((gs.NonFiniteGradient, {"c": np.full(2, np.nan)}), (gs.MissingGradient, {})):
        with pytest.raises(error):
            step(sync, {"a": np.ones(2), "b": np.ones(2), **bad})
        assert sync.results() == {}
    assert list(step(sync, {name: np.ones(2) for name in reversed(KNOWN)})) == list(sync.results()) == ["c", "b", "a"]


def test_nothing_of_a_step_is_kept_once_the_next_has_begun(alone):
    """So that the gradients of two steps never need memory at the same time."""
    import weakref

    sync = gs.AllreduceCallback("mean", alone, clip_norm=1.0)
    gradient = np.ones(5)
    step(sync, {"a": gradient, "b": np.ones((3, 2)).T})
    gone = weakref.ref(gradient)
    del gradient
    assert gone() is not None
    with sync.backward():
        assert gone() is None
        sync("a", np.ones(5))
        sync("b", np.ones((2, 3)))

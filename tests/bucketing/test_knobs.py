"""The knobs of an AllreduceCallback: what travels, when it is launched, and what is done about its values."""

from __future__ import annotations

import math
from typing import Any

import knob_checks as checks
import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from places import GPU, GPU_MIXED, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_SLOW, STAND_IN_STAGED, Place, always_on, on

PLACES = [
    *on(SHM, 1, 3),
    *on(STAND_IN, 1, 2),
    *always_on(STAND_IN_STAGED, 2),
    *on(STAND_IN_MIXED, 2),
    *on(GPU, 1, 2),
    *on(GPU_MIXED, 2),
]
# What is done about values is done in a bucket, however they have come there.
OF_VALUES = [*on(SHM, 1, 3), *on(STAND_IN, 1, 2), *on(STAND_IN_STAGED, 2), *on(STAND_IN_MIXED, 2)]
OF_VALUES += [*on(GPU, 1, 2), *on(GPU_MIXED, 2)]


@pytest.mark.parametrize(("place", "world_size"), [*PLACES, *always_on(STAND_IN_SLOW, 2)])
def test_full_buckets_begin_while_gradients_are_to_come(place: Place, world_size: int) -> None:
    place.run(world_size, checks.begin_early, place.kit)


@pytest.mark.parametrize(("place", "world_size"), OF_VALUES)
def test_all_ranks_hear_of_nan_and_of_the_norm(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.watch, place.kit)
    assert told == [told[0]] * world_size


# -- What needs no second process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threshold_bytes": "large"}, "threshold_bytes must be an integer of at least 1, or text"),
        ({"threshold_bytes": 0}, "threshold_bytes"),
        ({"threshold_bytes": 1.5}, "threshold_bytes"),
        ({"threshold_bytes": True}, "threshold_bytes"),
        ({"missing": "zeros"}, "missing must be 'error' or 'zero'"),
        ({"missing": None}, "missing must be"),
        ({"missing": "zero"}, "needs parameters"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'off' or 'raise' or 'skip'"),
        ({"nonfinite": None}, "nonfinite must be 'off' or 'raise' or 'skip'"),
        ({"clip_norm": 0}, "above 0"),
        ({"clip_norm": -1.0}, "above 0"),
        ({"clip_norm": math.nan}, "above 0"),
        ({"clip_norm": True}, "above 0"),
    ],
)
def test_mistakes_are_told_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(gs.InvalidArgument, match=text):
        gs.AllreduceCallback("mean", local_communicator(), **options)


@pytest.mark.parametrize(
    "parameters",
    [{"w": np.ones(3)}, [np.ones(3)], np.ones(3), iter([np.ones(3)])],
    ids=lambda value: type(value).__name__,
)
def test_parameters_by_position_are_refused_without_their_values(parameters: Any) -> None:
    given = f"got {type(parameters).__name__}"
    with pytest.raises(gs.InvalidArgument, match=f'"sum" or "mean", {given}: pass the parameters as parameters=...$'):
        gs.AllreduceCallback(parameters)
    with pytest.raises(gs.InvalidArgument, match=f"needs group to be a Communicator or None, {given}$"):
        gs.AllreduceCallback("mean", parameters)


@pytest.mark.parametrize(("value", "given"), [("avg", "'avg'"), (None, "NoneType"), (np.float64, "type")])
def test_a_wrong_reduce_method_is_shown_if_it_is_text(value: Any, given: str) -> None:
    with pytest.raises(gs.InvalidArgument) as caught:
        gs.AllreduceCallback(value)
    assert str(caught.value) == f'reduce_method needs to be "sum" or "mean", got {given}'


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("clip_nrom", ": did you mean clip_norm?"),
        ("treshold_bytes", ": did you mean threshold_bytes?"),
        ("bucket_cap_mb", ': use threshold_bytes="25 MB"'),
        ("threshold", ": use threshold_bytes"),
        ("op", ": use reduce_method"),
        ("colour", ""),
    ],
)
def test_an_unknown_option_is_told_with_the_right_one(option: str, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        gs.AllreduceCallback(**{option: 1})  # type: ignore[arg-type]
    assert str(caught.value) == f"AllreduceCallback() got an unexpected keyword argument {option!r}{advice}"


def test_integers_are_not_clipped() -> None:
    callback = gs.AllreduceCallback("sum", local_communicator(), clip_norm=1.0)
    for _ in range(3):
        callback("w", np.ones(3))
        with pytest.raises(gs.UnsupportedDtype, match="gradient of 'i'.*clip_norm 1.0 needs a floating"):
            callback("i", np.ones(3, np.int32))
        callback.flush()
    callback = gs.AllreduceCallback("sum", local_communicator(), nonfinite="raise", clip_norm=math.inf)
    integers = np.array([3, 4])
    with callback.backward():
        callback("i", integers)
    assert callback.norm == 5.0
    assert (integers == [3, 4]).all()


def test_what_nobody_asks_for_is_not_told() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator())
    with callback.backward():
        callback("w", np.full(3, np.nan))
    assert callback.norm is None
    assert not callback.skip_step
    assert callback.filled == {}

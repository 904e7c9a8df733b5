"""Every error pickles, with all that it knows, and is also the built-in that a caller expects."""

from __future__ import annotations

import pickle

import pytest

import gradsync as gs
from gradsync import errors

ALL = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.GradsyncError)]


@pytest.mark.parametrize("kind", ALL)
def test_pickles(kind: type[errors.GradsyncError]) -> None:
    error = pickle.loads(pickle.dumps(kind("rank 1/2: what happened")))
    assert type(error) is kind
    assert str(error) == "rank 1/2: what happened"
    assert getattr(gs, kind.__name__) is kind


def test_attributes_survive_pickling() -> None:
    error = gs.RankFailed("rank 3 died", rank=3, phase="all_reduce", exit_code=-9, traceback_text="...")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.phase, again.exit_code, again.traceback_text) == (3, "all_reduce", -9, "...")
    assert (again.results, again.was_silent) == ({}, False)
    assert pickle.loads(pickle.dumps(gs.RankFailed("rank 3 was stopped", was_silent=True))).was_silent
    assert pickle.loads(pickle.dumps(gs.RankFailed("rank 3 died", results={0: "kept"}))).results == {0: "kept"}
    mismatch = pickle.loads(pickle.dumps(gs.PlanMismatch("x", index=2, descriptions={0: "a"})))
    assert (mismatch.index, mismatch.descriptions) == (2, {0: "a"})
    infinite = pickle.loads(pickle.dumps(gs.NonFiniteGradient("x", rank=1, parameter="w", parameters={1: "w"})))
    assert (infinite.rank, infinite.parameter, infinite.parameters) == (1, "w", {1: "w"})


def test_only_attributes_are_keywords() -> None:
    assert gs.MissingGradient("x", index=2).index == 2
    with pytest.raises(TypeError, match="RankFailed has no attribute 'exitcode'"):
        gs.RankFailed("rank 3 died", exitcode=1)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (gs.InvalidArgument, ValueError),
        (gs.UnsupportedDtype, TypeError),
        (gs.BackendUnavailable, RuntimeError),
        (gs.RendezvousTimeout, TimeoutError),
        (gs.RendezvousTimeout, gs.RendezvousError),
        (gs.AuthenticationError, gs.RendezvousError),
        (gs.PlanMismatch, RuntimeError),
        (gs.CollectiveTimeout, TimeoutError),
        (gs.RankFailed, RuntimeError),
        (gs.CommunicatorClosed, RuntimeError),
        (gs.NcclError, RuntimeError),
        (gs.NonFiniteGradient, ArithmeticError),
    ],
)
def test_is_also_the_built_in(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_describe_never_raises() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert errors.describe(ValueError("x")) == "ValueError: x"
    assert errors.describe(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert "__str__ raised RuntimeError" in errors.describe(Broken())

import pytest

import gradsync as gs
from gradsync import process_group
from gradsync.launching.launcher import NamedFunction, call_in_group


@pytest.fixture
def events(monkeypatch):
    events = []
    monkeypatch.setattr(process_group, "group_barrier", lambda: events.append("barrier"))
    return events


@pytest.mark.parametrize(
    ("meets_others", "expected"), [(True, ["barrier", "function", "barrier"]), (False, ["function"])]
)
def test_barriers(events, meets_others, expected):
    assert call_in_group(lambda value: (events.append("function"), value)[1], "local", meets_others, 5) == 5
    assert events == expected
    assert not gs.is_initialized()


def test_no_barrier_after_an_exception(events):
    def fail():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        call_in_group(fail, "local", True)
    assert events == ["barrier"]
    assert not gs.is_initialized()


def test_the_function_may_destroy_the_group_or_make_another(events):
    def make_another():
        gs.destroy_process_group()
        gs.init_process_group("local")

    call_in_group(gs.destroy_process_group, "local", False)
    call_in_group(make_another, "local", False)
    assert not gs.is_initialized()


def test_a_function_is_found_by_name():
    named = NamedFunction("rank_functions", "plain")
    assert call_in_group(named, "local", False, 1) == (1, True)
    with pytest.raises(
        gs.InvalidArgument, match="nothing is not found in rank_functions of this rank; define it above"
    ):
        call_in_group(NamedFunction("rank_functions", "nothing"), "local", False)

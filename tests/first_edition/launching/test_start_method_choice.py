import pytest

from gradsync.errors import InvalidArgument
from gradsync.launching import function_call
from gradsync.launching.function_call import chosen_start_method, set_start_method


@pytest.fixture(autouse=True)
def _default(monkeypatch):
    monkeypatch.setattr(function_call, "_default", "spawn")


def test_a_call_names_its_own_or_takes_what_was_set():
    assert chosen_start_method("launch", None) == "spawn"
    set_start_method("forkserver")
    assert chosen_start_method("launch", None) == "forkserver"
    assert chosen_start_method("launch", "fork") == "fork"


@pytest.mark.parametrize("method", ["thread", None, 5, "", ["fork"]])
def test_unknown_methods_are_refused_and_change_nothing(method):
    with pytest.raises(InvalidArgument, match="set_start_method needs a start method of 'spawn', 'fork', 'forkserver'"):
        set_start_method(method)
    assert chosen_start_method("launch", None) == "spawn"

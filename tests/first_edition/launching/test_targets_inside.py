import functools
import marshal
import multiprocessing
import os
import pickle
import sys
import threading

import pytest

from gradsync.errors import InvalidArgument
from gradsync.launching.function_call import function_target
from gradsync.launching.in_rank import rank_main

FORK = 'gs.set_start_method("fork")'
CLOUDPICKLE = "pip install cloudpickle"
FRESH = ["spawn", "forkserver"]


def place(*values, **named):
    return values, named


def put(queue):
    queue.put(0)


class Scale:
    """A callable object, with a method and a class method."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return self.factor * value

    def method(self, value):
        return self.factor + value

    @classmethod
    def build(cls, factor):
        return cls(factor)

    def __eq__(self, other):
        return type(other) is type(self) and other.factor == self.factor

    __hash__ = None


@pytest.fixture
def without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


def call_of(target):
    """Does the rank's half, and calls."""
    assert marshal.loads(marshal.dumps(target.record)) == target.record
    function, arguments, keywords = pickle.loads(target.record["call"])
    return function(*arguments, **keywords)


def test_fork_carries_the_call_itself():
    lock = threading.Lock()

    def closure(value, *, other):
        return lock, value, other

    argument = open  # anything
    target = function_target(closure, [argument], {"other": lock}, "closure", start_method="fork")
    assert target.call == (closure, (argument,), {"other": lock})
    assert target.call[2]["other"] is lock
    assert target.record == {"kind": "function"}
    assert target.descriptors == ()


@pytest.mark.parametrize("method", FRESH)
@pytest.mark.parametrize(
    ("function", "arguments", "keywords", "result"),
    [
        (max, (1, 3), {}, 3),
        (Scale(3), (2,), {}, 6),
        (Scale(3).method, (2,), {}, 5),
        (Scale.build, (2,), {}, Scale(2)),
        (functools.partial(pow, 2), (3,), {"mod": 5}, 3),
        ("text".upper, (), {}, "TEXT"),
        (Scale, (), {"factor": 4}, Scale(4)),
    ],
)
def test_every_kind_of_callable(without_cloudpickle, method, function, arguments, keywords, result):
    target = function_target(function, arguments, keywords, "name", start_method=method)
    assert target.call is None
    assert target.command_line == ("name",)
    assert call_of(target) == result


@pytest.mark.parametrize("method", FRESH)
def test_lambdas_and_closures_by_cloudpickle(method):
    offset = 10

    def closure(function, value):
        return function(value) + offset

    target = function_target(closure, (lambda value: 2 * value, 3), {}, "closure", start_method=method)
    assert call_of(target) == 16
    assert call_of(function_target(functools.partial(closure, abs), (-1,), {}, "partial")) == 11


def test_arguments_beside_a_closure_keep_their_classes():
    argument = Scale(2)
    assert call_of(function_target(lambda *values: values, (argument, argument), {}, "f")) == (argument, argument)
    first, second = call_of(function_target(lambda *values: values, (argument, argument), {}, "f"))
    assert first is second


@pytest.mark.parametrize("name", ["<lambda>", "inner"])
def test_function_that_does_not_pickle(without_cloudpickle, name):
    with pytest.raises(InvalidArgument) as caught:
        function_target(lambda: 0, (), {}, name)
    assert str(caught.value).startswith(f"{name} needs to pickle to reach the ranks: ")
    assert str(caught.value).endswith(
        f"; define it at the top level of a module or script, {CLOUDPICKLE}, or start ranks by fork ({FORK})"
    )


def test_closure_over_what_never_pickles():
    lock = threading.Lock()
    with pytest.raises(InvalidArgument) as caught:
        function_target(lambda: lock, (), {}, "f")
    assert str(caught.value) == (
        "f needs to pickle to reach the ranks: cannot pickle '_thread.lock' object; "
        f"define it at the top level of a module or script, or start ranks by fork ({FORK})"
    )


@pytest.mark.parametrize(
    ("arguments", "keywords", "part"),
    [
        ((1, threading.Lock()), {}, r"args\[1\] of place"),
        ((1, [{"deep": threading.Lock()}]), {}, r"args\[1\] of place"),
        ((1,), {"first": 1, "second": threading.Lock()}, "argument second of place"),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_argument_that_does_not_pickle_is_named(monkeypatch, arguments, keywords, part, installed):
    if not installed:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(InvalidArgument) as caught:
        function_target(place, arguments, keywords, "place")
    text = str(caught.value)
    assert text.startswith(part.replace("\\", "") + " needs to pickle to reach the ranks: cannot pickle '_thread.lock'")
    assert text.endswith(f"; make it inside the function, or start ranks by fork ({FORK})")  # cloudpickle is no help


class Refusing:
    def __reduce__(self):
        raise ZeroDivisionError("in __reduce__")


def test_what_an_argument_raises_while_pickling_is_told():
    with pytest.raises(InvalidArgument, match=r"^args\[0\] of f needs to pickle to reach the ranks: in __reduce__;"):
        function_target(print, (Refusing(),), {}, "f")


@pytest.mark.parametrize("function", [put, lambda queue: queue.put(0)])
def test_queues_bring_their_descriptors(function):
    queue = multiprocessing.get_context("spawn").Queue()
    target = function_target(function, (queue,), {}, "put")
    assert len(target.descriptors) == 3  # both ends, and the resource tracker
    assert all(os.fstat(descriptor) for descriptor in target.descriptors)
    with pytest.raises(RuntimeError):  # outside of a launch it does not pickle, and that is restored
        pickle.dumps(queue)
    queue.close()


@pytest.mark.parametrize("method", [*FRESH, "fork"])
def test_refused_inside_a_rank(monkeypatch, method):
    monkeypatch.setenv("GRADSYNC_RANK", "1")
    with pytest.raises(InvalidArgument, match="f was launched inside rank 1"):
        function_target(print, (), {}, "f", start_method=method)
    monkeypatch.delenv("GRADSYNC_RANK")
    monkeypatch.setattr(rank_main, "is_importing_main", lambda: True)
    with pytest.raises(InvalidArgument, match="under `if __name__"):
        function_target(print, (), {}, "f", start_method=method)


def test_a_session_that_names_a_file_which_is_not_there(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/nowhere/<stdin>", raising=False)
    preparation = pickle.loads(function_target(print, (), {}, "f").record["preparation"])
    assert "init_main_from_path" not in preparation

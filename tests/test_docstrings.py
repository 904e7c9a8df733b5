"""The reference is made of docstrings, so they are whole: every argument, what comes back, and errors that exist."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradsync as gs
from gradsync.bucketing.reducer import GradientBucket
from gradsync.communicators.communicator import Asynchronous
from gradsync.communicators.objects import Objects

# Classes whose objects the library gives: nobody calls them.
GIVEN = {"Communicator", "MultiprocessContext", "NonMember", "GradientFuture", "CollectiveFuture", "GradientBucket"}
# For use inside the library; the reference leaves them out.
INNER = {"all_gather_for", "broadcast_for"}
CLASSES = {name: getattr(gs, name) for name in gs.__all__ if inspect.isclass(getattr(gs, name))}
ERRORS = {name for name, found in CLASSES.items() if issubclass(found, Exception)}
ENTRY = re.compile(r"^    \*{0,2}([a-z_]\w*): ", flags=re.MULTILINE)
RAISED = re.compile(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*): ", flags=re.MULTILINE)
GIVES = re.compile(r"(Returns|Gives|Whether) ")


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yields all that the reference shows, by name."""
    roots = {f"gs.{name}": getattr(gs, name) for name in gs.__all__ if not inspect.ismodule(getattr(gs, name))}
    del roots["gs.__version__"]
    for module in (gs.comm, gs.hooks):
        own = {n: v for n, v in vars(module).items() if not n.startswith("_") and inspect.getmodule(v) is module}
        roots |= {f"{module.__name__.replace('gradsync', 'gs')}.{name}": value for name, value in own.items()}
    roots |= {each.__name__: each for each in (Asynchronous, Objects, GradientBucket)}
    for name, value in roots.items():
        yield name, value
        if inspect.isclass(value) and name.removeprefix("gs.") not in ERRORS:
            for member, found in inspect.getmembers(value):
                is_public = member == "__call__" or not (member.startswith("_") or member in INNER)
                if is_public and belongs_to_us(found):
                    yield f"{name}.{member}", found


def belongs_to_us(member: Any) -> bool:
    function = member.fget if isinstance(member, property) else member
    return inspect.isfunction(function) and function.__module__.startswith("gradsync.")


OBJECTS = dict(public_objects())


def section(text: str, name: str) -> str:
    """Returns the lines of a section of a docstring, or ""."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)*)", f"{text}\n", flags=re.MULTILINE)
    return found[1] if found else ""


def gaps(what: Any, *, is_called: bool = True) -> list[str]:
    """Returns what a docstring leaves out, or has too much.

    Args:
        what: a function, a property or a class.
        is_called: of a class, whether people make objects of it.
    """
    text = inspect.getdoc(what) or ""
    if not text:
        return ["no docstring"]
    found = [f"raises {name}" for name in _raised(text) if name not in ERRORS and not hasattr(builtins, name)]
    if isinstance(what, property) or text.startswith("See "):
        return found
    if inspect.isclass(what):
        return found + (_gaps_of_call(what, what.__init__, text) if is_called else [])
    returns = inspect.signature(what).return_annotation
    silent = returns not in ("None", None, "Iterator[None]") and not section(text, "Returns") and not GIVES.match(text)
    return found + _gaps_of_call(what, what, text) + (["what it returns"] if silent else [])


def _gaps_of_call(what: Any, function: Callable[..., Any], text: str) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(function).parameters
    parameters = {name for name, parameter in signature.items() if name != "self" and parameter.kind not in variadic}
    told = set(ENTRY.findall(section(text, "Args")))
    told -= {name for name, parameter in signature.items() if parameter.kind in variadic}
    if inspect.isclass(what) and issubclass(what, Exception):
        told = parameters  # they are its attributes
    return [f"argument {name}" for name in sorted(parameters - told)] + [f"no argument {n}" for n in told - parameters]


def _raised(text: str) -> list[str]:
    return [name for names in RAISED.findall(section(text, "Raises")) for name in names.split(", ")]


@pytest.mark.parametrize("name", OBJECTS)
def test_docstrings_are_whole(name: str) -> None:
    assert not gaps(OBJECTS[name], is_called=name.removeprefix("gs.") not in GIVEN)


@pytest.mark.parametrize("name", [name for name in vars(Asynchronous) if not name.startswith("_")])
def test_the_asynchronous_form_is_documented_in_whole(name: str) -> None:
    assert (inspect.getdoc(getattr(gs.Communicator, name)) or "?") in (getattr(Asynchronous, name).__doc__ or "")

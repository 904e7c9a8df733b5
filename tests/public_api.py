"""Prints every public name of gradsync, one a line, with its signature: tests/public_api.txt is what it prints.

    python tests/public_api.py > tests/public_api.txt

Names, parameters with their defaults, exception bases and fields, members of public classes, GRADSYNC_ variables,
commands and their options. Annotations are left out: they change when nothing changes for a caller. Uses public names
only, so that it runs on every edition of gradsync.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import click
import numpy as np

import gradsync as gs
from gradsync.cli import main

SOURCE = Path(gs.__file__).parent
#: Classes whose objects the library gives: nobody calls them.
GIVEN = {"Communicator", "NonMember", "GradientFuture", "CollectiveFuture", "MultiprocessContext", "ReduceOp"}
OPERATORS = {f"__{name}__" for name in ("call", "enter", "exit", "bool", "len", "iter", "getitem", "array")}


def given_classes() -> dict[str, type]:
    """Returns classes that no public module names, from objects that a program is given."""
    with gs.init_process_group("local") as comm:
        callback = gs.AllreduceCallback(group=comm)
        callback("name", np.ones(3))
        callback.flush()
        with gs.AllreduceCallback(group=comm).join() as join:
            pass
        found = [comm.asynchronous, comm.objects, callback.statistics, join]
        return {type(each).__name__: type(each) for each in found}


def parameters(function: Any) -> str:
    """Returns the signature without annotations, and without what takes words that were removed, to refuse them."""
    signature = inspect.signature(function)
    parameters = [
        each for each in signature.parameters.values() if (each.kind, each.name) != (each.VAR_KEYWORD, "removed")
    ]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def is_ours(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] == "gradsync"


def own_fields(cls: type) -> set[str]:
    """Returns the public attributes that a class's methods set on `self`, or that it annotates."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    targets += [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    body = tree.body[0].body  # type: ignore[attr-defined]
    of_class = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    of_self = {
        leaf.attr
        for target in targets
        for leaf in ast.walk(target)
        if isinstance(leaf, ast.Attribute) and isinstance(leaf.value, ast.Name) and leaf.value.id == "self"
    }
    return {name for name in of_class | of_self if not name.startswith("_")}


def lines_of_class(name: str, cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__mro__[1:-1] if issubclass(cls, Exception))
    given = name.rpartition(".")[2] in GIVEN or not name.startswith("gs.")
    call = "" if given or issubclass(cls, Exception) else parameters(cls)
    yield f"{name} class{call}" + (f" is a {bases}" if bases else "")
    members: dict[str, str] = {}
    for part in filter(is_ours, reversed(cls.__mro__)):
        members |= dict.fromkeys(own_fields(part), "attribute")
        for member, value in vars(part).items():
            if member.startswith("_") and member not in OPERATORS:
                continue
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if inspect.isfunction(function):
                members[member] = parameters(function).replace("(self, ", "(").replace("(self)", "()")
            elif isinstance(value, (str, int, float, bool)) and not issubclass(cls, Exception):  # not a default
                members[member] = f"= {value!r}"
            else:
                members[member] = "attribute"
    yield from (f"{name}.{member} {text}" for member, text in members.items())


def lines_of_module(name: str, module: ModuleType) -> Iterator[str]:
    own = [n for n, v in vars(module).items() if not n.startswith("_") and inspect.getmodule(v) is module]
    for member in getattr(module, "__all__", own):
        value = getattr(module, member)
        if isinstance(value, GenericAlias):  # a class for inspect, with Python 3.10
            yield f"{name}.{member}"
        elif inspect.isclass(value) and value.__name__ != member:
            yield f"{name}.{member} is {value.__name__}"
        elif inspect.ismodule(value):
            yield from lines_of_module(f"{name}.{member}", value)
        elif inspect.isclass(value):
            yield from lines_of_class(f"{name}.{member}", value)
        elif inspect.isroutine(value):
            yield f"{name}.{member} {parameters(value)}"
        else:
            yield f"{name}.{member}"


def lines_of_adapter(name: str) -> Iterator[str]:
    """Reads an adapter's source, as its library need not be installed."""
    for node in ast.parse((SOURCE / "adapters" / f"{name}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield from _lines_of_node(f"gradsync.adapters.{name}.{node.name}", node)


def _lines_of_node(name: str, node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
            if each is not None:
                each.annotation = None
        yield f"{name} ({ast.unparse(node.args)})"
    elif isinstance(node, ast.ClassDef):
        yield f"{name} class"
        for part in node.body:
            member = getattr(part, "name", "_")
            if not member.startswith("_") or member == "__init__":
                yield from _lines_of_node(f"{name}.{member}", part)


def lines_of_variables() -> Iterator[str]:
    """Finds GRADSYNC_ variables wherever the library's code spells them."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "GRADSYNC_" in text else ():
            if isinstance(node, ast.Constant) and re.fullmatch("GRADSYNC_[A-Z_]*[A-Z]", str(node.value)):
                yield f"{node.value}: variable"


def lines_of_command(name: str, command: click.Command) -> Iterator[str]:
    yield f"{name}: command"
    context = click.Context(command)
    for option in command.params:
        default = option.get_default(context)
        if not isinstance(default, (str, int, float, tuple)):
            default = None  # unset, by whatever object this version of click says so
        kind = option.type
        text = f"{' '.join((*option.opts, *option.secondary_opts))}: {kind.name}"
        text += f" {list(kind.choices)}" if isinstance(kind, click.Choice) else ""
        text += f" {kind.min} to {kind.max}" if isinstance(kind, (click.IntRange, click.FloatRange)) else ""
        text += "" if default is None or default is False else f" = {default!r}"
        yield f"{name} {text}" + (" required" if option.required else "")
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from lines_of_command(f"{name} {each}", command.get_command(context, each))  # type: ignore[arg-type]


def public_lines() -> list[str]:
    lines = [*lines_of_module("gs", gs), *lines_of_variables(), *lines_of_command("gradsync", main)]
    for name, cls in given_classes().items():
        lines += lines_of_class(name, cls)
    for adapter in ("torch", "jax"):
        lines += lines_of_adapter(adapter)
    return sorted({line.strip() for line in lines})


if __name__ == "__main__":
    sys.stdout.write("\n".join(public_lines()) + "\n")

"""What the ranks are to run: a script, a module or a function, made ready before any process starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from gradsync import environment
from gradsync.errors import InvalidArgument
from gradsync.launching.in_rank import rank_main
from gradsync.launching.in_rank.conventions import Call


@dataclass(frozen=True)
class Target:
    """What to run, for `rank_main`.

    Attributes:
        record: the start record, of types that `marshal` knows.
        command_line: shown behind the shim on the rank's command line, for people who read `ps`.
        descriptors: file descriptors that the ranks inherit.
        call: function, positional and keyword arguments, where the ranks are forked and have them already.
    """

    record: dict[str, Any]
    command_line: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    call: Call | None = None


def script_target(path: str, arguments: Sequence[str] = ()) -> Target:
    """Prepares a script.

    Raises:
        InvalidArgument: there is no such file, or it is the interpreter.
    """
    is_interpreter = os.path.basename(path).rstrip(".0123456789") == "python" and not os.path.isdir(path)
    if is_interpreter and (not os.path.exists(path) or os.access(path, os.X_OK)):
        raise InvalidArgument(f"leave out {path!r}: gradsync starts Python itself, as in gradsync run -n 2 script.py")
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise InvalidArgument(f"script {path!r} is a directory without a __main__.py")
    elif not os.path.exists(path):
        raise InvalidArgument(f"script {path!r} does not exist (looked in {os.getcwd()})")
    elif not os.access(path, os.R_OK):
        raise InvalidArgument(f"script {path!r} cannot be read")
    record = {"kind": "script", "path": path, "arguments": list(arguments)}
    return Target(record, (path, *arguments))


def module_target(name: str, arguments: Sequence[str] = ()) -> Target:
    """Prepares a module, found as `python -m` finds it.

    Raises:
        InvalidArgument: the top-level package does not exist, or the name is malformed.
    """
    # Deeper names would import their parents here, in the launcher: the ranks report those.
    top = name.partition(".")[0]
    if not _module_exists(top):
        raise InvalidArgument(f"module {name!r} does not exist (no {top!r} in {os.getcwd()} or sys.path)")
    record = {"kind": "module", "module": name, "arguments": list(arguments)}
    return Target(record, ("-m", name, *arguments))


def function_target(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str | None = None,
    *,
    who: str = "the launch",
    start_method: str = "spawn",
) -> Target:
    """Prepares a call, for this process's own children.

    Args:
        function: what each rank calls.
        arguments: positional arguments.
        keywords: keyword arguments.
        name: what errors and `ps` call the function; by default its own name.
        who: what launches it, for errors.
        start_method: with "fork" ranks have the call as it is, and nothing needs to pickle; with "spawn" and
            "forkserver" it is pickled.

    Raises:
        InvalidArgument: there is no function, the arguments are no sequence, one of them does not pickle, or this
            process is itself a rank.
    """
    if not callable(function):
        raise InvalidArgument(f"{who} needs a function, got {function!r}")
    if isinstance(arguments, str | bytes) or not isinstance(arguments, Sequence):
        raise InvalidArgument(f"{who} needs args as a tuple, got {arguments!r}; one argument is written (value,)")
    name = name or function_name(function)
    _refuse_inside_rank(name)
    call = (function, tuple(arguments), dict(keywords))
    if start_method == "fork":
        return Target({"kind": "function"}, (name,), call=call)
    return _pickled_target(call, name)


def function_name(function: Callable[..., Any]) -> str:
    """Gives what errors and `ps` call a function."""
    return getattr(function, "__qualname__", repr(function))


def _pickled_target(call: Call, name: str) -> Target:
    import pickle
    from multiprocessing import context, spawn

    from gradsync.launching.pickled_call import pickle_call

    inherited = _InheritedDescriptors()
    preparation = spawn.get_preparation_data(name)
    ranks_import_main = _has_main(preparation)
    if not ranks_import_main:
        preparation.pop("init_main_from_path", None)
    # Queues and locks of multiprocessing pickle only while a process is being spawned.
    context.set_spawning_popen(inherited)  # type: ignore[arg-type]
    try:
        record = {
            "kind": "function",
            "preparation": pickle.dumps(preparation),
            "call": pickle_call(call, name, ranks_import_main=ranks_import_main),
            "tracker_descriptor": _resource_tracker_descriptor(inherited),
        }
    finally:
        context.set_spawning_popen(None)
    return Target(record, (name,), tuple(dict.fromkeys(inherited.descriptors)))


def _refuse_inside_rank(name: str) -> None:
    if rank_main.is_importing_main():
        raise InvalidArgument(
            "a rank imports the script that launched it, to find the function in it, and came to the launch "
            'again; put the launch under `if __name__ == "__main__":`'
        )
    if rank := os.environ.get(environment.RANK):
        advice = (
            "ranks cannot launch ranks; launch it from the process that has launched this one"
            if rank_main.runs_function()
            else "this script starts its own ranks; run it with python, not with gradsync run"
        )
        raise InvalidArgument(f"{name} was launched inside rank {rank}: {advice}")


def _module_exists(name: str) -> bool:
    if PathFinder.find_spec(name, [os.getcwd()]) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # an empty name, or a module made by hand, such as __main__
        return False


class _InheritedDescriptors:
    """Stands for the process to be spawned while multiprocessing objects are pickled."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return descriptor

    def DupFd(self, descriptor: int) -> _InheritedDescriptor:  # noqa: N802 - multiprocessing's name
        return _InheritedDescriptor(descriptor)


@dataclass(frozen=True)
class _InheritedDescriptor:
    """A descriptor that has the same number in the rank."""

    descriptor: int

    def detach(self) -> int:
        return self.descriptor


def _resource_tracker_descriptor(inherited: _InheritedDescriptors) -> int | None:
    """Gives the ranks this process's resource tracker, where it has one.

    A rank with a tracker of its own would unlink shared memory that it only attached to.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return None if tracker is None else inherited.duplicate_for_child(tracker.getfd())


def ranks_can_import_main() -> bool:
    """Tells whether fresh ranks find this process's `__main__` again; they do not in an interactive session."""
    from multiprocessing import spawn

    return _has_main(spawn.get_preparation_data("main"))


def _has_main(preparation: Mapping[str, Any]) -> bool:
    path = preparation.get("init_main_from_path")
    return "init_main_from_name" in preparation or (path is not None and os.path.exists(path))

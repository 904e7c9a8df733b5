"""What the ranks are to run: a script, a module or a function, made ready before any process starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

from gradsync import environment
from gradsync.errors import InvalidArgument
from gradsync.launching import rank_main


@dataclass(frozen=True)
class Target:
    """What to run, for `rank_main`.

    Attributes:
        record: the start record, of types that `marshal` knows.
        command_line: shown behind the shim on the rank's command line, for people who read `ps`.
        descriptors: file descriptors that the ranks inherit.
    """

    record: dict[str, Any]
    command_line: tuple[str, ...]
    descriptors: tuple[int, ...] = field(default=())


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
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], name: str
) -> Target:
    """Prepares a call, by pickle between this process and its own children.

    Args:
        function: found again in the rank by its module and name.
        arguments: positional arguments.
        keywords: keyword arguments.
        name: what errors and `ps` call the function.

    Raises:
        InvalidArgument: the function or an argument does not pickle, or this process is itself a rank.
    """
    if rank_main.is_importing_main():
        raise InvalidArgument(
            "a rank imports the script that launched it, to find the function in it, and came to the launch "
            'again; put the launch under `if __name__ == "__main__":`'
        )
    if rank := os.environ.get(environment.RANK):
        raise InvalidArgument(
            f"{name} was launched inside rank {rank}: this script starts its own ranks; run it with python, "
            "not with gradsync run"
        )
    from multiprocessing import context, spawn
    from multiprocessing.reduction import ForkingPickler

    inherited = _InheritedDescriptors()
    preparation = spawn.get_preparation_data(name)
    if getattr(function, "__module__", None) == "__main__" and not _main_can_be_imported(preparation):
        raise InvalidArgument(
            f"{name} is defined in an interactive session, where the ranks cannot import it; "
            "define it in a script or a module"
        )
    # Queues and locks of multiprocessing pickle only while a process is being spawned.
    context.set_spawning_popen(inherited)  # type: ignore[arg-type]
    try:
        record = {
            "kind": "function",
            "preparation": bytes(ForkingPickler.dumps(preparation)),
            "call": bytes(ForkingPickler.dumps((function, tuple(arguments), dict(keywords)))),
            "tracker_descriptor": _resource_tracker_descriptor(inherited),
        }
    except Exception as error:
        if _pickles(function):
            raise InvalidArgument(f"the arguments of {name} need to pickle to reach the ranks: {error}") from None
        raise InvalidArgument(
            f"{name} needs to pickle to reach the ranks: {error}; define it at the top level of a module or "
            "script, not as a lambda or inside another function"
        ) from None
    finally:
        context.set_spawning_popen(None)
    return Target(record, (name,), tuple(inherited.descriptors))


def _pickles(function: Callable[..., Any]) -> bool:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(function)
    except Exception:
        return False
    return True


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


def _main_can_be_imported(preparation: Mapping[str, Any]) -> bool:
    path = preparation.get("init_main_from_path")
    return "init_main_from_name" in preparation or (path is not None and os.path.exists(path))

"""Checks that ranks run in a Python of their own, and report in a file; pytest reads no more than their names."""

from __future__ import annotations

import ast
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names_of(path: str) -> list[str]:
    """Returns the checks of a file, whose libraries need not be installed here."""
    body = ast.parse(Path(path).read_text()).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def run_all(checks: dict[str, Callable[[Any], None]], comm: Any, folder: str) -> None:
    """Runs checks of a communicator, and leaves what became of each: "", or its traceback."""
    outcomes = {}
    for name, check in checks.items():
        try:
            check(comm)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = f"rank {comm.rank}:\n{traceback.format_exc()}"
        Path(folder, f"{comm.rank}.json").write_text(json.dumps(outcomes))
        comm.barrier()


def outcomes_in(folder: Path, world_size: int) -> dict[str, str]:
    """Returns what became of the checks on all ranks."""
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {name: "\n".join(filter(None, (of_rank[name] for of_rank in by_rank))) for name in by_rank[0]}


def expect(kind: type[Any], action: Callable[[], Any], text: str = "") -> Any:
    """Returns the error of that kind that the action must raise."""
    try:
        action()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return error
    raise AssertionError(f"{kind.__name__} was not raised")

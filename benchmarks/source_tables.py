"""Parts of the pages that are made from the source: environment variables, and the help of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from gradsync.cli import main
from gradsync.environment import VARIABLES

_COLUMNS = 100


def variables() -> list[str]:
    """Returns the lines of a table of the environment variables and their purposes."""
    lines = ["| variable | what it is |", "| --- | --- |"]
    return lines + [f"| `{variable}` | {variable.help} |" for variable in VARIABLES]


def commands() -> list[str]:
    """Returns a section for each command of `gradsync`, with its --help."""
    lines: list[str] = []
    for context in _contexts(main.make_context("gradsync", [], resilient_parsing=True, terminal_width=_COLUMNS)):
        lines += [f"## {context.command_path}", "", "```text", *context.get_help().splitlines(), "```", ""]
    return lines[:-1]


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yields the context of a command, and of those below it."""
    yield context
    if isinstance(context.command, click.Group):
        for name, command in context.command.commands.items():
            yield from _contexts(click.Context(command, info_name=name, parent=context))


#: By their names in the pages.
SOURCES: dict[str, Callable[[], list[str]]] = {"variables": variables, "commands": commands}

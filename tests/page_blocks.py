"""The blocks of code in a page, and what each has that it can be believed; see CONTRIBUTING.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("examples/*.md"))]

_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^( *)```(\S*)\n(.*?)^\2```$", flags=re.DOTALL | re.MULTILINE)
_TEST = re.compile(r"run by (tests/[\w/]+\.py)::(\w+)")


class Block(NamedTuple):
    """A block of code.

    Attributes:
        mark: the comment in the line before it, or "".
        language: what stands after its first backticks.
        text: its lines.
    """

    mark: str
    language: str
    text: str

    @property
    def runs_alone(self) -> bool:
        """Whether it is a script that nothing else runs."""
        return self.language == "python" and not self.mark

    @property
    def commands(self) -> list[str]:
        """The commands of a console, without their comments."""
        lines = [line for line in self.text.splitlines() if line.startswith("$ ")]
        return [line.removeprefix("$ ").split(" #")[0].strip() for line in lines]


def blocks_of(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, in order."""
    for mark, indent, language, text in _BLOCK.findall(page):
        yield Block(mark, language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))


def complaint(block: Block, targets: set[str]) -> str | None:
    """Returns why nobody would notice if a block were wrong; None where a test would.

    Args:
        block: any block.
        targets: those of the Makefile, which has CI and people to run it.
    """
    if block.mark.startswith("run by"):
        return _missing_test(block.mark)
    if block.mark.startswith("not run: ") and len(block.mark) > len("not run: "):
        return None
    if block.language == "python" and (not block.mark or block.mark.startswith("file: ")):
        return None  # run by itself, or as the file, which test_pages.py looks for
    if block.language == "text":
        return None
    if block.language == "console":
        if re.fullmatch(r"exit code \d+", block.mark):
            return None if len(block.commands) == 1 and block.text.startswith("$ ") else "not one command, at its top"
        unknown = [command for command in block.commands if not _is_target(command, targets)]
        return f"nothing runs {unknown}" if unknown else None
    return "nothing runs it, and no <!-- not run: reason --> says why"


def _is_target(command: str, targets: set[str]) -> bool:
    words = command.split()
    return len(words) == 2 and words[0] == "make" and words[1] in targets


def _missing_test(mark: str) -> str | None:
    named = _TEST.fullmatch(mark)
    if named is None:
        return f"{mark!r} names no test: run by tests/test_x.py::test_y"
    path = ROOT / named[1]
    there = path.exists() and re.search(rf"^def {named[2]}\(", path.read_text(), flags=re.MULTILINE)
    return None if there else f"there is no test {named[1]}::{named[2]}"

"""A change of a public name is seen in review, and has a line in CHANGELOG.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CHANGELOG = TESTS.parent / "CHANGELOG.md"


def names_and_signatures(lines: list[str]) -> dict[str, list[str]]:
    """Returns what follows each name, in parts: "gs.spawn (func, args=())" is {"gs.spawn": ["(func", "args=())"]}.

    Of commands each option is a part: {"gradsync run": ["--debug: boolean", ...]}.
    """
    found: dict[str, list[str]] = {}
    for line in lines:
        name, rest = re.fullmatch(r"(gradsync[ a-z]*(?=[ :])|[^ :]+)[: ]*(.*)", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, []).extend([rest] if name.startswith("gradsync") else rest.split(", "))
    return found


def changed_words(old: list[str], new: list[str]) -> set[str]:
    """Returns the last word of each name that came or went, and what changed in the signatures of the others."""
    before, after = names_and_signatures(old), names_and_signatures(new)
    words = {name.replace(".", " ").split()[-1] for name in before.keys() ^ after.keys()}
    for name in before.keys() & after.keys():
        differing = set(before[name]) ^ set(after[name])
        words |= {re.findall(r"[\w-]*\w", part)[0] for part in differing if re.search(r"\w", part)}
        if not differing and before[name] != after[name]:
            words.add(name.rpartition(".")[2])
    return words


def since_the_first_edition(changelog: str) -> str:
    """Returns the text above the heading of version 0.1.0."""
    text, heading, _ = changelog.partition("\n## 0.1.0\n")
    assert heading
    return text


def not_told(words: set[str], text: str) -> set[str]:
    return {word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?!\w)", text)}


def test_public_api_is_as_written_down() -> None:
    made = subprocess.run([sys.executable, TESTS / "public_api.py"], capture_output=True, text=True, check=True).stdout
    written = (TESTS / "public_api.txt").read_text()
    assert made.splitlines() == written.splitlines(), (
        "public names have changed: run `python tests/public_api.py > tests/public_api.txt`, look at what changed, and "
        "add a line for users to CHANGELOG.md"
    )


def test_changes_since_the_first_edition_are_in_the_changelog() -> None:
    old, new = [(TESTS / name).read_text().splitlines() for name in ("public_api_first_edition.txt", "public_api.txt")]
    missing = not_told(changed_words(old, new), since_the_first_edition(CHANGELOG.read_text()))
    assert not missing, f"CHANGELOG.md needs a line that names {', '.join(sorted(missing))}"

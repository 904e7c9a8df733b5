"""Links of the repository become those of the site, which needs nothing but itself, not even a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from page_blocks import ROOT

pytest.importorskip("mkdocs", reason="`make docs` brings it")
sys.path.insert(0, str(ROOT / "docs"))

import pages


@pytest.mark.parametrize(
    ("home", "folder", "link", "turned"),
    [
        ("", "", "docs/gradients.md#hooks", "gradients.md#hooks"),
        ("", "", "CONTRIBUTING.md", "contributing.md"),
        ("docs", "", "../README.md#speed", "index.md#speed"),
        ("docs", "", "../examples/clusters/slurm.sh", "examples/clusters/slurm.sh"),
        ("docs", "", "machines.md", "machines.md"),
        ("docs/reference", "reference", "../gradients.md", "../gradients.md"),
        ("docs/reference", "reference", "comm.md", "comm.md"),
        ("examples", "examples", "../docs/own_loop.md", "../own_loop.md"),
        ("docs", "", "no_such_page.md", "no_such_page.md"),
        ("docs", "", "https://numpy.org/doc", "https://numpy.org/doc"),
        ("docs", "", "#here", "#here"),
    ],
)
def test_links_lead_to_the_same_file(home: str, folder: str, link: str, turned: str) -> None:
    assert pages.relink(f"see [this]({link}).", home, folder) == f"see [this]({turned})."


def test_code_is_left_alone() -> None:
    page = "```python\na[0](docs/gradients.md)\n```\n"
    assert pages.relink(page, "", "") == page


def test_the_site_can_be_searched_when_its_pages_are_opened_as_files(tmp_path: Path) -> None:
    """A browser refuses these what the search needs: a worker, and to fetch the index. Scripts stand in for both."""
    for name in ("material", "mkdocstrings"):
        pytest.importorskip(name, reason="`make docs` brings it")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    index = json.loads((tmp_path / "search" / "search_index.js").read_text().removeprefix("var __index = "))
    assert index == json.loads((tmp_path / "search" / "search_index.json").read_text())
    found = sorted(tmp_path.rglob("*.html"))
    assert len(found) > 20
    for page in found:
        loaded = re.findall(r"<(?:script|link)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert any(path.endswith("scripts/iframe-worker.js") for path in loaded), page
        if page.name != "404.html":  # which is asked for by any path, from a server
            assert [path for path in loaded if not (page.parent / path).exists()] == [], page

"""Links of the repository become those of the site; whether they lead anywhere, `make docs` finds out."""

from __future__ import annotations

import sys

import pytest

from page_blocks import ROOT

pytest.importorskip("mkdocs", reason="`make docs` brings it")
sys.path.insert(0, str(ROOT / "documentation"))

import pages


@pytest.mark.parametrize(
    ("home", "folder", "link", "turned"),
    [
        ("", "", "docs/gradients.md#hooks", "gradients.md#hooks"),
        ("", "", "CONTRIBUTING.md", "contributing.md"),
        ("docs", "", "../README.md#why-not", "index.md#why-not"),
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

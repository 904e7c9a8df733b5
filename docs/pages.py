"""What the site has beside docs: README.md as its home, two more pages of the repository, and the files they link to.

A hook of MkDocs. In the repository pages link to each other, and to example files, by paths that work there; here each
link becomes the path of the same file in the site. A link to what is not there stays as it is, and MkDocs warns.
`<!-- help: gradsync run -->` becomes the help of this command.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Pages that the repository keeps outside of docs, and where they are in the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_HELP = re.compile(r"<!-- help: ([a-z ]+) -->")
_FENCE = re.compile(r"^(```.*?^```$)", flags=re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of PAGES, those of the examples, and every file of the repository that some page links to."""
    examples = (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("examples/*.md")))
    for path in (*PAGES, *examples):
        files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    for page in files.documentation_pages():
        for path in _linked(page.content_string, _home(page.src_uri)):
            name = in_site(path)
            if files.get_file_from_path(name) is None and (ROOT / path).is_file():
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Points links at the site's own files, and puts the help of commands in its places."""
    uri = page.file.src_uri
    return _HELP.sub(_help, relink(markdown, _home(uri), posixpath.dirname(uri)))


def relink(markdown: str, home: str, folder: str) -> str:
    """Returns a page with the links of the repository turned into those of the site.

    Args:
        markdown: the page.
        home: the folder of the repository that its links start from, e.g. "docs".
        folder: the folder of the site in which the page is.
    """

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(home, link[2]))
        if not (ROOT / path).exists():
            return link[0]
        return f"{link[1]}{posixpath.relpath(in_site(path), folder or '.')}{link[3] or ''}{link[4]}"

    parts = _FENCE.split(markdown)  # code and prose take turns
    return "".join(part if part.startswith("```") else _LINK.sub(turned, part) for part in parts)


def in_site(path: str) -> str:
    """Returns where a file of the repository is in the site."""
    return PAGES.get(path, path.removeprefix("docs/"))


def _help(marker: re.Match[str]) -> str:
    """Returns the help of a command, as a block."""
    command = [sys.executable, "-m", *marker[1].split(), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return f"```text\n{shown.replace('python -m gradsync', 'gradsync')}```"


def _home(uri: str) -> str:
    """Returns the folder of the repository in which a page of the site has its source."""
    source = next((path for path, name in PAGES.items() if name == uri), None)
    if source is not None:
        return ""
    return posixpath.dirname(uri if (ROOT / uri).is_file() else f"docs/{uri}")


def _linked(markdown: str, home: str) -> set[str]:
    """Returns the files of the repository that a page links to."""
    prose = "".join(part for part in _FENCE.split(markdown) if not part.startswith("```"))
    return {posixpath.normpath(posixpath.join(home, link[2])) for link in _LINK.finditer(prose)}

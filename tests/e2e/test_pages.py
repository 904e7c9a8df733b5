"""The pages: their programs run, their commands print what they show, and what they name is there.

A block with title="examples/NAME.py" is a part of that file, which has a test of its own. A fragment, a block that does
not import gradsync, runs within FRAME, unless it is of another library.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from functools import reduce
from pathlib import Path

import pytest

import gradsync as gs
from gradsync import cli as command_line
from gradsync import environment

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(PAGES) if path.name != "CHANGELOG.md"}
EXAMPLES = {path.read_text() for path in (ROOT / "examples").rglob("*.py")}  # their own tests run them


def blocks(language):
    """Yields each block of code of the pages as a parameter, with the line that it begins at."""
    for page, text in TEXTS.items():
        for found in re.finditer(rf"```{language}\n(.*?)```", text, flags=re.DOTALL):
            line = text[: found.start()].count("\n") + 2
            mark = [pytest.mark.mpi] if "mpi4py import" in found[1] or "mpiexec" in found[1] else []
            yield pytest.param(found[1], id=f"{page}:{line}", marks=mark)


PROGRAMS = [
    block
    for block in blocks("python")
    if block.values[0] not in EXAMPLES
    and re.search(r"^(import gradsync|from (gradsync|mpi4py))", block.values[0], re.MULTILINE)
]


def without_advice(errors):
    """What is wrong; that a machine has few cores is not."""
    return re.sub(r"gradsync: \d+ ranks share \d+ cores?, .*\n", "", errors)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(cli, script, program):
    """On two ranks, or by itself where it starts them, and without a word of complaint."""
    path = script(program)
    if "from mpi4py" in program:
        done = cli.program(Path(sys.executable).with_name("mpiexec"), "-n", 2, sys.executable, path, cwd=path.parent)
    elif "gs.launcher" in program:
        done = cli.python(path, cwd=path.parent)
    else:
        done = cli("run", "-n", 2, path, cwd=path.parent)
    assert (done.code, without_advice(done.err)) == (0, "")


FRAME = """\
import json
import sys
import numpy as np
import gradsync as gs
sys.modules["cupy"] = cupy = np
with gs.init_process_group() as comm:
    weights, batch, gradients = np.zeros(3), np.ones((4, 3)), {"w": np.zeros(3)}
    gs.bcast_list_([weights])
    def gradient_of(batch):
        return batch.mean(0) + weights
    sync = gs.AllreduceCallback("mean")
"""


NOT_HERE = r"^(import|from) gradsync|mpi4py|torch|jax|hvd|cupyx|loss\.backward"
FRAGMENTS = [block for block in blocks("python") if not re.search(NOT_HERE, block.values[0], re.MULTILINE)]


@pytest.mark.parametrize("block", [block for block in FRAGMENTS if block.values[0] not in EXAMPLES])
def test_a_fragment_runs(cli, script, block):
    path = script(FRAME + textwrap.indent(block, "    "))
    done = cli("run", "-n", 2, path, cwd=path.parent)
    assert (done.code, without_advice(done.err)) == (0, "")


def flat(text):
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.mark.parametrize("page", TEXTS)
def test_a_block_with_a_title_is_of_that_file(page):
    for name, block in re.findall(r'^```python title="([^"\n]*)"\n(.*?)^```$', TEXTS[page], re.DOTALL | re.MULTILINE):
        assert flat(block) in flat((ROOT / name).read_text())


SHOWN = [block for block in blocks("console") if len(block.values[0].splitlines()) > 1 == block.values[0].count("$ ")]
MASKS = [
    (r"\bpid \d+", "pid N"),
    (r"\bon [\w.-]+\) (?=failed|was)", "on HOST) "),
    (r"\b\d+(\.\d+)?(e-?\d+)? ?(us|ms|s)\b", "T"),
    (r"\brank \d(?=\] gradsync: |, T a step)", "rank R"),  # the one that ended last; the one that was late
    (r"(a step): .*|last to \d+ of \d+", r"\1 ..."),
    (r"(src/\S+\.py):\d+", r"\1:N"),
    (r"\bstep \d+(?=: 4 ranks)|\b\d+(?= rebuilds)", "N"),  # when the new rank has come
]


def masked(line, *folders):
    for pattern, mask in [*((re.escape(f"{folder}/"), "") for folder in folders), *MASKS]:
        line = re.sub(pattern, mask, line)
    return line


@pytest.mark.parametrize("block", SHOWN)
def test_a_command_prints_what_is_shown(cli, tmp_path, block):
    """Each line that is shown is printed; times, and what else differs from run to run, are masked."""
    for name in ("examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    command, *shown = block.splitlines()
    words = shlex.split(command.removeprefix("$ "))
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    program = {"gradsync": [sys.executable, "-m", "gradsync"], "python": [sys.executable]}.get(words[0])
    program = program or [Path(sys.executable).with_name(words[0])]
    words = [sys.executable if word == "python" else word for word in words[1:]]
    done = cli.program(*program, *words, cwd=tmp_path, environment=variables)
    printed = {masked(line, tmp_path, ROOT) for line in (done.out + done.err).splitlines()}
    assert [line for line in shown if masked(line) not in printed | {"..."}] == [], done.out + done.err


def anchors_of(text):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_a_link_leads_somewhere(page):
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", TEXTS[page]):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors_of(target.read_text()), f"{path}#{anchor}"


@pytest.mark.parametrize("page", TEXTS)
def test_what_a_page_names_is_there(page):
    """Public names, options of the command, variables, targets of make."""
    text = TEXTS[page]
    for name in set(re.findall(r"\bgs\.([A-Za-z_]+(?:\.[A-Za-z_]+)*)", text)) - {"WORLD"}:  # which is there in a group
        reduce(getattr, name.split("."), gs)
    sync = gs.AllreduceCallback(name="pages")
    assert set(re.findall(r"\bsync\.([a-z_]+)", text)) - set(dir(sync)) == set()
    for command, words in re.findall(r"\bgradsync (run|serve|doctor)\b([^`\n#]*)", text):
        known = {word for option in command_line.main.commands[command].params for word in option.opts}
        given = {word.partition("=")[0] for word in words.partition(".py")[0].split() if re.match("--[a-z]", word)}
        assert given - known - {"--help"} == set(), command
    variables = set(re.findall(r"\bGRADSYNC_[A-Z_]+[A-Z]\b", text))
    assert variables - set(environment.VARIABLES) == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^\$ )make ([a-z][a-z-]*)", text, re.MULTILINE)) - targets == set()


def test_the_map_of_the_source_names_what_is_there():
    text = re.sub(r"`(gradsync|GRADSYNC)\W.*?`", "", TEXTS["docs/architecture.md"])
    files = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c")]
    for name in re.findall(r"[\w/]+\.(?:py|c)\b", text):
        assert any(f"/{path}".endswith(f"/{name}") for path in files), name
    source = "".join(path.read_text() for path in files)
    for name in re.findall(r"`(_?\w+)(?:\([^`]*\))?`", text):
        assert re.search(rf"\b{name}\b", source), name


def test_the_page_of_the_api_has_every_public_name():
    shown = set(re.findall(r"^::: gradsync\.(\w+)", TEXTS["docs/api.md"], re.MULTILINE))
    names = {name for name in dir(gs) if not name.startswith("_") and not hasattr(gs.errors, name)}
    assert "errors" in shown  # the module: all of its classes
    assert names - shown == set()

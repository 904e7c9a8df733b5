"""README.md and the pages under docs are true: their code runs, what they name is there, and nothing is left out."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.communicators.collectives.asynchronous import Asynchronous
from gradsync.communicators.collectives.objects import Objects
from page_blocks import DOCS, PAGES, ROOT, Block, blocks_of, complaint

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
ONE_BOOTS_LATE = re.compile(r"gradsync: \d of \d ranks have joined; waiting for .*\n")  # on a very busy machine
SCRIPTS = {
    f"{name}-{number}": block.text
    for name, text in TEXTS.items()
    for number, block in enumerate(blocks_of(text))
    if block.runs_alone
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_of_code_is_run_by_something(name: str) -> None:
    found = [(complaint(block, TARGETS), block) for block in blocks_of(TEXTS[name])]
    assert not [each for each in found if each[0]]


@pytest.mark.parametrize(
    "page",
    [
        "```sh\nrm -rf build\n```\n",
        "<!-- not run: -->\n```sh\nls\n```\n",
        "<!-- run by tests/test_pages.py::test_that_is_not_there -->\n```sh\nls\n```\n",
        "<!-- run by a test -->\n```sh\nls\n```\n",
        "```console\n$ gradsync run -n 2 train.py\n```\n",
        "```console\n$ make wonders\n```\n",
        "<!-- exit code 0 -->\n```console\n$ ls\n$ pwd\n```\n",
        "<!-- exit code 0 -->\n\n```console\n$ ls\n```\n",
        "- a list\n\n  ```sh\n  ls\n  ```\n",
        "```yaml\na: 1\n```\n",
        "```\nplain\n```\n",
        "<!-- whatever -->\n```python\n1 / 0\n```\n",
    ],
)
def test_a_block_that_nothing_runs_is_noticed(page: str) -> None:
    [block] = blocks_of(page)
    assert complaint(block, TARGETS) or (block.language == "python" and block.runs_alone)


def test_blocks_that_something_runs_are_let_through() -> None:
    page = (
        "```python\nprint(1)\n```\n<!-- not run: needs a GPU -->\n```sh\nls\n```\n"
        "```console\n$ make demo  # once\n```\n"
        "<!-- run by tests/test_pages.py::test_blocks_that_something_runs_are_let_through -->\n```sh\nls\n```\n"
    )
    blocks = list(blocks_of(page))
    assert len(blocks) == 4
    assert [complaint(block, TARGETS) for block in blocks] == [None] * 4
    assert [block.runs_alone for block in blocks] == [True, False, False, False]


#: Files that need a library, which a user of the page may not have.
RUN_ELSEWHERE = {
    "examples/torch_loop.py": "run by tests/prove/adapters/test_example_loops.py::test_the_loop_of_pytorch",
    "examples/jax_loop.py": "run by tests/prove/adapters/test_example_loops.py::test_the_loop_of_jax",
}


def test_every_file_that_is_shown_is_run_beside_it() -> None:
    assert not any(complaint(Block(mark, "python", ""), TARGETS) for mark in RUN_ELSEWHERE.values())
    for name, text in TEXTS.items():
        played = " ".join(block.text.splitlines()[0] for block in blocks_of(text) if block.mark.startswith("exit code"))
        for block in blocks_of(text):
            if block.mark.startswith("file: "):
                file = block.mark.removeprefix("file: ")
                assert file in played or file in RUN_ELSEWHERE, f"{name} shows {file}, and does not run it"


@pytest.mark.parametrize("name", SCRIPTS)
def test_python_blocks_run(tmp_path: Path, name: str) -> None:
    code = SCRIPTS[name]
    script = tmp_path / "block.py"
    script.write_text(code)
    alone = "__main__" in code  # it starts its own ranks
    launcher = [] if alone else ["-m", "gradsync", "run", "-n", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert (done.returncode, ONE_BOOTS_LATE.sub("", done.stderr)) == (0, ""), code
    expected = re.findall(r"by rank: (\[.*?\])", code)
    assert not expected or done.stdout.strip() == expected[0]


def test_the_commands_for_several_machines_run(tmp_path: Path) -> None:
    """With two launchers on this machine in place of two machines, and a rank each in place of eight."""
    marked = [block for block in blocks_of(TEXTS["docs/machines.md"]) if block.mark.startswith("run by")]
    block = marked[0].text.replace("head:29400", f"127.0.0.1:{gs.free_port()}").replace("-n 8", "-n 1")
    secret, *nodes = block.replace("gradsync run", f"{shlex.quote(sys.executable)} -m gradsync run").splitlines()
    (tmp_path / "train.py").write_text(
        "import gradsync as gs\n"
        "with gs.init_process_group('shm') as comm:\n"
        "    print(comm.objects.all_gather(comm.rank))\n"
    )
    subprocess.run(secret, shell=True, cwd=tmp_path, check=True, timeout=60)
    started = [
        subprocess.Popen(node, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for node in nodes
    ]
    told = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert [out for out, _ in told] == ["[rank 0] [0, 1]\n", "[rank 1] [0, 1]\n"]


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_page_names_is_there(name: str) -> None:
    text, folder = TEXTS[name], (ROOT / name).parent
    named = re.findall(r"`((?:benchmarks|examples|src/gradsync|tests)/[\w/.]+\w)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [target for target in re.findall(r"`make ([a-z-]+)`", text) if target not in TARGETS] == []
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in linked if not (folder / link).exists()] == []


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 220


def test_the_guide_says_of_each_target_what_the_makefile_says() -> None:
    said = dict(re.findall(r"^\$ make ([a-z-]+) +# (.*)", TEXTS["CONTRIBUTING.md"], flags=re.MULTILINE))
    does = dict(re.findall(r"^([a-z-]+):.*?## (.*)", MAKEFILE, flags=re.MULTILINE))
    assert said == {target: does[target] for target in said}
    assert {"test", "lint", "docs", "soak"} <= set(said)


def test_every_collective_is_shown_as_it_is_called() -> None:
    homes = {"asynchronous": Asynchronous, "objects": Objects}
    shown = set()
    for code in re.findall(r"`(comm\.[a-z_.]+\([^`]*\))`", TEXTS["docs/collectives.md"]):
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        *path, name = ast.unparse(call.func).split(".")[1:]
        method = getattr(homes[path[0]] if path else gs.Communicator, name)
        inspect.signature(method).bind("self", *call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
        shown.add(name)
    collectives = {name for name in vars(Asynchronous) if not name.startswith("_")}
    assert collectives | {"new_group", "split", "split_by_machine"} <= shown


def test_every_error_is_explained() -> None:
    """Somewhere that people read, and not in the reference only."""
    read = "".join(text for name, text in TEXTS.items() if not name.startswith("docs/reference/"))
    classes = {name: getattr(gs, name) for name in gs.__all__ if inspect.isclass(getattr(gs, name))}
    errors = {name for name, found in classes.items() if issubclass(found, Exception)}
    assert {"RankFailed", "WorkerError"} <= errors
    assert [name for name in errors if f"{name}`" not in read] == []


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(text for name, text in TEXTS.items() if name.startswith("docs/reference/"))
    shown = set(re.findall(r"^::: gradsync\.(\w+)$", reference, flags=re.MULTILINE))
    public = set(gs.__all__) - {"__version__"}
    assert public == shown, "add to a page under docs/reference:  ::: gradsync.NAME"


def test_make_demo_runs_the_demo() -> None:
    """`make demo` is this command, after installing; CI and the test of the example run the rest."""
    recipe = MAKEFILE.partition("\ndemo:")[2].splitlines()[1]
    assert recipe.endswith("gradsync run -n 2 examples/train_digits.py")


def test_every_page_has_its_place_in_the_site() -> None:
    """MkDocs warns of it too, where it is installed."""
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in DOCS.rglob("*.md") if f": {page.relative_to(DOCS)}\n" not in site] == []

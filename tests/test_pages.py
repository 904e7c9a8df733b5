"""README.md and the pages under docs are true: their code is run, what they name is there, and nothing is left out."""

from __future__ import annotations

import ast
import inspect
import operator
import re

import pytest

import gradsync as gs
from gradsync.communicators.communicator import Asynchronous
from gradsync.communicators.objects import Objects
from gradsync.environment import VARIABLES
from page_blocks import DOCS, PAGES, ROOT, Block, blocks_of, complaint

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_of_code_is_run_by_something(name: str) -> None:
    found = [(complaint(block, TARGETS), block) for block in blocks_of(TEXTS[name])]
    assert not [each for each in found if each[0]]


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


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_page_names_is_there(name: str) -> None:
    text, folder = TEXTS[name], (ROOT / name).parent
    named = re.findall(r"`((?:benchmarks|examples|src/gradsync|tests)/[\w/.]+\w)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [target for target in re.findall(r"`make ([a-z-]+)`", text) if target not in TARGETS] == []
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in linked if not (folder / link).exists()] == []


def test_every_file_of_the_map_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.py)?)`", TEXTS["docs/architecture.md"]))
    assert len(named) > 15
    assert [
        path for path in named if not any((folder / path).exists() for folder in (ROOT, ROOT / "src/gradsync"))
    ] == []


@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"README.md"}))
def test_every_page_begins_with_its_purpose(name: str) -> None:
    title, _, first = TEXTS[name].split("\n", 2)
    assert title.startswith("# ")
    assert re.match(r"This (page|tutorial) [a-z]+ ", first)


@pytest.mark.parametrize("name", TEXTS)
def test_every_name_of_ours_is_there(name: str) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)))
    named = {each for each in re.findall(r"\bgs((?:\.\w+)+)", code) if not each.startswith(".WORLD")}
    assert [each for each in named if operator.attrgetter(each[1:])(gs) is None] == []
    removed = {f"GRADSYNC_TLS_{name}" for name in ("CERTIFICATE", "KEY", "CA")}
    assert set(re.findall(r"\bGRADSYNC_[A-Z]\w+", code)) <= {*VARIABLES} | removed


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


NEW_CALLS = [
    (name, code)
    for name, text in TEXTS.items()
    if "/coming_from/" in name and "detectron2" not in name
    for cells in re.findall(r"^\| [^|\n]* \| ([^|\n]*) \|", text, flags=re.MULTILINE)
    for code in re.findall(r"`((?:[a-z_]+ = )?(?:comm|gs)\.[^`]*\))`", cells)
    if "..." not in code
]


@pytest.mark.parametrize(("name", "code"), NEW_CALLS)
def test_the_new_calls_of_a_program_that_comes_from_elsewhere_have_our_arguments(name: str, code: str) -> None:
    homes = {"comm": gs.Communicator, "asynchronous": Asynchronous, "objects": Objects}
    call = ast.parse(code.partition(" = ")[2] if " = " in code.partition("(")[0] else code, mode="eval").body
    assert isinstance(call, ast.Call)
    *path, last = ast.unparse(call.func).split(".")
    if path[0] == "gs":
        function, given = operator.attrgetter(".".join([*path[1:], last]))(gs), []
    else:
        function, given = getattr(homes[path[-1]], last), ["self"]
    inspect.signature(function).bind(*given, *call.args, **{word.arg: word.value for word in call.keywords})


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

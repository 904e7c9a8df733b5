"""What is made in pages is up to date: files, output of commands, figures. test_pages.py has all else of them."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme
import scenes

SAYS = {
    "killed": "was killed by SIGKILL",
    "disagreeing": "first difference, gradient 1 of the bucket:",
    "stuck": "in read_shard",
}


@pytest.mark.timeout(200)  # one of the commands waits for a deadline
@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    made = readme.render(text)
    difference = "".join(difflib.unified_diff(text.splitlines(True), made.splitlines(True)))
    assert not difference, f"run `python benchmarks/readme.py`:\n{difference}"


def test_output_is_what_the_command_prints_on_both_streams() -> None:
    assert readme.play("gradsync --version && python -c 'exit(\"told on stderr\")'", 1).endswith("\ntold on stderr\n")


def test_another_exit_code_than_the_readme_says_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended with 3 in place of 0:\nhello\n"):
        readme.play("echo hello; exit 3", 0)


def test_a_page_leaves_the_files_of_other_pages_that_are_made_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    (tmp_path / "dumps").mkdir()
    readme.render("This page runs no command.")
    assert (tmp_path / "dumps").is_dir()
    readme.render("```console\n$ gradsync trace dumps\n```\n")
    assert not (tmp_path / "dumps").exists()


@pytest.mark.parametrize("scene", scenes.SCENES, ids=lambda scene: scene.name)
def test_recordings_have_no_path_of_a_machine_and_are_shown(scene: scenes.Scene) -> None:
    header, *events = map(json.loads, (scenes.FOLDER / f"{scene.name}.cast").read_text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, scenes.COLUMNS, scenes.ROWS)
    text = "".join(text for _, _, text in events)
    assert text.startswith(f"$ {scene.command}\r\n")
    assert SAYS[scene.name] in text
    assert str(ROOT) not in text
    assert "/home/" not in text
    picture = (scenes.FOLDER / f"{scene.name}.svg").read_text()
    assert scene.command.split()[-1] in picture.replace("&#160;", " ")
    assert f"(scenes/{scene.name}.svg)" in (ROOT / "docs" / "failures.md").read_text()


def test_a_command_is_recorded_on_a_terminal() -> None:
    code = "import sys; print(sys.stdout.isatty(), sys.argv[1])"
    text = "".join(text for _, text in scenes.record(f'python -c "{code}" {ROOT}/src/x.py'))
    assert text == "True src/x.py\r\n"

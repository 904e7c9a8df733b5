"""The recorded failures: they are asciinema's format, whole, free of this machine's paths, and made as they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scenes

SAYS = {
    "killed": "was killed by SIGKILL",
    "disagreeing": "first difference, gradient 1 of the bucket:",
    "stuck": "in read_shard",
}


def text_of(events: list[list]) -> str:
    return "".join(text for _, _, text in events)


@pytest.mark.parametrize("scene", scenes.SCENES, ids=lambda scene: scene.name)
def test_committed_recordings(scene: scenes.Scene) -> None:
    header, *events = map(json.loads, (scenes.FOLDER / f"{scene.name}.cast").read_text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, scenes.COLUMNS, scenes.ROWS)
    times = [at for at, _, _ in events]
    assert times == sorted(times)
    assert {kind for _, kind, _ in events} == {"o"}
    assert text_of(events).startswith(f"$ {scene.command}\r\n")
    assert SAYS[scene.name] in text_of(events)
    assert str(ROOT) not in text_of(events)
    assert "/home/" not in text_of(events)


@pytest.mark.parametrize("scene", scenes.SCENES, ids=lambda scene: scene.name)
def test_pictures_show_the_recordings_and_the_page_shows_the_pictures(scene: scenes.Scene) -> None:
    picture = (scenes.FOLDER / f"{scene.name}.svg").read_text()
    assert scene.command.split()[-1] in picture.replace("&#160;", " ")
    assert f"(scenes/{scene.name}.svg)" in (ROOT / "docs" / "failures.md").read_text()


def test_a_command_is_recorded_on_a_terminal_with_its_times_and_without_paths() -> None:
    code = "import sys, time; print(sys.stdout.isatty(), flush=True); time.sleep(2.5); print(sys.argv[1], end='')"
    (first, told), (second, last) = scenes.record(f'python -c "{code}" {ROOT}/src/x.py')
    assert (told, last) == ("True\r\n", "src/x.py")
    assert second > first
    cast = scenes.cast_of(scenes.Scene("x", "a title", "python x"), [(first, told), (second, last)])
    header, typed, *_ = map(json.loads, cast.splitlines())
    assert header["title"] == "gradsync: a title"
    assert typed == [0.0, "o", "$ python x\r\n"]

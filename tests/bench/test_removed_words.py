"""The error for a removed command or option of `gradsync bench` names what to run instead."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradsync.cli import main

TESTS = Path(__file__).parents[1]

PREDICT = (
    "leave this option out to measure thresholds, or run benchmarks/predict_threshold.py of the repository to predict "
    "the best threshold"
)
COMPARE = "run benchmarks/beside_peers.py of the repository"
SCALE = "run benchmarks/rendezvous_scale.py of the repository"


@pytest.mark.parametrize(
    ("arguments", "word", "instead"),
    [
        (["thresholds", "--model", "bert", "--predict", "64"], "thresholds --predict", PREDICT),
        (["thresholds", "--predict=64"], "thresholds --predict", PREDICT),
        (["thresholds", "--backward-ms", "1"], "thresholds --backward-ms", PREDICT),
        (["thresholds", "--latency-us", "1"], "thresholds --latency-us", PREDICT),
        (["thresholds", "--bandwidth-gbs", "1"], "thresholds --bandwidth-gbs", PREDICT),
        (["collectives", "-e", "1K", "--compare"], "collectives --compare", COMPARE),
        (["rendezvous"], "rendezvous", SCALE),
        (["rendezvous", "--ranks", "64", "--compare"], "rendezvous", SCALE),
        (["rendezvous", "--help"], "rendezvous", SCALE),
    ],
)
def test_a_word_that_has_gone_says_what_to_run_instead(arguments: list[str], word: str, instead: str) -> None:
    command = [sys.executable, "-m", "gradsync", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gradsync: error: gradsync bench {word} was removed: {instead}\n"


def test_a_word_that_never_was_is_unknown() -> None:
    for arguments in (["thresholds", "--prediction"], ["thresholds", "--compare"], ["meeting"]):
        command = [sys.executable, "-m", "gradsync", "bench", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 2
        assert "No such " in done.stderr
        assert "was removed" not in done.stderr


def command_lines(edition: str) -> set[tuple[str, str]]:
    """The options of an edition by command, and its commands with "" for an option."""
    found = set()
    for line in (TESTS / edition).read_text().splitlines():
        words, _, kind = line.partition(":")
        if line.startswith("gradsync "):
            parts = words.split()[1:]
            options = [part for part in parts if part.startswith("-")]
            command = " ".join(part for part in parts if not part.startswith("-"))
            found |= {(command, option) for option in options or [""]} if "command" in kind or options else set()
    return found


REMOVED = sorted(command_lines("public_api_first_edition.txt") - command_lines("public_api.txt"))


@pytest.mark.parametrize(("command", "option"), REMOVED, ids=" ".join)
def test_each_word_that_went_since_the_first_edition_names_its_replacement(command: str, option: str) -> None:
    done = CliRunner().invoke(main, [*command.split(), *([option] if option else []), "1"])
    assert done.exit_code == 2
    assert " was removed: " in done.output


def test_the_first_editions_words_are_found() -> None:
    assert ("bench collectives", "-p") in REMOVED
    assert ("bench rendezvous", "") in REMOVED

"""Descriptions: what ranks send each other after a mismatch, whole and damaged."""

from __future__ import annotations

import time
from typing import Any

import pytest

import gradsync as gs
from gradsync.communicators import failures
from gradsync.communicators.agreement import Agreement, Description, mismatch
from gradsync.communicators.failures import exchange_descriptions
from gradsync.errors import RendezvousTimeout

LINES = tuple([f"'w{number}: [é\n': float32[{number}, 3]" for number in range(5)])
WHOLE = Description(
    "all_reduce (sum) of a bucket",
    (*LINES, "called from train.py:3", "['absent']: None"),
    callback="number 2",
    options="mean, hook, threshold_bytes 2",
    call_site="submitted at train.py:41 in step",
)


def error_of(*descriptions: Description) -> gs.PlanMismatch:
    return mismatch("rank 0/2", Agreement(0, lambda: descriptions[0]), dict(enumerate(descriptions)))


def test_all_fields_arrive() -> None:
    assert Description.from_text(WHOLE.to_text()) == WHOLE
    plain = Description("gather of float32[rows, 3] (root 0)")
    assert Description.from_text(plain.to_text()) == plain


@pytest.mark.parametrize("text", ["", "all_reduce", "[]", "[1, 2]", "[" * 100_000, '["a", 1e999]', "{}\n[]"])
def test_a_damaged_text_is_called_unreadable(text: str) -> None:
    assert Description.from_text(text).headline == "(a description that cannot be read)"


def test_a_difference_is_named_whatever_the_names_look_like() -> None:
    name = "'a: float32[1], [2]: x'"
    texts = [WHOLE._replace(lines=(f"{name}: float32[{length}]",)).to_text() for length in (3, 4)]
    error = error_of(*map(Description.from_text, texts))
    assert f"first difference, line 1:\n    rank 0: {name}: float32[3]" in str(error)
    assert f"{name} differs: float32[3] on rank 0; float32[4] on rank 1: pass arrays of the same shape" in str(error)
    assert error.places == {0: "train.py:41 in step", 1: "train.py:41 in step"}


def test_an_absent_array_is_named() -> None:
    error = error_of(Description("tree", ("['w']: float32[3]",)), Description("tree", ("['w']: None",)))
    assert "first difference, line 1:\n    rank 0: ['w']: float32[3]\n    rank 1: ['w']: None" in str(error)


class Store:
    """The part of a RendezvousClient that ranks use to exchange descriptions; rank 1 publishes none."""

    rank, world_ranks = 0, (0, 1, 2)

    def __init__(self, of_rank_2: Description) -> None:
        self.values = {"world/agree/2/7": of_rank_2.to_text().encode()}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def delete(self, key: str) -> None:
        """No earlier description is there."""

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        if key not in self.values:
            time.sleep(timeout_seconds)
            raise RendezvousTimeout(f"no rank has set {key}")
        return self.values[key]


def test_a_rank_without_a_description_hides_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "TEXTS_WITHIN_SECONDS", 0.1)
    mine = Description("all_reduce of float32[3] (sum)")
    client: Any = Store(mine)
    found = exchange_descriptions(client, "world", 7, mine.to_text(), [0, 1, 2])
    assert found == {0: mine, 1: Description("(no description: no rank has set world/agree/1/7)"), 2: mine}
    text = str(error_of(*found.values()))  # ends without advice, because rank 1's call is unknown
    assert text.endswith("rank 2: all_reduce of float32[3] (sum)")

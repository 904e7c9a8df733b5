"""Descriptions: what ranks send each other after a mismatch, whole and damaged."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gradsync.communicators import failures
from gradsync.communicators.agreement import CallSite, Description, Item, mismatch
from gradsync.communicators.failures import exchange_descriptions
from gradsync.errors import RendezvousTimeout

ITEMS = tuple([Item(f"'w{number}: [é\n'", "float32", (number, 3)) for number in range(5)])
WHOLE = Description(
    "all_reduce (sum) of a bucket",
    items=(*ITEMS, Item("called from train.py:3"), Item("['absent']", "None")),
    item="gradient {} of the bucket",
    kind="bucket",
    callback="'generator'",
    made_at="train.py:2 in main",
    settings=(("hook", "Hook, first 1, last 2"), ("gradient_as_bucket_view", "")),
    others=(Item("'b'", "float64", ()),),
    has_ended=True,
    call_site=CallSite("train.py:41 in step", "submitted at"),
)


def test_all_fields_arrive() -> None:
    assert Description.from_text(WHOLE.to_text()) == WHOLE
    rows = Description("gather", "float32", ("rows", 3), "root 0")
    assert Description.from_text(rows.to_text()) == rows


@pytest.mark.parametrize("text", ["", "all_reduce", "[]", "[1, 2]", "[" * 100_000, '["a", 1e999]', "{}\n[]"])
def test_a_damaged_text_is_called_unreadable(text: str) -> None:
    assert Description.from_text(text).headline == "(a description that cannot be read)"


def test_a_difference_is_named_whatever_the_names_look_like() -> None:
    name = "'a: float32[1], [2]: x'"
    texts = [
        WHOLE._replace(items=(Item(name, "float32", (length,)),), others=(), callback="").to_text() for length in (3, 4)
    ]
    error = mismatch("rank 0/2", None, dict(enumerate(map(Description.from_text, texts))))
    assert f"first difference, gradient 0 of the bucket:\n    rank 0: {name}: float32[3]" in str(error)
    assert str(error).endswith(f"{name} has a different shape on rank 1 than on rank 0: [3] on rank 0, [4] on rank 1")
    assert error.places == {0: "train.py:41 in step", 1: "train.py:41 in step"}


def test_an_absent_array_has_no_other_dtype() -> None:
    present = Description("tree", items=(Item("['w']", "float32", (3,)),), item="array {} of the tree")
    absent = present._replace(items=(Item("['w']", "None"),))
    error = mismatch("rank 0/2", None, {0: present, 1: absent})
    assert str(error).endswith(
        "first difference, array 0 of the tree:\n    rank 0: ['w']: float32[3]\n    rank 1: ['w']: None"
    )


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
    mine = Description("all_reduce", "float32", (3,), "sum")
    client: Any = Store(mine)
    found = exchange_descriptions(client, "world", 7, mine.to_text(), [0, 1, 2])
    assert found == {0: mine, 1: Description("(no description: no rank has set world/agree/1/7)"), 2: mine}
    text = str(mismatch("rank 0/3", None, found))  # ends without advice, because rank 1's call is unknown
    assert text.endswith("rank 2: all_reduce of float32[3] (sum)")

"""A file of shapes is read as it was written; what is wrong with one is told, with the entry."""

import json
import os

import pytest

import gradsync as gs
from gradsync.bench.models import read_shapes
from gradsync.bucketing.plan import GradientSpec


@pytest.mark.parametrize("name", ["layer.weight", "'half", "'a'\n + \"b\"", "\\"])
def test_names_come_back_as_the_program_wrote_them(tmp_path, name):
    (tmp_path / "shapes.json").write_text(json.dumps([[name, [2], "float64"]]))
    assert [spec.label for spec in read_shapes(tmp_path / "shapes.json")] == [name]


def test_without_a_dtype_it_is_float32(tmp_path):
    (tmp_path / "shapes.json").write_text('[["w", [2, 3]], ["b", [], null]]')
    assert read_shapes(tmp_path / "shapes.json") == [
        GradientSpec("'w'", (2, 3), "float32", 4),
        GradientSpec("'b'", (), "float32", 4),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "needs a list of at least one gradient, got one dict"),
        ("[]", "needs a list of at least one gradient, got an empty list"),
        ('[["w", [1]], "b"]', "entry 1 needs to be [name, shape] or [name, shape, dtype], got 'b'"),
        ('[["w"]]', "entry 0 needs to be"),
        ("[[3, [1]]]", "entry 0 needs a string as name, got 3"),
        ('[["w", 3]]', "entry 0, 'w', needs a shape of integers >= 0, got 3"),
        ('[["w", [2, -1]]]', "needs a shape of integers >= 0, got [2, -1]"),
        ('[["w", [true]]]', "needs a shape of integers >= 0, got [True]"),
        ('[["w", [1.0]]]', "needs a shape of integers >= 0, got [1.0]"),
        ('[["w", [1], "float31"]]', "entry 0, 'w', has dtype 'float31': use float16"),
        ('[["w", [1], "bool"]]', "entry 0, 'w', has dtype 'bool'"),
        ('[["w", [1], ["float32"]]]', "has dtype ['float32']"),
    ],
)
def test_a_malformed_file_is_told(tmp_path, text, told):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(gs.InvalidArgument) as caught:
        read_shapes(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_told(tmp_path):
    (tmp_path / "shapes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(gs.InvalidArgument, match="is not JSON"):
        read_shapes(tmp_path / "shapes.json")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(gs.InvalidArgument, match=f"cannot be read: {os.strerror(2)}"):
        read_shapes(tmp_path / "none.json")

"""What is measured: a model's gradients, the last layer's first, or those of a file."""

import json
import math

import pytest

import gradsync as gs
from gradsync.bench.models import MODELS, gradients_of, total_bytes


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_its_gradients_last_first_in_float32(model):
    specs = gradients_of(model)
    assert [spec.shape for spec in specs] == list(reversed(MODELS[model]()))
    assert total_bytes(specs) == 4 * sum(map(math.prod, MODELS[model]()))
    assert len({spec.name for spec in specs}) == len(specs)


def test_a_file_keeps_its_order(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([["b", [2]], ["w", [3, 2], "bfloat16"]]))
    assert [(spec.label, spec.size_bytes) for spec in gradients_of(str(path))] == [("b", 8), ("w", 12)]


def test_bfloat16_needs_ml_dtypes(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    path.write_text('[["w", [3], "bfloat16"]]')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(gs.InvalidArgument, match="which need the package ml_dtypes: pip install ml_dtypes"):
        gradients_of(str(path))


def test_gradients_without_elements_are_refused(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('[["w", [0, 3]]]')
    with pytest.raises(gs.InvalidArgument, match="have no elements"):
        gradients_of(str(path))


def test_an_unknown_model_is_told():
    with pytest.raises(gs.InvalidArgument, match=r"no model is called 'resnet': use resnet50, gpt2, bert, or a \.json"):
        gradients_of("resnet")

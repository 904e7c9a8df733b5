"""A file of shapes comes back as it was written; what is wrong with one is told, with the entry."""

import json

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator


def test_a_callback_writes_its_last_step_in_arrival_order(tmp_path):
    path = tmp_path / "shapes.json"
    callback = gs.AllreduceCallback("sum", local_communicator(), threshold_bytes=8)
    with pytest.raises(gs.InvalidArgument, match="needs a complete step"):
        callback.dump_shapes(path)
    for names in (("old", "b", "c"), ("b", "a")):
        with callback.backward():
            for name in names:
                callback(name, np.ones((2, 3), np.float64 if name == "a" else np.float32))
            with pytest.raises(gs.InvalidArgument, match="in the middle of a backward pass"):
                callback.dump_shapes(path)
    callback.flush()  # a step without gradients says nothing
    callback.dump_shapes(path)
    assert json.loads(path.read_text()) == [["b", [2, 3], "float32"], ["a", [2, 3], "float64"]]

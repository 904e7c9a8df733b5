"""The gradients that are timed: of well-known models, of many small arrays, or of a file of shapes."""

from __future__ import annotations

import json
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Gradients = list[tuple[str, tuple[int, ...]]]  # dtype and shape, in the order in which a backward pass gives them


def resnet50() -> Gradients:
    """The 161 parameters of ResNet-50 (25,557,032 elements), last to first.

    Source: torchvision.models.resnet50; He et al., "Deep Residual Learning for Image Recognition", table 1.
    """
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(outputs, width, 1, 1), (outputs,), (outputs,)]
            if block == 0:  # the shortcut changes the number of channels
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return _backwards([*shapes, (1000, 2048), (1000,)])


def gpt2_small() -> Gradients:
    """The 148 parameters of GPT-2 small (124,439,808 elements), last to first; input and output share one weight.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; the released 124M checkpoint.
    """
    width = 768
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention: list[tuple[int, ...]] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    dense: list[tuple[int, ...]] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return _backwards([(50257, width), (1024, width), *[*norm, *attention, *norm, *dense] * 12, *norm])


def small() -> Gradients:
    """10,000 arrays of 100 elements: what an array costs, whatever its size."""
    return [("float32", (100,))] * 10_000


def _backwards(shapes: list[tuple[int, ...]]) -> Gradients:
    return [("float32", shape) for shape in reversed(shapes)]


MODELS = {"ResNet-50": resnet50, "GPT-2 small": gpt2_small, "10,000 small": small}


def gradients_of(model: str, *, few: bool = False) -> Gradients:
    """Returns the gradients of a key of MODELS, or of a file: JSON {name: [dtype, [sizes]]}.

    Args:
        model: which.
        few: only the five smallest, to see that something runs.

    Raises:
        pytest.UsageError: the file cannot be read, or says something else.
    """
    gradients = MODELS[model]() if model in MODELS else read(model)
    return sorted(gradients, key=lambda each: prod(each[1]))[:5] if few else gradients


def read(model: str) -> Gradients:
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401, gives NumPy the name bfloat16
    try:
        found = json.loads(Path(model).read_text(), object_pairs_hook=_without_twins)
        return [_checked(*entry) for entry in found.values()] or _refuse("no gradient is in it")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise pytest.UsageError(f'--shapes {model} needs {{"name": ["float32", [64, 3]], ...}}: {error}') from None


def _checked(dtype: str, sizes: list[int]) -> tuple[str, tuple[int, ...]]:
    kind = np.dtype(dtype)
    if kind.name != dtype or not (kind.kind in "fc" or kind.name == "bfloat16"):
        _refuse(f"{dtype!r} has no mean")
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        _refuse(f"{sizes!r} is no list of sizes")
    return dtype, tuple(sizes)


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return dict(pairs) if len(dict(pairs)) == len(pairs) else _refuse("a name is there twice")


def _refuse(why: str) -> Any:
    raise ValueError(why)


def name_of(model: str) -> str:
    return model if model in MODELS else Path(model).name

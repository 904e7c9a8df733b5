"""The gradients that a measurement synchronises: the gradients of a well-known model, or of a shapes file.

The functions of the models return shapes in the order of the parameters; a backward pass produces the gradients in the
reverse order. A test compares the numbers of parameters with the published numbers.
"""

from __future__ import annotations

import importlib.util
import json
import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from gradsync.bucketing.plan import GradientSpec
from gradsync.errors import InvalidArgument
from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp

Shape = tuple[int, ...]

_DEFAULT_DTYPE = "float32"
_DTYPES = [name for name, operations in OPERATIONS_BY_DTYPE.items() if ReduceOp.SUM in operations]


def resnet50() -> list[Shape]:
    """Returns the 161 parameter shapes of ResNet-50 (25,557,032 elements), in torchvision's order.

    Source: torchvision.models.resnet50; He et al., "Deep Residual Learning for Image Recognition", table 1.
    """
    shapes: list[Shape] = [(64, 3, 7, 7), *_batch_norm(64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), *_batch_norm(width)]
            shapes += [(width, width, 3, 3), *_batch_norm(width)]
            shapes += [(outputs, width, 1, 1), *_batch_norm(outputs)]
            if block == 0:  # the shortcut changes the number of channels
                shapes += [(outputs, inputs, 1, 1), *_batch_norm(outputs)]
            inputs = outputs
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_small() -> list[Shape]:
    """Returns the 148 parameter shapes of GPT-2 small (124,439,808 elements); input and output layer share one weight.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; the released 124M checkpoint.
    """
    width, layers, vocabulary, positions = 768, 12, 50257, 1024
    layer: list[Shape] = [
        *_layer_norm(width),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        *_layer_norm(width),
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(vocabulary, width), (positions, width), *layer * layers, *_layer_norm(width)]


def bert_base() -> list[Shape]:
    """Returns the 199 parameter shapes of BERT-base uncased (109,482,240 elements), with pooler, without task heads.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", section 3: 12 layers of width 768,
    110M parameters in all. The order of parameters and the vocabulary are from the released checkpoint.
    """
    width, layers, vocabulary, positions, segments = 768, 12, 30522, 512, 2
    square: list[Shape] = [(width, width), (width,)]
    layer: list[Shape] = [
        *square * 3,  # query, key, value
        *square,
        *_layer_norm(width),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
        *_layer_norm(width),
    ]
    embeddings: list[Shape] = [(vocabulary, width), (positions, width), (segments, width), *_layer_norm(width)]
    return [*embeddings, *layer * layers, *square]


def _batch_norm(channels: int) -> list[Shape]:
    return [(channels,), (channels,)]


_layer_norm = _batch_norm  # the scale and the shift have one shape


MODELS = {"resnet50": resnet50, "gpt2": gpt2_small, "bert": bert_base}


def gradients_of(model: str) -> list[GradientSpec]:
    """Returns the descriptions of the gradients of one backward pass, in the order in which the pass produces them.

    Args:
        model: a key of MODELS, whose gradients are float32; or the path of a shapes file, which lists the gradients in
            this order.

    Raises:
        InvalidArgument: the name is unknown, the file is missing or malformed, the file has bfloat16 gradients and the
            package ml_dtypes is missing, or the gradients have no elements.
    """
    if model in MODELS:
        return [
            GradientSpec(f"#{i}", shape, _DEFAULT_DTYPE, itemsize_of(_DEFAULT_DTYPE))
            for i, shape in enumerate(reversed(MODELS[model]()))
        ]
    if "/" not in model and not model.endswith(".json"):
        raise InvalidArgument(
            f"no model is called {model!r}: use {', '.join(MODELS)}, or a .json file with your own gradients' shapes"
        )
    specs = read_shapes(model)
    if any(spec.dtype == "bfloat16" for spec in specs) and importlib.util.find_spec("ml_dtypes") is None:
        raise InvalidArgument(
            f"{model!r} has bfloat16 gradients, which need the package ml_dtypes: pip install ml_dtypes"
        )
    if total_bytes(specs) == 0:
        raise InvalidArgument(f"the gradients of {model!r} have no elements: there is nothing to time")
    return specs


def total_bytes(specs: list[GradientSpec]) -> int:
    """Returns the total size of the gradients in bytes."""
    return sum(spec.size_bytes for spec in specs)


def read_shapes(path: str | Path) -> list[GradientSpec]:
    """Returns the gradients of a shapes file, in the file's order; gradients without a dtype are float32.

    The file is JSON: a list of [name, shape] or [name, shape, dtype].

    Raises:
        InvalidArgument: the file cannot be read, is not a list of gradients, is empty, or has a dtype that cannot be
            reduced. The text gives the index of the wrong entry, from 0.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"the shapes file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise _malformed(path, f"is not JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        got = "an empty list" if entries == [] else f"one {type(entries).__name__}"
        raise _malformed(path, f"needs a list of at least one gradient, got {got}")
    return [_spec(path, number, entry) for number, entry in enumerate(entries)]


def itemsize_of(dtype: str) -> int:
    """Returns the size of one element in bytes. NumPy itself has no bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _spec(path: str | Path, number: int, entry: Any) -> GradientSpec:
    if not isinstance(entry, list) or len(entry) not in (2, 3):
        raise _malformed(
            path, f"entry {number} needs to be [name, shape] or [name, shape, dtype], got {reprlib.repr(entry)}"
        )
    name, shape, dtype = entry[0], entry[1], entry[2] if len(entry) == 3 else None
    dtype = _DEFAULT_DTYPE if dtype is None else dtype
    if not isinstance(name, str):
        raise _malformed(path, f"entry {number} needs a string as name, got {reprlib.repr(name)}")
    who = f"entry {number}, {reprlib.repr(name)},"
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise _malformed(path, f"{who} needs a shape of integers >= 0, got {reprlib.repr(shape)}")
    if dtype not in _DTYPES:
        raise _malformed(path, f"{who} has dtype {reprlib.repr(dtype)}: use {', '.join(_DTYPES)}")
    return GradientSpec(repr(name), tuple(shape), dtype, itemsize_of(dtype))


def _malformed(path: str | Path, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"the shapes file {str(path)!r} {what}; a shapes file looks like "
        '[["layer.weight", [64, 3], "float32"], ["layer.bias", [64]]]'
    )

"""The gradients that a measurement synchronises: those of a well-known model, or those listed in a shapes file.

The functions of the models return shapes in the order of the parameters; a backward pass produces the gradients in the
reverse order. A test compares the numbers of parameters with the published numbers.
"""

from __future__ import annotations

import importlib.util

from gradsync.bucketing.plan import GradientSpec
from gradsync.bucketing.shapes_file import DEFAULT_DTYPE, itemsize_of, read_shapes
from gradsync.errors import InvalidArgument

Shape = tuple[int, ...]


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
    110M parameters in all. The order of parameters and the vocabulary are those of the released checkpoint.
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
    """Returns the gradients of one backward pass, in the order in which it produces them.

    Args:
        model: a key of MODELS (float32 gradients), or the path of a shapes file, which lists gradients in this order.

    Raises:
        InvalidArgument: the name is unknown, the file is missing or malformed, the file has bfloat16 gradients and the
            package ml_dtypes is missing, or the gradients have no elements.
    """
    if model in MODELS:
        itemsize = itemsize_of(DEFAULT_DTYPE)
        shapes = reversed(MODELS[model]())
        return [GradientSpec(f"#{i}", shape, DEFAULT_DTYPE, itemsize) for i, shape in enumerate(shapes)]
    if "/" not in model and not model.endswith(".json"):
        raise InvalidArgument(
            f"no model is called {model!r}: use {', '.join(MODELS)}, or a .json file, which "
            "callback.dump_shapes(path) writes after a step of your own loop"
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

"""The gradients that a measurement synchronises: of well-known models, or of a file of shapes.

The shapes of a model are in the order of its parameters; a backward pass produces the last one first. A test compares
the counts with the published ones.
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
    """Returns the 148 parameter shapes of GPT-2 small (124,439,808 elements), the output layer tied to the input's.

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
    """Returns the 199 parameter shapes of BERT-base, uncased (109,482,240 elements), with its pooler, without heads.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", section 3: 12 layers of width 768,
    110M parameters in all; order and vocabulary as in the released checkpoint.
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


_layer_norm = _batch_norm  # a scale and a shift, both


MODELS = {"resnet50": resnet50, "gpt2": gpt2_small, "bert": bert_base}


def gradients_of(model: str) -> list[GradientSpec]:
    """Returns the gradients of a model, the last layer's first, or of a shapes file, in its order.

    Args:
        model: a name of MODELS, whose gradients are float32, or the path of a file of shapes.

    Raises:
        InvalidArgument: no model has that name and no file is there, the file is malformed, or NumPy does not know one
            of its dtypes here.
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
        raise InvalidArgument(f"{model!r} has bfloat16 gradients, which NumPy knows with: pip install ml_dtypes")
    if total_bytes(specs) == 0:
        raise InvalidArgument(f"the gradients of {model!r} have no elements: there is nothing to time")
    return specs


def total_bytes(specs: list[GradientSpec]) -> int:
    """Returns the bytes of all gradients together."""
    return sum(spec.size_bytes for spec in specs)

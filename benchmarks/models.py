"""The models that the benchmarks synchronise, by the names that their results carry."""

from __future__ import annotations

from math import prod

from gradsync.bench.models import Shape, gpt2_small, resnet50

__all__ = ["MODELS", "Shape", "element_count", "gpt2_small", "resnet50"]


def element_count(shapes: list[Shape]) -> int:
    """Returns the number of elements of all shapes together."""
    return sum(prod(shape) for shape in shapes)


MODELS = {"ResNet-50": resnet50, "GPT-2 small": gpt2_small}

"""The models that the benchmarks synchronise, by the names that their results carry."""

from __future__ import annotations

from gradsync.bench.models import Shape, element_count, gpt2_small, resnet50

__all__ = ["MODELS", "Shape", "element_count", "gpt2_small", "resnet50"]

MODELS = {"ResNet-50": resnet50, "GPT-2 small": gpt2_small}

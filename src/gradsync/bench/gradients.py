"""The gradients that a measurement synchronises: those of a model by name, or of a file; in the order of arrival."""

from __future__ import annotations

import importlib.util

from gradsync.bench.models import MODELS
from gradsync.bucketing.plan import GradientSpec
from gradsync.bucketing.shapes_file import DEFAULT_DTYPE, itemsize_of, read_shapes
from gradsync.errors import InvalidArgument


def gradients_of(model: str) -> list[GradientSpec]:
    """Returns the gradients of a model, the last layer's first, or of a shapes file, in its order.

    Args:
        model: one of MODELS, whose gradients are float32, or the path of a file.

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

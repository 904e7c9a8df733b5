"""gradsync's callback on one rank with different settings: each is a contender, on the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np

import gradsync as gs
from peers.collectives import RANKS
from peers.contenders import (
    CLIPPED,
    NONFINITE,
    NORM,
    PARAMETERS,
    THRESHOLDS,
)
from peers.operation import Operation

# About half of what the inputs come to.
_CLIPPED_ROOT_MEAN_SQUARE = 100.0
_FLOAT32_ROUNDING = 1e-5  # of a norm, and of what it scales
_Setting = Callable[[list[np.ndarray]], Operation]


def through(callback: gs.AllreduceCallback, gradients: list[np.ndarray]) -> Operation:
    """Returns a step: every gradient handed over, the flush, every result asked for."""

    def synchronise() -> None:
        with callback.backward():
            futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
        for future in futures:
            future.result()

    return Operation(synchronise, lambda: gradients)


def living_in_buckets(gradients: list[np.ndarray]) -> Operation:
    """Returns a step whose gradients live inside the buckets; those that are given only say their shapes."""
    callback = gs.AllreduceCallback("mean", parameters=_parameters(gradients), gradient_as_bucket_view=True)
    views = list(callback.gradient_buffers().values())
    return replace(through(callback, views), inputs=views)


def _parameters(gradients: list[np.ndarray]) -> dict[int, tuple[tuple[int, ...], str]]:
    return {index: (gradient.shape, gradient.dtype.name) for index, gradient in enumerate(gradients)}


# -- One setting each ----------------------------------------------------------------------------------------


def _with(**settings: Any) -> _Setting:
    return lambda gradients: through(gs.AllreduceCallback("mean", **settings), gradients)


def _clipped(gradients: list[np.ndarray]) -> Operation:
    """Clips in each step: the sum of what is equal on all ranks is too long by their number every time."""
    most = _CLIPPED_ROOT_MEAN_SQUARE * sqrt(sum(gradient.size for gradient in gradients))
    callback = gs.AllreduceCallback("sum", clip_norm=most)

    def means() -> list[np.ndarray]:
        if callback.norm is None:
            raise RuntimeError("there is no norm, with clip_norm")
        factor = np.float32(callback.norm / most / RANKS)
        return [gradient * factor for gradient in gradients]

    return replace(through(callback, gradients), results=means, rounding=_FLOAT32_ROUNDING)


def _told(gradients: list[np.ndarray]) -> Operation:
    return _with(parameters=_parameters(gradients))(gradients)


#: The function that makes a step with a setting, by the setting's name.
SETTINGS: dict[str, _Setting] = {
    **{name: _with(threshold_bytes=size_bytes) for name, size_bytes in THRESHOLDS.items()},
    NONFINITE: _with(nonfinite="raise"),
    NORM: _with(clip_norm=float("inf")),
    CLIPPED: _clipped,
    PARAMETERS: _told,
}

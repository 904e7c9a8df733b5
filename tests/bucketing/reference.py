"""What a callback must compute, written plainly: gradient by gradient, in float64."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import gradsync as gs
from arrays import contribution

Values = dict[str, np.ndarray[Any, Any]]
Specs = Mapping[str, tuple[tuple[int, ...], str]]

#: Every kind of gradient; smaller than all thresholds and larger than some.
SPECS: Specs = {
    "matrix": ((17, 5), "float32"),
    "one": ((40,), "float32"),
    "double": ((33, 3), "float64"),
    "two": ((40,), "float32"),
    "scalar": ((), "float64"),
    "empty": ((0, 3), "float32"),
    "half": ((50,), "float16"),
    "brain": ((2, 9), "bfloat16"),
    "complex": ((6,), "complex64"),
    "huge": ((3000,), "float32"),
}
#: Each alone, some together, all of a dtype together.
THRESHOLDS = (1, 700, 10 * 1024**2)


def given(rank: int, step: int, specs: Specs = SPECS) -> Values:
    """A rank's gradients of a step."""
    return {name: contribution(rank, *spec, seed=100 * step + at) for at, (name, spec) in enumerate(specs.items())}


def by_rank(ranks: int, step: int, specs: Specs = SPECS) -> list[Values]:
    return [given(rank, step, specs) for rank in range(ranks)]


def reduced(of_ranks: Sequence[Values], method: str = "mean", weights: Sequence[float] | None = None) -> Values:
    """The sum or mean over the ranks; a rank that has none of a gradient has zeros."""
    results = {}
    weights = [1] * len(of_ranks) if weights is None else weights
    for name in dict.fromkeys(name for values in of_ranks for name in values):
        terms = [w * wide(values[name]) for w, values in zip(weights, of_ranks, strict=True) if w and name in values]
        results[name] = np.asarray(sum(terms)) / (sum(weights) if method == "mean" else 1)
    return results


def wide(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def norm_of(values: Iterable[np.ndarray[Any, Any]]) -> float:
    return math.sqrt(sum(float((np.abs(wide(each)) ** 2).sum()) for each in values))


def step(sync: Any, gradients: Mapping[Any, Any]) -> dict[Any, Any]:
    """Runs one step, and gives the futures' results."""
    with sync.backward():
        futures = {name: sync(name, gradient) for name, gradient in gradients.items()}
    return {name: future.result() for name, future in futures.items()}


def outcome(call: Any, *args: Any) -> Any:
    """What it returns, or the error that it raises, for the pytest process to judge: the ranks live on."""
    try:
        return call(*args)
    except Exception as error:
        return error


def in_a_group(comm: Any, function: Any, *args: Any) -> Any:
    """Calls function(group, *args) in a group of all ranks: what breaks the group leaves the world as it was."""
    group = comm.split(0)
    try:
        return outcome(function, group, *args)
    finally:
        with suppress(gs.GradsyncError):
            group.close()


def raise_errors(outcomes: Sequence[Any]) -> list[Any]:
    """Raises the first error among what ranks have returned; else gives it back."""
    for each in outcomes:
        if isinstance(each, BaseException):
            raise each
    return list(outcomes)


class Heard(logging.Handler):
    """Collects the warnings of a block."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("gradsync").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("gradsync").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())

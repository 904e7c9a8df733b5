"""Uneven inputs: a rank that has run out of batches takes part in the steps of the others, until all have.

Before the first collective of each step the roll is called: every rank tells whether it has gradients. One that has
left the block gives zeros in their place, and the mean counts the others alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradsync.bucketing.backward_pass import BackwardPass
from gradsync.bucketing.pending import display_name
from gradsync.bucketing.plan import Bucket, GradientSpec
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.base import Communicator
from gradsync.errors import InvalidArgument, PlanMismatch
from gradsync.reduction import Array, ReduceOp, check_operation, dtype_name

# What a rank answers when the roll is called.
_ENDED, _PRESENT, _UNABLE = range(3)

_ROLL_CALL = "the beginning of a step inside join()"
_AGREEMENT = Agreement(digest_of(_ROLL_CALL), lambda: _ROLL_CALL)


class Join:
    """What `with callback.join()` gives.

    Args:
        backward: the steps of the callback.
        communicator: the ranks that take part.
        parameters: see AllreduceCallback.join.

    Attributes:
        last_rank: after the block, the same on all ranks: one that had gradients in the last step, so that its
            parameters are the newest.
    """

    def __init__(self, backward: BackwardPass, communicator: Communicator, parameters: Any) -> None:
        self.last_rank = 0
        self._backward = backward
        self._step = step = backward.reduction
        self._communicator = communicator
        self._told = _specs_of(parameters, step.op, communicator)
        self._zeros: dict[str, Array] = {}

    def count(self, passes: int, gradients: int) -> int:
        """Tells the others that this rank has gradients for the step that begins; returns how many ranks have."""
        if self._communicator.world_size == 1:
            return 1
        present, _, _ = self._call_roll(_PRESENT, passes, gradients)
        return present

    def stand_in(self) -> None:
        """Takes part in the steps of the others, with zeros, until no rank has gradients.

        Raises:
            PlanMismatch: the others' step is another one, or this rank does not know any; on all ranks.
            RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
        """
        specs = self._backward.arrivals.specs or self._told
        while self._communicator.world_size > 1:
            present, passes, gradients = self._call_roll(_ENDED if specs else _UNABLE)
            if not present:
                return
            self._step.stand_in(
                specs, self._communicator, self._zeros_for, present=present, passes=passes, gradients=gradients
            )

    def _call_roll(self, answer: int, passes: int = 0, gradients: int = 0) -> tuple[int, int, int]:
        """Returns how many ranks have gradients, and the local passes and gradients before these, of the first one."""
        answers = self._communicator.share_numbers("join", [answer, passes, gradients], _AGREEMENT)
        present = [rank for rank, (answer, _, _) in enumerate(answers) if answer == _PRESENT]
        unable = [rank for rank, (answer, _, _) in enumerate(answers) if answer == _UNABLE]
        if not present:
            return 0, 0, 0
        if unable:
            raise self._unable(unable[0])
        self.last_rank = present[0]
        _, passes, gradients = answers[present[0]]
        return len(present), passes, gradients

    def _unable(self, rank: int) -> PlanMismatch:
        """Makes the error that every rank raises when one has no step that it could repeat."""
        communicator = self._communicator
        named = communicator.ranks[rank]
        return PlanMismatch(
            f"{communicator.label}: rank {named} had no batch at all inside join(), and does not know the gradients "
            "that the others reduce: pass join(parameters=...) with their names, shapes and dtypes, in the order in "
            "which they are handed over",
            descriptions={named: "a step of unknown gradients inside join()"},
        )

    def _zeros_for(self, bucket: Bucket) -> Array:
        """Returns zeros for a bucket, in memory that grows to the largest one.

        They are negative: adding 0.0 would make a sum of negative zeros positive, and -0.0 changes no sum.
        """
        dtype = _dtype_of(bucket.dtype)
        zero = {"f": -0.0, "V": -0.0, "c": complex(-0.0, -0.0)}.get(dtype.kind, 0)
        flat = self._zeros.get(bucket.dtype)
        if flat is None or flat.size < bucket.size_elements:
            flat = self._communicator.arrays.flat(np.full(bucket.size_elements, zero, dtype))
            self._zeros[bucket.dtype] = flat
        else:
            flat = flat[: bucket.size_elements]
            flat[...] = zero
        return flat


def _specs_of(parameters: Any, op: ReduceOp, communicator: Communicator) -> list[GradientSpec]:
    """Returns the gradients of a step from what a caller tells of the parameters; see AllreduceCallback.join."""
    if parameters is None:
        return []
    if hasattr(parameters, "dtype") or not isinstance(parameters, Iterable):
        raise InvalidArgument(
            f"{communicator.label}: join needs parameters as a mapping of names to arrays, or to (shape, dtype), or as "
            f"a list of arrays, got {type(parameters).__name__}"
        )
    pairs = parameters.items() if isinstance(parameters, Mapping) else ((each, each) for each in parameters)
    return [_spec_of(param, what, i, op, communicator) for i, (param, what) in enumerate(pairs)]


def _spec_of(param: Any, what: Any, position: int, op: ReduceOp, communicator: Communicator) -> GradientSpec:
    name = display_name(param, position)
    try:
        if isinstance(what, tuple):
            shape, dtype = tuple(map(int, what[0])), np.dtype(what[1])
        else:
            native = communicator.native_array(what, f"join, parameter {name}")
            shape, dtype = native.shape, native.dtype
    except (IndexError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{communicator.label}: join needs an array or (shape, dtype) for parameter {name}, got {what!r}: {error}"
        ) from error
    check_operation(op, dtype)
    return GradientSpec(name, shape, dtype_name(dtype), dtype.itemsize)


def _dtype_of(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # NumPy does not know the name of bfloat16 before this is imported
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype

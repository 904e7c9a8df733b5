"""Uneven inputs: a rank that has run out of batches takes part in the steps of the others, until all have.

Before the first collective of each step the roll is called: every rank tells whether it has gradients. One that has
left the block gives zeros in their place, and the mean counts the others alone.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from gradsync.bucketing.backward_pass import BackwardPass
from gradsync.bucketing.bucket_work import BucketWork, resident_work
from gradsync.bucketing.parameter_specs import known_parameters
from gradsync.bucketing.plan import Bucket
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.errors import NonFiniteGradient, PlanMismatch
from gradsync.reduction import Array, dtype_of

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
        self._told = [known.spec for known in known_parameters(parameters, "join", step.op, communicator)]
        self._zeros: dict[str, Array] = {}

    def count(self, passes: int) -> int:
        """Tells the others that this rank has gradients for the step that begins; returns how many ranks have."""
        if self._communicator.world_size == 1:
            return 1
        present, _ = self._call_roll(_PRESENT, passes)
        return present

    def stand_in(self) -> None:
        """Takes part in the steps of the others, with zeros, until no rank has gradients.

        Raises:
            PlanMismatch: the others' step is another one, or this rank does not know any; on all ranks.
            RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
        """
        plan = self._backward.plan
        specs = plan.specs_to_repeat() or self._told
        while self._communicator.world_size > 1:
            present, passes = self._call_roll(_ENDED if specs else _UNABLE)
            if not present:
                return
            with suppress(NonFiniteGradient):  # told to the ranks that have gradients, which may go on
                self._step.stand_in(
                    plan.planner,
                    specs,
                    self._communicator,
                    self._zeros_for,
                    present=present,
                    passes=passes,
                )

    def _call_roll(self, answer: int, passes: int = 0) -> tuple[int, int]:
        """Returns how many ranks have gradients, and how many local passes the first of these has made before."""
        agreement = self._step.agreements.of_callback(_AGREEMENT)
        answers = self._communicator.share_numbers("join", [answer, passes], agreement)
        present = [rank for rank, (answer, _) in enumerate(answers) if answer == _PRESENT]
        unable = [rank for rank, (answer, _) in enumerate(answers) if answer == _UNABLE]
        if not present:
            return 0, 0
        if unable:
            raise self._unable(unable[0])
        self.last_rank = present[0]
        return len(present), answers[present[0]][1]

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

    def _zeros_for(self, bucket: Bucket) -> BucketWork:
        """Returns the work on zeros for a bucket, in memory that grows to the largest one, or where gradients live.

        They are negative: adding 0.0 would make a sum of negative zeros positive, and -0.0 changes no sum.
        """
        dtype = dtype_of(bucket.dtype)
        zero = {"f": -0.0, "V": -0.0, "c": complex(-0.0, -0.0)}.get(dtype.kind, 0)
        memory = self._backward.plan.memory
        if memory is not None:
            work = resident_work(bucket, memory)
            self._communicator.arrays.fill(work.sources[0], zero)
            return work
        flat = self._zeros.get(bucket.dtype)
        if flat is None or flat.size < bucket.size_elements:
            flat = self._communicator.arrays.flat(np.full(bucket.size_elements, zero, dtype))
            self._zeros[bucket.dtype] = flat
        else:
            flat = flat[: bucket.size_elements]
            self._communicator.arrays.fill(flat, zero)
        parts = [flat[slot.begin : slot.end] for slot in bucket.slots]
        return BucketWork(bucket, parts, parts, [], parts)

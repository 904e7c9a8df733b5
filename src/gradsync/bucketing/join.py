"""Uneven inputs: a rank without batches takes part in the steps of the other ranks, until no rank has a batch.

Before the first collective of each step the ranks count the active ranks: every rank reports whether it has gradients.
A rank whose loop has ended shadows the step: it reduces zeros, and the mean is over the other ranks only.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gradsync.bucketing.gradient import known_parameters
from gradsync.bucketing.step import Step
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.communicator import Communicator
from gradsync.errors import NonFiniteGradient, PlanMismatch

# The answers of a rank when the ranks count the active ranks. _ENDED: its loop has ended, and it can shadow a step.
# _PRESENT: it has gradients. _UNABLE: its loop has ended, and it knows no step to shadow.
_ENDED, _PRESENT, _UNABLE = range(3)

_COUNT = "the beginning of a step inside join()"
_AGREEMENT = agreement_on(_COUNT, (), None, "")


class Join:
    """The object `joined` in `with callback.join() as joined`.

    Args:
        step: the Step object of the callback.
        communicator: the communicator of the ranks.
        parameters: see AllreduceCallback.join.

    Attributes:
        last_rank: a rank that had gradients in the last step, and so has the newest parameters. The value is known
            after the block, and the same on all ranks.
    """

    def __init__(self, step: Step, communicator: Communicator, parameters: Any) -> None:
        self.last_rank = 0
        self._step = step
        self._communicator = communicator
        self._given = [known.spec for known in known_parameters(parameters, "join", step.reducer.op, communicator)]

    def count(self, passes: int) -> int:
        """Reports that this rank has gradients for the step that begins; returns the number of ranks with gradients."""
        if self._communicator.world_size == 1:
            return 1
        present, _ = self._exchange(_PRESENT, passes)
        return present

    def _shadow_others(self) -> None:
        """Takes part in the steps of the other ranks, with zeros, until no rank has gradients.

        Raises:
            PlanMismatch: the other ranks' step differs from the step that this rank repeats, or this rank has no step
                to repeat; all ranks raise it.
            RankFailed, CollectiveTimeout, CommunicatorClosed: a collective has failed.
        """
        specs = self._step.agreed or self._given
        while self._communicator.world_size > 1:
            present, passes = self._exchange(_ENDED if specs else _UNABLE)
            if not present:
                return
            with suppress(NonFiniteGradient):  # the ranks that have gradients raise it, and may go on
                self._step.shadow(specs, self._communicator, present=present, passes=passes)

    def _exchange(self, answer: int, passes: int = 0) -> tuple[int, int]:
        """Sends this rank's answer and number of local passes to all ranks, and receives theirs.

        Returns:
            The number of ranks that have gradients, and the number of local passes of the first such rank.
        """
        agreement = self._step.reducer.events.of_callback(_AGREEMENT)
        answers = self._communicator._share_numbers("join", [answer, passes], agreement)
        present = [rank for rank, (answer, _) in enumerate(answers) if answer == _PRESENT]
        unable = [rank for rank, (answer, _) in enumerate(answers) if answer == _UNABLE]
        if not present:
            return 0, 0
        if unable:
            raise self._unable(unable[0])
        self.last_rank = present[0]
        return len(present), answers[present[0]][1]

    def _unable(self, rank: int) -> PlanMismatch:
        """Returns the error that every rank raises if one rank has no step to repeat."""
        communicator = self._communicator
        named = communicator.ranks[rank]
        return PlanMismatch(
            f"{communicator.label}: rank {named} had no batch at all inside join(), and does not know the gradients "
            "that the other ranks reduce: pass join(parameters=...) with the names, shapes and dtypes of the "
            "gradients, in the order in which the ranks hand them over",
            descriptions={named: "a step of unknown gradients inside join()"},
        )

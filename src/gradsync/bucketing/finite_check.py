"""Are the gradients of a step finite, and if not, whose are not: one verdict, the same on every rank.

    before a bucket's reduction: note() looks at this rank's own gradients
    after it: note_results() looks at this rank's share of the results
    at the end of the step: conclude() has the ranks tell each other, and says what they have found

NaN and infinity on one rank reach the results of all; only the rank itself can tell which parameter they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradsync.bucketing.shared_results import on_host, own_share
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.base import Communicator
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument, NonFiniteGradient
from gradsync.reduction import Array

POLICIES = ("off", "raise", "skip")

_WHAT = "the check for NaN and infinity"
_AGREEMENT = Agreement(digest_of(_WHAT), lambda: _WHAT)
_NONE = -1


class Verdict(NamedTuple):
    """What the ranks have found in a step.

    Attributes:
        is_finite: whether all gradients, and what they were reduced to, are finite.
        error: says where they are not: raised, or logged; None where they are.
    """

    is_finite: bool
    error: NonFiniteGradient | None


class FiniteCheck:
    """Looks for NaN and infinity in the gradients of one step after another.

    On a GPU nothing but conclude() waits for the device, once. All calls of a step must be in the order of one stream.

    Args:
        policy: "off": note nothing, conclude at once that all is finite; "raise" or "skip": what the caller will do
            about a verdict.

    Raises:
        InvalidArgument: another policy.
    """

    def __init__(self, policy: str) -> None:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise InvalidArgument(
                f"the policy for gradients that are not finite must be one of {', '.join(map(repr, POLICIES))}, "
                f"got {policy!r}"
            )
        self.policy = policy
        self._names: list[str] = []
        self._own: list[Any] = []  # whether each gradient is finite, up to the first that is known not to be
        self._results: list[Any] = []
        self._knows_bad = False  # known on the host only

    def reset(self) -> None:
        """Forgets what was noted: for a step that has failed."""
        self._names, self._own, self._results, self._knows_bad = [], [], [], False

    def note(self, named: Sequence[tuple[str, Array]], arrays: ArrayKind) -> None:
        """Looks at gradients of this rank, before they are reduced. Every rank must note the same ones in one order.

        Args:
            named: names of parameters, with 1-D contiguous arrays on the communicator's device.
            arrays: how the communicator handles arrays.
        """
        if self.policy == "off":
            return
        for name, source in named:
            self._names.append(name)
            if not self._knows_bad:  # the first is told, so no later one needs to be looked at
                finite = arrays.all_finite(source)
                self._own.append(finite)
                self._knows_bad = finite is False

    def note_results(self, flats: Sequence[Array], communicator: Communicator) -> None:
        """Looks at this rank's share of reduced gradients; the other ranks look at the rest.

        Args:
            flats: 1-D contiguous arrays, equal on all ranks.
            communicator: whose ranks have them.
        """
        if self.policy != "off":
            self._results += [communicator.arrays.all_finite(part) for part in own_share(flats, communicator)]

    def conclude(self, communicator: Communicator) -> Verdict:
        """Ends the step: returns what the ranks have found together. Every rank must call it.

        Communicates once, unless the policy is "off". On a GPU the host waits until what was noted is known.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        if self.policy == "off":
            return Verdict(True, None)
        names, own, results = self._names, self._own, self._results
        self.reset()
        finite = on_host([*own, *results])
        first_bad = next((at for at, is_finite in enumerate(finite[: len(own)]) if not is_finite), _NONE)
        result_bad = not all(finite[len(own) :])
        told = communicator.share_numbers(_WHAT, [first_bad, int(result_bad)], _AGREEMENT)
        bad = {communicator.ranks[rank]: _name(names, at) for rank, (at, _) in enumerate(told) if at != _NONE}
        if not bad and not any(overflowed for _, overflowed in told):
            return Verdict(True, None)
        return Verdict(False, _error(communicator.label, bad))


def _name(names: Sequence[str], position: int) -> str:
    """Returns a parameter's name; a rank that had no gradients, inside join(), does not know them."""
    return names[position] if position < len(names) else f"gradient number {position} of the step"


def _error(label: str, bad: dict[int, str]) -> NonFiniteGradient:
    if not bad:
        return NonFiniteGradient(
            f"{label}: the gradients of every rank are finite, but the sum overflowed its dtype: lower the loss scale, "
            "or the prescale, or let gradients travel in a dtype of a wider range"
        )
    where = ", ".join(f"{name!r} on rank {rank}" for rank, name in bad.items())
    rank = next(iter(bad))
    return NonFiniteGradient(
        f"{label}: NaN or infinity in the gradients of this step: {where} (the first of each rank that has any): look "
        "at the batch there, or lower the learning rate, or the loss scale",
        rank=rank,
        parameter=bad[rank],
        parameters=bad,
    )

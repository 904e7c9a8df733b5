"""Are the gradients of a step finite, and if not, whose are not: one verdict, the same on every rank.

    before a bucket's reduction: note() looks at this rank's own gradients
    after it: note_results() looks at this rank's share of the results
    or, where the communicator has looked while it reduced: note_found() takes what it has found, of all ranks
    at the end of the step: conclude() has the ranks tell each other, and says what they have found

NaN and infinity on one rank reach the results of all; only the rank itself can tell which parameter they come from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradsync.bucketing.shared_results import on_host, own_share
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.communicators.nonfinite import NOWHERE, NonFinite
from gradsync.errors import InvalidArgument, NonFiniteGradient
from gradsync.reduction import Array

POLICIES = ("off", "raise", "skip")

_WHAT = "the check for NaN and infinity"
FINITE_CHECK = Agreement(digest_of(_WHAT), lambda: _WHAT)


class Verdict(NamedTuple):
    """What the ranks have found in a step.

    Attributes:
        is_finite: whether all gradients, and what they were reduced to, are finite.
        error: says where they are not: raised, or logged; None where they are.
    """

    is_finite: bool
    error: NonFiniteGradient | None


class _Names(NamedTuple):
    """The names of a bucket's parameters: made only where one is told, as there may be many thousands."""

    begin: int
    name_of: Callable[[int], str]


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
        self._gradients = 0
        self._names: list[_Names] = []  # a bucket's, in order
        self._own: dict[int, Any] = {}  # whether each gradient is finite, up to the first that is known not to be
        self._found: dict[int, int] = {}  # by rank: the first gradient that the communicator has found not to be
        self._results: list[Any] = []
        self._knows_bad = False  # known on the host only

    @property
    def is_on(self) -> bool:
        """Whether it looks at all."""
        return self.policy != "off"

    def reset(self) -> None:
        """Forgets what was noted: for a step that has failed."""
        self._gradients, self._names = 0, []
        self._own, self._found, self._results, self._knows_bad = {}, {}, [], False

    def note(self, named: Sequence[tuple[str, Array]], arrays: ArrayKind) -> None:
        """Looks at gradients of this rank, before they are reduced. Every rank must note the same ones in one order.

        Args:
            named: names of parameters, with 1-D contiguous arrays on the communicator's device.
            arrays: how the communicator handles arrays.
        """
        if not self.is_on:
            return
        first = self._add_names(len(named), lambda number: named[number][0])
        for number, (_, source) in enumerate(named):
            if self._knows_bad:
                break  # the first is told, so no later one needs to be looked at
            self._own[first + number] = finite = arrays.all_finite(source)
            self._knows_bad = finite is False

    def note_results(self, flats: Sequence[Array], communicator: Communicator) -> None:
        """Looks at this rank's share of reduced gradients; the other ranks look at the rest.

        Args:
            flats: 1-D contiguous arrays, equal on all ranks.
            communicator: whose ranks have them.
        """
        if self.is_on:
            self._results += [communicator.arrays.all_finite(part) for part in own_share(flats, communicator)]

    def note_found(
        self, found: NonFinite, count: int, gradient_of: Callable[[int], int], name_of: Callable[[int], str]
    ) -> None:
        """Takes what the communicator has found while it reduced a bucket.

        Args:
            found: elements of the bucket.
            count: of its gradients.
            gradient_of: returns the number of an element's gradient in the bucket.
            name_of: returns the name of the parameter, given that number.
        """
        begin = self._add_names(count, name_of)
        for rank, element in enumerate(found.firsts):
            if element != NOWHERE:
                self._found.setdefault(rank, begin + gradient_of(element))
        if found.has_results:
            self._results.append(False)

    def _add_names(self, count: int, name_of: Callable[[int], str]) -> int:
        """Takes the names of a bucket's gradients; returns the number of its first in the step."""
        begin = self._gradients
        self._names.append(_Names(begin, name_of))
        self._gradients += count
        return begin

    def _name(self, number: int) -> str:
        """Returns a parameter's name; a rank that had no gradients, inside join(), does not know them."""
        if number >= self._gradients:
            return f"gradient number {number} of the step"
        names = self._names[bisect_right(self._names, number, key=lambda names: names.begin) - 1]
        return names.name_of(number - names.begin)

    def conclude(self, communicator: Communicator, agreement: Agreement) -> Verdict:
        """Ends the step: returns what the ranks have found together. Every rank must call it.

        Communicates once, unless the policy is "off". On a GPU the host waits until what was noted is known.

        Args:
            communicator: of the ranks.
            agreement: what this rank believes all ranks are about to do.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        if not self.is_on:
            return Verdict(True, None)
        own, first_bad = self._own, self._found
        finite = on_host([*own.values(), *self._results])
        own_bad = [at for at, is_finite in zip(own, finite, strict=False) if not is_finite]
        if own_bad:
            first_bad[communicator.rank] = min(own_bad[0], first_bad.get(communicator.rank, own_bad[0]))
        try:
            firsts = _share(first_bad, not all(finite[len(own) :]), communicator, agreement)
            if firsts is None:
                return Verdict(True, None)
            bad = {communicator.ranks[rank]: self._name(at) for rank, at in enumerate(firsts) if at != NOWHERE}
            return Verdict(False, _error(communicator.label, bad))
        finally:
            self.reset()


def _share(
    first_bad: dict[int, int], result_bad: bool, communicator: Communicator, agreement: Agreement
) -> list[int] | None:
    """Has the ranks tell each other what they have found.

    Args:
        first_bad: by rank, the first gradient that is not finite; of others than this one only from a finder.
        result_bad: whether some result is not.
        communicator: whose ranks they are.
        agreement: what this rank believes all ranks are about to do.

    Returns:
        By rank, the first gradient that is not finite, or NOWHERE; None where all gradients and results are finite.
    """
    ranks = range(communicator.world_size)
    known_of = [communicator.rank] if communicator.finder is None else ranks
    own = [first_bad.get(rank, NOWHERE) for rank in known_of]
    told = communicator.share_numbers(_WHAT, [int(result_bad), *own], agreement)
    if not any(numbers[0] for numbers in told) and all(at == NOWHERE for numbers in told for at in numbers[1:]):
        return None
    if communicator.finder is None:
        return [at for _, at in told]
    of_rank = [[numbers[1 + rank] for numbers in told if numbers[1 + rank] != NOWHERE] for rank in ranks]
    return [min(found, default=NOWHERE) for found in of_rank]


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

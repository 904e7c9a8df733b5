"""The values of a step's gradients: the check for NaN and infinity, the norm, and clipping.

    before a bucket's reduction: each rank checks its own gradients
    after the reduction: each rank checks its share of the results (all ranks have the same results)
    instead of both: a backend that supports a check makes it during the reduction
    at the end of the step: all ranks exchange the results of these checks, in the collective that ends the step

NaN or infinity on one rank spreads to the results of all ranks. So the ranks also check the values before the
reduction, to find the rank and the gradient from which NaN or infinity comes.
"""

from __future__ import annotations

import logging
import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from gradsync.bucketing.lists import array_module
from gradsync.bucketing.plan import Bucket
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.host_copy import share_of
from gradsync.communicators.host_values import NOWHERE, Checks
from gradsync.errors import NonFiniteGradient
from gradsync.futures import Completion
from gradsync.reduction import Array

POLICIES = ("off", "raise", "skip")

_log = logging.getLogger("gradsync")

# Arrays of fewer elements (64 KB of float32) are packed together before they are checked.
_SMALL_ELEMENTS = 2**14
# As in torch.nn.utils.clip_grad_norm_: keeps the factor finite if the norm is 0.
_EPSILON = 1e-6


class Values:
    """Checks the values of buckets, step after step, and clips the gradients.

    On a GPU the host waits for the device only once per step, in end(). All calls of a step must use the same stream.

    Args:
        policy: the treatment of NaN and infinity: "off", "raise" or "skip".
        max_norm: the largest allowed norm; gradients with a larger norm are clipped. If max_norm is infinity, the norm
            is computed, but nothing is clipped. If max_norm is None, the norm is not computed.

    Attributes:
        norm: the norm of the last step's reduced gradients, before clipping; None without max_norm, before the first
            step, and after a step that failed or had no gradients.
        skip_step: whether the last step's gradients or their sums had NaN or infinity; False unless the policy is
            "skip".
        checks: the kinds of checks for every bucket.
    """

    def __init__(self, policy: str, max_norm: float | None) -> None:
        self.norm: float | None = None
        self.skip_step = False
        self.checks = Checks.NONE
        if policy != "off":
            self.checks |= Checks.NONFINITE
        if max_norm is not None:
            self.checks |= Checks.SQUARES
        self._policy = policy
        self._max_norm = max_norm
        self._watches: list[BucketWatch] = []  # one for each bucket of the step, in order

    def watch(self, bucket: Bucket, results: Sequence[Any], communicator: Communicator, within: Checks) -> BucketWatch:
        """Returns the BucketWatch that checks a bucket before and after its reduction.

        Args:
            bucket: the bucket. All ranks pass the same buckets in the same order.
            results: the native arrays that hold the bucket's reduced values after the reduction.
            communicator: the communicator that reduces the bucket.
            within: the checks that the communicator makes during the reduction; the BucketWatch makes the remaining
                checks.
        """
        watch = BucketWatch(bucket, results, communicator, self.checks & ~within, within)
        self._watches.append(watch)
        return watch

    def end(self, communicator: Communicator, agreement: Agreement) -> Completion | None:
        """Ends a step: compares the Agreements, exchanges the results of the checks, and clips the gradients.

        Every rank must call it.

        Args:
            communicator: the communicator that reduced the buckets.
            agreement: the Agreement of the end of the step, which the ranks compare.

        Returns:
            The Completion of the clipping, if gradients were clipped on a GPU; else None.

        Raises:
            PlanMismatch: the step of another rank ends differently.
            NonFiniteGradient: some rank's gradients, or their sum, are not finite, and the policy is "raise"; all ranks
                raise this error.
            RankFailed, CollectiveTimeout, CommunicatorClosed: the exchange between the ranks has failed.
        """
        self.norm, self.skip_step = None, False
        watches = self._watches
        if not watches:
            communicator._agree(agreement)
            return None
        by_rank = communicator._share_numbers("flush", self._record(communicator), agreement)
        error = self._verdict(by_rank, communicator)
        if self._max_norm is not None:
            # Added up in rank order, so that all ranks round the same way.
            self.norm = math.sqrt(sum([_float_of(numbers[-1]) for numbers in by_rank]))
        self._watches = []
        if error is not None:
            if self._policy == "raise":
                self.norm = None
                raise error
            self.skip_step = True
            _log.info("skip_step is True: %s", error)
            return None
        if self.norm is None or self._max_norm is None or math.isinf(self._max_norm):
            return None
        factor = clip_factor(self.norm, self._max_norm)
        if factor >= 1.0:
            return None
        # Backwards, because the last results may still be in the cache.
        results = [result for watch in reversed(watches) for result in reversed(watch.results)]
        communicator._arrays.multiply_in_place(results, factor)
        return communicator._mark_end()

    def fail(self) -> None:
        """Forgets the results of the checks of a step that has failed."""
        self.norm, self.skip_step = None, False
        self._watches = []

    def _name(self, number: int) -> str:
        """Returns the name of the gradient that has the index `number` in the step."""
        slots = [slot for watch in self._watches for slot in watch.bucket.slots]
        return slots[number].spec.label

    def _record(self, communicator: Communicator) -> list[int]:
        """Returns the results of this rank's checks as a list of integers, which is equally long on all ranks.

        The first integer is 1 if some result is not finite, else 0. The next integers are the indices of the first
        gradients that are not finite: one index for each rank if the communicator has a NonFiniteFinder, else only the
        index for this rank. The last integer encodes the sum of the squares of this rank's share of the results. The
        integers of checks that are off are left out. On a GPU the host waits until the device has computed the results.
        """
        own = [is_finite for watch in self._watches for is_finite in watch.own]
        results = [is_finite for watch in self._watches for is_finite in watch.finite_results]
        squares = [square for watch in self._watches for square in watch.squares]
        numbers = on_host([*own, *results, *squares])
        record = []
        if Checks.NONFINITE in self.checks:
            firsts = self._firsts(iter(numbers[: len(own)]), communicator)
            known_of = [communicator.rank] if communicator._backend.finder is None else range(communicator.world_size)
            are_finite = all(numbers[len(own) : len(own) + len(results)])
            record = [int(not are_finite), *[firsts.get(rank, NOWHERE) for rank in known_of]]
        if self._max_norm is not None:
            record.append(_bits_of(float(sum(numbers[len(own) + len(results) :]))))
        return record

    def _firsts(self, own: Iterator[Any], communicator: Communicator) -> dict[int, int]:
        """Returns, for each rank of which this rank knows a non-finite gradient, the index of the first such gradient.

        Args:
            own: for each gradient that this rank has checked, whether the gradient is finite.
            communicator: the communicator that reduced the gradients.
        """
        firsts: dict[int, int] = {}
        begin = 0
        for watch in self._watches:
            are_finite = list(islice(own, len(watch.own)))
            found = watch.found if all(are_finite) else {communicator.rank: are_finite.index(False)}
            for rank, at in found.items():
                firsts.setdefault(rank, begin + at)
            begin += len(watch.bucket.slots)
        return firsts

    def _verdict(self, by_rank: Sequence[Sequence[int]], communicator: Communicator) -> NonFiniteGradient | None:
        """Returns the error that names the gradients that are not finite; None if gradients and results are finite."""
        if Checks.NONFINITE not in self.checks:
            return None
        ranks = range(communicator.world_size)
        if communicator._backend.finder is None:
            firsts = [numbers[1] for numbers in by_rank]
        else:
            of_rank = [[numbers[1 + rank] for numbers in by_rank if numbers[1 + rank] != NOWHERE] for rank in ranks]
            firsts = [min(found, default=NOWHERE) for found in of_rank]
        bad = {communicator.ranks[rank]: self._name(at) for rank, at in enumerate(firsts) if at != NOWHERE}
        return _error(communicator.label, bad) if bad or any(numbers[0] for numbers in by_rank) else None


class BucketWatch:
    """Checks the values of one bucket before and after its reduction; see the class Watch in for_bucketing.py.

    Args:
        bucket, results, communicator, within: see Values.watch.
        checks: the checks that the BucketWatch makes.

    Attributes:
        bucket, results: see Args.
        own: for each of this rank's gradients, whether the gradient is finite. Empty if the check is off, or if the
            communicator makes this check.
        found: by rank: the index in the bucket of the rank's first gradient that the communicator found not finite.
        finite_results: whether this rank's share of the results is finite, in parts.
        squares: the sums of the squares of this rank's share of the results.
    """

    def __init__(
        self, bucket: Bucket, results: Sequence[Any], communicator: Communicator, checks: Checks, within: Checks
    ) -> None:
        self.bucket = bucket
        self.results = results
        self.own: list[Any] = []
        self.found: dict[int, int] = {}
        self.finite_results: list[Any] = []
        self.squares: list[Any] = []
        self._communicator = communicator
        self._checks = checks
        self._within = within

    def before(self, sources: Sequence[Array]) -> None:
        """Checks this rank's values, gradient by gradient."""
        if Checks.NONFINITE in self._checks:
            slots = self.bucket.slots
            if len(sources) < len(slots):
                sources = [sources[0][slot.begin : slot.end] for slot in slots]
            self.own = [self._communicator._arrays.all_finite(source) for source in sources]

    def after(self, results: Sequence[Array]) -> None:
        """Checks this rank's share of the reduced values; the other ranks check the other shares."""
        communicator, backend = self._communicator, self._communicator._backend
        if backend.finder is not None and Checks.NONFINITE in self._within:
            found = backend.finder.take()
            firsts = [(rank, element) for rank, element in enumerate(found.firsts) if element != NOWHERE]
            self.found = {rank: bisect_right(self.bucket.slots, at, key=attrgetter("end")) for rank, at in firsts}
            self.finite_results = [not found.has_results]
        if backend.squares is not None and Checks.SQUARES in self._within:
            self.squares = [backend.squares.take()]
        if self._checks:
            share = packed(own_share(results, communicator))
            if Checks.NONFINITE in self._checks:
                self.finite_results += [communicator._arrays.all_finite(part) for part in share]
            if Checks.SQUARES in self._checks:
                self.squares += [communicator._arrays.sum_of_squares(part) for part in share]


def clip_factor(norm: float, max_norm: float) -> float:
    """Returns the factor that scales gradients to a norm of at most `max_norm`; at most 1, or NaN.

    Args:
        norm: the norm of all gradients. If the norm is NaN, the factor is NaN.
        max_norm: the largest allowed norm; above 0, and finite.

    Source: torch.nn.utils.clip_grad_norm_, including its 1e-6.
    """
    factor = max_norm / (norm + _EPSILON)
    return 1.0 if factor > 1.0 else factor


def own_share(flats: Sequence[Array], communicator: Communicator) -> list[Array]:
    """Returns this rank's share of some flat arrays: views that together have about 1/world_size of all elements."""
    if not flats:
        return []
    sizes = tuple([flat.size for flat in flats])
    share = share_of(sizes, flats[0].dtype.itemsize, communicator.rank, communicator.world_size)
    return [flats[piece.array][piece.begin : piece.end] for piece in share]


def packed(flats: Sequence[Array]) -> list[Array]:
    """Returns the large arrays, and one copy of all small arrays, because to check each small array costs more."""
    small = [flat for flat in flats if flat.size < _SMALL_ELEMENTS]
    if len(small) < 2:
        return list(flats)
    large = [flat for flat in flats if flat.size >= _SMALL_ELEMENTS]
    return [*large, array_module(small[0]).concatenate(small)]


def on_host(results: Sequence[Any]) -> list[Any]:
    """Returns results as Python numbers; copies results on a GPU together, so that the host waits only once."""
    if not results or isinstance(results[0], (bool, float)):
        return list(results)
    with results[0].device:
        numbers: list[Any] = array_module(results[0]).concatenate([result.reshape(1) for result in results]).tolist()
    return numbers


def _error(label: str, bad: dict[int, str]) -> NonFiniteGradient:
    if not bad:
        return NonFiniteGradient(
            f"{label}: the gradients of every rank are finite, but the sum overflowed its dtype: lower the loss scale, "
            "or hand over gradients in a dtype of a wider range"
        )
    where = ", ".join(f"{name!r} on rank {rank}" for rank, name in bad.items())
    rank = next(iter(bad))
    return NonFiniteGradient(
        f"{label}: NaN or infinity in the gradients of this step: {where} (the first such gradient of each rank): "
        "check the batch of that rank, or lower the learning rate, or the loss scale",
        rank=rank,
        parameter=bad[rank],
        parameters=bad,
    )


def _bits_of(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _float_of(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value

"""The norm of all reduced gradients together, each rank having squared its share of them, and the factor that clips it.

after each bucket's reduction: note_results() sums the squares of this rank's share
at the end of the step: conclude() has the ranks tell each other their sums
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsync.bucketing.shared_results import on_host, own_share
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array

_WHAT = "the norm of the gradients"
GRADIENT_NORM = Agreement(digest_of(_WHAT), lambda: _WHAT)
# As in torch.nn.utils.clip_grad_norm_: keeps the factor finite where the norm is 0.
_EPSILON = 1e-6


class GradientNorm:
    """The Euclidean norm of reduced gradients, one step after another; the same bits on every rank.

    On a GPU nothing but conclude() waits for the device, once. All calls of a step must be in the order of one stream.
    """

    def __init__(self) -> None:
        self._squares: list[Any] = []

    def reset(self) -> None:
        """Forgets what was noted: for a step that has failed."""
        self._squares = []

    def note_results(self, flats: Sequence[Array], communicator: Communicator) -> None:
        """Squares this rank's share of reduced gradients; the other ranks square the rest.

        Args:
            flats: 1-D contiguous arrays of any dtypes, equal on all ranks; of one bucket, or of all.
            communicator: whose ranks have them.
        """
        self._squares += [communicator.arrays.sum_of_squares(part) for part in own_share(flats, communicator)]

    def conclude(self, communicator: Communicator, agreement: Agreement) -> float:
        """Returns the norm of all that was noted in this step. Every rank must call it.

        Communicates once. On a GPU the host waits until this rank's squares are known. Squares are carried in float64:
        NaN or infinity where gradients are, and beyond 1e154.

        Args:
            communicator: of the ranks.
            agreement: what this rank believes all ranks are about to do.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        squares, self._squares = self._squares, []
        own = float(sum(on_host(squares)))
        told = communicator.share_numbers(_WHAT, [_bits(own)], agreement)
        return math.sqrt(sum([_float(bits) for (bits,) in told]))  # in rank order, so that all round alike


def clip_factor(norm: float, max_norm: float) -> float:
    """Returns what gradients are multiplied with so that their norm does not exceed `max_norm`; at most 1.

    Args:
        norm: of all gradients. Infinity gives 0, NaN gives NaN.
        max_norm: more than 0.

    Raises:
        InvalidArgument: max_norm is not more than 0, or no number.

    Source: torch.nn.utils.clip_grad_norm_, its 1e-6 included.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float, np.number)) or not max_norm > 0:
        raise InvalidArgument(f"max_norm must be a number above 0, got {max_norm!r}")
    factor = max_norm / (norm + _EPSILON)
    return 1.0 if factor > 1.0 else factor


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value

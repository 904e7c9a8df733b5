"""The values of a step's reduced gradients: their norm, whether they are finite, and clipping.

The reduced values are equal on all ranks, and NaN or infinity of any rank is in them. So each rank looks at its share,
and one exchange at the end of the step gives all ranks the norm and the verdict.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.lists import array_module
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of, share_floats
from gradsync.reduction import Array, part_dtype

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WIDE = np.dtype(np.float64)  # the only parts whose squares leave the range of float64
_SMALL_ELEMENTS = 2**14
_SAFE_SQUARES = 1e-290, 1e290


class Norm(NamedTuple):
    """The Euclidean norm of a step's reduced gradients, scale * root.

    Attributes:
        scale: 1, or the largest element where squares leave the range of float64.
        root: NaN or infinity exactly if an element is.
    """

    scale: float
    root: float

    @property
    def value(self) -> float:
        """The norm. It is infinite if an element is, or if it leaves the range of float64."""
        return self.scale * self.root

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return math.isfinite(self.root)

    def clip_factor(self, largest: float) -> float:
        """Returns the factor that brings the gradients down to the largest norm; 1 if they are not above.

        It is 1 too if they are not finite: a factor of 0 would hide it.
        """
        if not self.is_finite:
            return 1.0
        if math.isinf(self.value):
            return min(1.0, largest / self.scale / self.root)
        return min(1.0, largest / (self.value + _CLIP_EPSILON))


def norm_of(reduced: Sequence[Array], squares: float | None, communicator: Communicator, agreement: Agreement) -> Norm:
    """Returns the Euclidean norm of arrays that are equal on all ranks. Every rank must call it.

    Args:
        reduced: arrays on the communicator's device.
        squares: the sum of the squares of this rank's part of them, in float64: each element is in the sum of one rank.
            None, on all ranks: each rank adds up the squares of its share here.
        communicator: its ranks exchange the sums, or a scale s and the sum of (x / s)**2.
        agreement: what the ranks compare.
    """
    least, most = _SAFE_SQUARES
    if squares is not None:
        total = sum([of_rank for [of_rank] in share_floats(communicator, "norm", [squares], agreement)])
        if least < total < most or all(part_dtype(array.dtype) != _WIDE for array in reduced):
            return Norm(1.0, math.sqrt(total))
    arrays = arrays_of(communicator)
    flats = [arrays.flat(array) for array in reduced]
    shares = _joined(_share_of(flats, communicator.rank, communicator.world_size))
    # On a GPU these are sums on the device, for which the host waits once.
    scale, squares = 1.0, float(sum([arrays.sum_of_squares(share) for share in shares]))
    if not least < squares < most and any(part_dtype(share.dtype) == _WIDE for share in shares):
        parts = [_parts(share) for share in shares]
        largest = max([float(np.abs(part).max(initial=0.0)) for part in parts])
        if 0.0 < largest < math.inf:
            scale, squares = largest, sum([float(np.square(part / largest).sum()) for part in parts])
    rows = share_floats(communicator, "norm", [scale, squares], agreement)
    rows = [row for row in rows if row[1] != 0.0]
    largest = max([scale for scale, _ in rows], default=1.0)
    return Norm(largest, math.sqrt(sum([squares * (scale / largest) ** 2 for scale, squares in rows])))


def _share_of(flats: Sequence[Array], rank: int, world_size: int) -> list[Array]:
    """Returns a rank's share of the elements of all arrays: whole arrays, and parts of the first and the last."""
    total = sum([flat.size for flat in flats])
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    shares, begin = [], 0
    for flat in flats:
        end = begin + flat.size
        if begin < high and low < end and begin < end:
            is_whole = low <= begin and end <= high
            shares.append(flat if is_whole else flat[max(low - begin, 0) : high - begin])
        begin = end
    return shares


def _joined(flats: Sequence[Array]) -> list[Array]:
    """Joins small arrays of a dtype: a call for each would cost more than its elements."""
    large, small = [], defaultdict(list)
    for flat in flats:
        if flat.size < _SMALL_ELEMENTS:
            small[flat.dtype].append(flat)
        else:
            large.append(flat)
    return large + [array_module(few[0]).concatenate(few) if len(few) > 1 else few[0] for few in small.values()]


def _parts(share: Array) -> Any:
    """Returns real and imaginary parts in float64, on the host."""
    on_host = share.get() if hasattr(share, "get") else share
    return on_host.view(part_dtype(on_host.dtype)).astype(np.float64)

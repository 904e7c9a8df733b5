"""The values of a step's reduced gradients: their norm, whether they are finite, and clipping.

The reduced values are equal on all ranks, and NaN or infinity of any rank is in them. So each rank looks at its share,
and one exchange at the end of the step gives all ranks the norm and the verdict.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.host_arrays import ArrayKind
from gradsync.reduction import Array

POLICIES = ("off", "raise", "skip")
Exchange = Callable[[Sequence[int]], list[list[int]]]


def norm_of(flats: Sequence[Array], rank: int, world_size: int, arrays: ArrayKind, exchange: Exchange) -> float:
    """Returns the Euclidean norm of arrays that are equal on all ranks; infinite or NaN only if an element is.

    Args:
        flats: flat arrays on the communicator's device.
        rank, world_size: each rank adds up the squares of its share of each array.
        arrays: the functions for the arrays.
        exchange: returns the integers of all ranks. Each gives a scale s and the sum of (x / s)**2, as the bits of two
            float64: squares that leave the range of float64 are computed again with a scale.
    """
    shares = [flat[flat.size * rank // world_size : flat.size * (rank + 1) // world_size] for flat in flats]
    scale, squares = 1.0, _sum(shares, arrays)
    if not math.isfinite(squares) or 0.0 < squares < 1e-290 or (squares == 0.0 and any(map(_any, shares))):
        largest = max((float(np.abs(_on_host(share)).max(initial=0.0)) for share in shares), default=0.0)
        if 0.0 < largest < math.inf:
            scale = largest
            squares = sum(
                float(np.square(np.abs(_on_host(share)).astype(np.float64) / scale).sum()) for share in shares
            )
    rows = exchange([_bits(scale), _bits(squares)])
    found = [(_number(scale), _number(squares)) for scale, squares in rows]
    largest = max(scale for scale, squares in found if squares) if any(squares for _, squares in found) else 1.0
    return largest * math.sqrt(math.fsum(squares * (scale / largest) ** 2 for scale, squares in found))


def nonfinite_names(named: Sequence[tuple[str, Array]], arrays: ArrayKind) -> list[str]:
    """Returns the names of the arrays that have NaN or infinity."""
    return [name for name, flat in named if not bool(arrays.all_finite(flat))]


def clip_factor(norm: float, largest: float) -> float:
    """Returns the factor that brings gradients of a norm down to the largest norm; 1 if it is not above.

    Source: torch.nn.utils.clip_grad_norm_, including its 1e-6.
    """
    return min(1.0, largest / (norm + 1e-6)) if math.isfinite(norm) else 1.0


def _sum(shares: Sequence[Array], arrays: ArrayKind) -> float:
    total = 0.0
    for share in shares:
        if share.size:
            total += float(arrays.sum_of_squares(share))
    return total


def _any(share: Array) -> bool:
    return bool(share.any())


def _on_host(share: Array) -> Any:
    return share.get() if hasattr(share, "get") else share


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])

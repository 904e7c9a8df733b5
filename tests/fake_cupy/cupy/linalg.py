"""Linear algebra."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._math import queued
from ._ndarray import ndarray


def qr(a: ndarray, mode: str = "reduced") -> tuple[Any, Any]:
    """Returns the factors Q and R."""
    return queued(lambda host: np.linalg.qr(host, mode)[0], a), queued(lambda host: np.linalg.qr(host, mode)[1], a)

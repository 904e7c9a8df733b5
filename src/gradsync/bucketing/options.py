"""The options of an AllreduceCallback."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradsync.arguments import check_integer, is_number
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp, dtype_name

CHECK_EVERY = 1000  # steps: the digests then cost less than 0.1 % of them


@dataclass(frozen=True)
class Options:
    """The options of a callback, as AllreduceCallback takes them.

    They are checked here, but for two: Step checks `threshold_bytes`, and known_parameters() `parameters`.

    Attributes:
        op: the operator of the reduction: sum or mean.
    """

    op: ReduceOp
    threshold_bytes: Any = None
    parameters: Any = None
    missing: str = "error"
    gradient_as_bucket_view: bool = False
    nonfinite: str = "off"
    clip_norm: float | None = None
    check_every: int = 0
    diverged: str = "warn"
    _accepted: set[np.dtype[Any]] = field(default_factory=set)  # dtypes that were checked before

    def __post_init__(self) -> None:
        _check_word("missing", self.missing, ("error", "zero"))
        _check_word("nonfinite", self.nonfinite, ("off", "raise", "skip"))
        _check_word("diverged", self.diverged, ("warn", "raise"))
        check_integer("AllreduceCallback", "check_every", self.check_every, 0)
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise InvalidArgument(
                f"clip_norm must be a number above 0, or None for no clipping, got {self.clip_norm!r}"
            )
        if self.parameters is None and self.gradient_as_bucket_view:
            raise InvalidArgument(
                "gradient_as_bucket_view=True needs parameters=..., such as a mapping of names to (shape, dtype), "
                "because each gradient lives in its own part of a bucket"
            )
        if self.parameters is None and self.missing == "zero":
            raise InvalidArgument('missing="zero" needs parameters=..., which names the gradients of each step')

    @property
    def looks_at_values(self) -> bool:
        """Whether a flush looks at the reduced values."""
        return self.clip_norm is not None or self.nonfinite != "off"

    def settings(self) -> dict[str, str]:
        """Returns the options that must be equal on all ranks as text, but for reduce_method, and those with defaults.

        A step's digest has them.
        """
        settings: dict[str, str] = {}
        if self.missing == "zero":
            settings["missing"] = '"zero"'
        if self.gradient_as_bucket_view:
            settings["gradient_as_bucket_view"] = ""
        if self.nonfinite != "off":
            settings["nonfinite"] = f'"{self.nonfinite}"'
        if self.clip_norm is not None:
            settings["clip_norm"] = str(float(self.clip_norm))
        if self.check_every != CHECK_EVERY:
            settings["check_every"] = str(self.check_every)
        if self.diverged != "warn":
            settings["diverged"] = f'"{self.diverged}"'
        return settings

    def check_dtype(self, dtype: np.dtype[Any], arrays: ArrayKind) -> None:
        """Refuses gradients of a dtype that cannot be reduced with these options.

        Raises:
            UnsupportedDtype: integers cannot be averaged or clipped, for example.
        """
        if dtype in self._accepted:
            return
        arrays.check_operation(self.op, dtype)
        name = dtype_name(dtype)
        if self.clip_norm not in (None, math.inf) and ReduceOp.MEAN not in OPERATIONS_BY_DTYPE[name]:
            raise UnsupportedDtype(
                f"clip_norm {self.clip_norm} needs a floating or complex dtype, got {name}: convert the gradients with "
                'astype first; clip_norm=float("inf") computes the norm alone'
            )
        self._accepted.add(dtype)


def checked_weight(weight: Any, op: ReduceOp) -> float | None:
    """Returns a rank's weight as a float; None if there is none.

    Raises:
        InvalidArgument: the weight is not a finite number of at least 0, or the reduction is no mean.
    """
    if weight is None:
        return None
    try:
        number = float(weight) if is_number(weight) else math.nan
    except OverflowError:  # of an integer
        number = math.inf
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"weight must be a finite number of at least 0, got {weight!r}")
    if op is not ReduceOp.MEAN:
        raise InvalidArgument('weight= is for "mean": multiply the gradients of a "sum" yourself')
    return number


def _check_word(name: str, word: Any, known: tuple[str, ...]) -> None:
    if not isinstance(word, str) or word not in known:
        raise InvalidArgument(f"{name} must be {' or '.join(map(repr, known))}, got {word!r}")

"""The knobs of an AllreduceCallback, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradsync.errors import InvalidArgument
from gradsync.reduction import ReduceOp

DEFAULT_THRESHOLD_BYTES = 10 * 1024**2


@dataclass(frozen=True)
class Options:
    """What a callback does to its buckets; see AllreduceCallback, which has the same names.

    Attributes:
        op: sum or mean.
    """

    op: ReduceOp
    threshold_bytes: int = DEFAULT_THRESHOLD_BYTES
    first_bucket_bytes: int | None = None
    strategy: str = "flat"
    parameters: Any = None
    missing: str = "error"
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in ("flat", "group"):
            raise InvalidArgument(f'strategy must be "flat" or "group", got {self.strategy!r}')

        if self.missing not in ("error", "zero"):
            raise InvalidArgument(f'missing must be "error" or "zero", got {self.missing!r}')
        if self.missing == "zero" and self.parameters is None and not self.gradient_as_bucket_view:
            raise InvalidArgument('missing="zero" needs parameters=..., which says what can be missing')

    def settings(self) -> str:
        """Returns what ranks must agree on beside op and buckets, in words: part of each bucket's agreement."""
        return 'strategy "group"' if self.strategy == "group" else ""

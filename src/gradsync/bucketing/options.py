"""The knobs of an AllreduceCallback, checked."""

from __future__ import annotations

from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if self.strategy not in ("flat", "group"):
            raise InvalidArgument(f'strategy must be "flat" or "group", got {self.strategy!r}')

    def settings(self) -> str:
        """Returns what ranks must agree on beside op and buckets, in words: part of each bucket's agreement."""
        return 'strategy "group"' if self.strategy == "group" else ""

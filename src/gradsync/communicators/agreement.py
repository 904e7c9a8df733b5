"""What a rank believes all ranks are about to do, as 8 bytes to compare and a text to read when they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import numpy as np

from gradsync.errors import PlanMismatch
from gradsync.flight_recorder import size_text

_UNHARMED = "nothing was reduced"
_BROKEN = (
    "some had launched theirs already, as in the steps before: the communicator is broken, and the gradients of this "
    "step are undefined"
)


class Agreement(NamedTuple):
    """One event on which all ranks must agree.

    Attributes:
        digest: 64 bits, equal on two ranks when, and for all practical purposes only when, they mean the same.
        describe: makes the text for the error; called only after a mismatch.
        event: position among the events of a step, or None outside a step.
        summarise: makes the line for the flight recorder, called only when somebody reads that; None takes the first
            line of the description. Like `describe` it keeps no array alive.
        is_message: whether it is between two ranks only; then it does not count among the group's collectives.
    """

    digest: int
    describe: Callable[[], str]
    event: int | None = None
    summarise: Callable[[], str] | None = None
    is_message: bool = False

    def headline(self) -> str:
        """Returns what the ranks are about to do in one line, for the flight recorder."""
        return (self.summarise or self.describe)().partition("\n")[0]


def digest_of(*parts: object) -> int:
    """Returns a 64-bit digest of the parts' reprs, the same in every process."""
    text = "\x1f".join(map(repr, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def agreement_on(
    collective: str,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic] | None,
    detail: str,
    *,
    is_message: bool = False,
) -> Agreement:
    """Returns the agreement for a single collective; cached, because loops repeat themselves."""
    of_what = "" if dtype is None else f" of {dtype}{list(shape)}"
    text = f"{collective}{of_what}{f' ({detail})' if detail else ''}"
    digest = digest_of(collective, shape, str(dtype), detail)
    summarise = partial(_summary, collective, shape, dtype, detail)
    return Agreement(digest, lambda: text, summarise=summarise, is_message=is_message)


def _summary(collective: str, shape: tuple[int, ...], dtype: np.dtype[np.generic] | None, detail: str) -> str:
    """Returns e.g. "all_reduce(sum) float32[256, 1000] 1.02 MB"."""
    title = f"{collective}({detail})" if detail else collective
    return title if dtype is None else f"{title} {dtype}{list(shape)} {size_text(prod(shape) * dtype.itemsize)}"


class Description(NamedTuple):
    """What one rank was about to do.

    Attributes:
        headline: in one line.
        first: number of the first gradient in `lines`.
        lines: one for each gradient from there on, as many as there was room for.
    """

    headline: str
    first: int
    lines: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, first: int) -> Description:
        """Returns the description whose lines stand in the text, headline first."""
        headline, *lines = text.splitlines() or [""]
        return cls(headline, first, tuple(lines))


def first_difference(parts: Sequence[Sequence[object]]) -> int:
    """Returns the first position at which the sequences are not all equal; the shortest's length where they agree."""
    for position, values in enumerate(zip(*parts, strict=False)):
        if len(set(values)) > 1:
            return position
    return min(len(part) for part in parts)


def mismatch(
    label: str, index: int | None, descriptions: Mapping[int, Description], *, broken: bool = False
) -> PlanMismatch:
    """Makes the error that every rank raises.

    Args:
        label: this rank, e.g. "rank 0/2".
        index: position of the event in its step, or None.
        descriptions: of every rank, all from the same first gradient on.
        broken: a rank had launched its collective when another one found the difference.
    """
    where = "" if index is None else f", event {index} of this step"
    shown = "".join(f"\n  rank {rank}: {d.headline}" for rank, d in sorted(descriptions.items()))
    if any(d.lines for d in descriptions.values()):
        first = min(d.first for d in descriptions.values())
        shown += f"\n  first difference, gradient {first} of the bucket:"
        for rank, d in sorted(descriptions.items()):
            shown += f"\n    rank {rank}: {d.lines[0] if d.lines else '(nothing)'}"
    return PlanMismatch(
        f"{label}: the ranks disagree on the next collective{where}; {_BROKEN if broken else _UNHARMED}:{shown}",
        index=index,
        descriptions={rank: "\n".join([d.headline, *d.lines]) for rank, d in descriptions.items()},
        broken=broken,
    )

"""What a rank believes all ranks are about to do, as 8 bytes to compare and a text to read when they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from gradsync.errors import PlanMismatch


class Agreement(NamedTuple):
    """One event on which all ranks must agree.

    Attributes:
        digest: 64 bits, equal on two ranks when, and for all practical purposes only when, they mean the same.
        describe: makes the text for the error; called only after a mismatch.
        event: position among the events of a step, or None outside a step.
    """

    digest: int
    describe: Callable[[], str]
    event: int | None = None


def digest_of(*parts: object) -> int:
    """Returns a 64-bit digest of the parts' reprs, the same in every process."""
    text = "\x1f".join(map(repr, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def agreement_on(collective: str, shape: tuple[int, ...], dtype: np.dtype[np.generic] | None, detail: str) -> Agreement:
    """Returns the agreement for a single collective; cached, because loops repeat themselves."""
    of_what = "" if dtype is None else f" of {dtype.name}{list(shape)}"
    text = f"{collective}{of_what}{f' ({detail})' if detail else ''}"
    return Agreement(digest_of(collective, shape, str(dtype), detail), lambda: text)


def mismatch(label: str, index: int | None, descriptions: Mapping[int, str]) -> PlanMismatch:
    """Makes the error that every rank raises.

    Args:
        label: this rank, e.g. "rank 0/2".
        index: position of the event in its step, or None.
        descriptions: what each rank was about to do: a headline, then a line for each gradient, if any. The error's
            text shows the headlines and the first line that differs; its attribute holds the whole.
    """
    where = "" if index is None else f", event {index} of this step"
    texts = {rank: text.splitlines() or [""] for rank, text in sorted(descriptions.items())}
    shown = "".join(f"\n  rank {rank}: {lines[0]}" for rank, lines in texts.items())
    longest = max(len(lines) for lines in texts.values())
    for number in range(1, longest):
        at = {rank: lines[number] if number < len(lines) else "(nothing)" for rank, lines in texts.items()}
        if len(set(at.values())) > 1:
            shown += f"\n  first difference, gradient {number - 1} of the bucket:"
            shown += "".join(f"\n    rank {rank}: {line}" for rank, line in at.items())
            break
    return PlanMismatch(
        f"{label}: the ranks disagree on the next collective{where}; nothing was reduced:{shown}",
        index=index,
        descriptions=dict(descriptions),
    )

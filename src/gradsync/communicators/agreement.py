"""Agreements: a collective as an 8-byte digest for the ranks to compare, and as a text for PlanMismatch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradsync.diagnostics import size_text
from gradsync.errors import Caller, PlanMismatch, caller

try:
    from _blake2 import blake2b  # hashlib's implementation, without OpenSSL, which takes 4 ms to load
except ImportError:
    from hashlib import blake2b

# Separates a description's place, kind and callback when it is sent.
_SEPARATOR = "\x1f"
_ONE_ORDER = (
    "\n  the ranks use different callbacks here: use them in the same order on all ranks. If the order is the same and "
    'the ranks make them at different lines or in threads, name them: gs.AllreduceCallback(..., name="generator")'
)
_UNHARMED = "no data was moved"
_BROKEN = (
    "some had launched theirs already, as in the steps before: the communicator is broken, and the gradients of this "
    "step are undefined"
)


#: Replaces a number of rows that may differ between ranks.
ROWS = "rows"

Shape = tuple[int | str, ...]


class _OnBehalf(threading.local):
    """The program's place in the code, while a thread of gradsync runs a collective for it.

    Attributes:
        submitted_at: the line that has submitted the collective.
        thread: the identifier of the program's thread that waits for it.
    """

    submitted_at: Caller | None = None
    thread: int | None = None


on_behalf = _OnBehalf()


def place_of_caller() -> str:
    """Returns the line that calls the collective, e.g. "at train.py:41 in step"; "" if it cannot be found.

    Only called after a mismatch: the call has not returned then, so the stack has the line.
    """
    if on_behalf.submitted_at is not None:
        return f"submitted at {on_behalf.submitted_at}"
    found = caller(on_behalf.thread)
    return "" if found is None else f"at {found}"


class Agreement(NamedTuple):
    """One event on which all ranks must agree.

    Attributes:
        digest: 64 bits; equal on two ranks if, and in practice only if, they run the same event.
        describe: returns the text for the error; called only after a mismatch.
        event: position among the events of a step; None outside of a step.
        summarise: returns the line for the flight recorder; called only when the recorder is read. None takes the first
            line of the description. Neither function keeps an array alive.
        is_message: whether it is a message between two ranks, which does not count among the group's collectives.
        item: the name of each line of the description after the first, with {} for its number.
        tell: returns the fields for the flight recorder's dumps; None if there are none.
        kind: "bucket" or "flush" of a step of gradients, or a callback's "first use"; "" otherwise. For the advice
            after a mismatch, like `callback`.
        callback: returns the callback's name in errors; None or "" if there is only one callback.
    """

    digest: int
    describe: Callable[[], str]
    event: int | None = None
    summarise: Callable[[], str] | None = None
    is_message: bool = False
    item: str = "gradient {} of the bucket"
    tell: Callable[[], dict[str, Any]] | None = None
    kind: str = ""
    callback: Callable[[], str] | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the fields of the event, for the flight recorder's dumps."""
        return {} if self.tell is None else self.tell()

    def text_for_others(self, place: str | None = None) -> str:
        """Returns the text that `Description.parse` reads on other ranks; place and kind are first, never cut off.

        Args:
            place: the line in the program; None is the current one.
        """
        callback = "" if self.callback is None else self.callback()
        about = [place_of_caller() if place is None else place, self.kind, callback]
        return f"{_SEPARATOR.join(about)}\n{self.describe()}"

    def headline(self) -> str:
        """Returns the event in one line, for the flight recorder."""
        return (self.summarise or self.describe)().partition("\n")[0]


def digest_of(*parts: object) -> int:
    """Returns a 64-bit digest of the parts' reprs, the same in every process."""
    text = "\x1f".join(map(repr, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def agreement_on(
    collective: str,
    shape: Shape,
    dtype: np.dtype[np.generic] | None,
    detail: str,
    *,
    is_message: bool = False,
) -> Agreement:
    """Returns the agreement on a single collective; cached, because loops repeat their collectives.

    Args:
        collective: the collective's name.
        shape: the arrays' shape; ROWS replaces a number of rows that may differ between ranks.
        dtype: the arrays' dtype. Dtypes that compare equal give equal agreements.
        detail: anything else that must be equal on all ranks.
        is_message: see Agreement.
    """
    dtype = None if dtype is None else _plain(dtype)
    of_what = "" if dtype is None else f" of {_array_text(dtype, shape)}"
    text = f"{collective}{of_what}{f' ({detail})' if detail else ''}"
    digest = digest_of(collective, shape, str(dtype), detail)
    of_it = (collective, shape, dtype, detail)
    return Agreement(
        digest, lambda: text, summarise=partial(_summary, *of_it), is_message=is_message, tell=partial(_facts, *of_it)
    )


def _summary(collective: str, shape: Shape, dtype: np.dtype[np.generic] | None, detail: str) -> str:
    """Returns e.g. "all_reduce(sum) float32[256, 1000] 1.02 MB"."""
    title = f"{collective}({detail})" if detail else collective
    if dtype is None:
        return title
    lengths = [length for length in shape if isinstance(length, int)]
    size = f" {size_text(prod(lengths) * dtype.itemsize)}" if len(lengths) == len(shape) else ""
    return f"{title} {_array_text(dtype, shape)}{size}"


def _facts(collective: str, shape: Shape, dtype: np.dtype[np.generic] | None, detail: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"collective": collective}
    if detail:
        facts["detail"] = detail  # e.g. an operator, a root, the two ranks of a message
    if dtype is not None:
        facts |= {"dtype": str(dtype), "shape": list(shape)}
        if all(isinstance(length, int) for length in shape):
            facts["count"] = prod([int(length) for length in shape])
    return facts


def _array_text(dtype: np.dtype[np.generic], shape: Shape) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns a dtype without details in which equal dtypes, and so their texts, differ: numpy.record, alignment."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((_plain(base), shape))
    if dtype.names is None or dtype.fields is None:
        return dtype
    fields = [dtype.fields[name] for name in dtype.names]
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [_plain(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "titles": [field[2] if len(field) > 2 else None for field in fields],
            "itemsize": dtype.itemsize,
        }
    )


class Description(NamedTuple):
    """The collective that one rank was about to run, in words.

    Attributes:
        headline: the collective in one line.
        first: number of the first gradient in `lines`.
        lines: one line for each gradient from there on, as many as fit.
        place: the line in its program, as from place_of_caller.
        kind, callback: see Agreement.
    """

    headline: str
    first: int = 0
    lines: tuple[str, ...] = ()
    place: str = ""
    kind: str = ""
    callback: str = ""

    @property
    def is_of_step(self) -> bool:
        """Whether it is an event of a step of gradients."""
        return self.kind in ("bucket", "flush")

    @classmethod
    def parse(cls, text: str, first: int = 0) -> Description:
        """Returns the description in a text of place, headline and lines; the lines begin with number `first`."""
        about, _, described = text.partition("\n")
        place, kind, callback = [*about.split(_SEPARATOR), "", ""][:3]
        headline, *lines = described.splitlines() or [""]
        return cls(headline, first, tuple(lines), place, kind, callback)

    @classmethod
    def parse_whole(cls, texts: Mapping[int, str]) -> dict[int, Description]:
        """Returns the descriptions of all ranks, each from the first line that differs between ranks."""
        whole = {rank: cls.parse(text) for rank, text in texts.items()}
        first = first_difference([description.lines for description in whole.values()])
        return {rank: d._replace(first=first, lines=d.lines[first:]) for rank, d in whole.items()}

    def __str__(self) -> str:
        """Returns e.g. "all_reduce of float64[3] (sum), at train.py:41 in step"."""
        return f"{self.headline}, {self.place}" if self.place else self.headline


def first_difference(parts: Sequence[Sequence[object]]) -> int:
    """Returns the first position at which the sequences differ; the shortest length if they do not."""
    for position, values in enumerate(zip(*parts, strict=False)):
        if len(set(values)) > 1:
            return position
    return min(len(part) for part in parts)


def mismatch(
    label: str, agreement: Agreement | None, descriptions: Mapping[int, Description], *, broken: bool = False
) -> PlanMismatch:
    """Returns the error that every rank raises.

    Args:
        label: this rank, e.g. "rank 0/2".
        agreement: this rank's agreement; None if it is not known any more.
        descriptions: every rank's description, all from the same first gradient on.
        broken: whether a rank had already launched its collective.
    """
    index = None if agreement is None else agreement.event
    where = "" if index is None else f", number {index + 1} of this step"
    shown = _each(descriptions)
    if any(d.lines for d in descriptions.values()):
        first = min(d.first for d in descriptions.values())
        item = "line {}" if agreement is None else agreement.item
        shown += f"\n  first difference, {item.format(first)}:"
        for rank, d in sorted(descriptions.items()):
            shown += f"\n    rank {rank}: {d.lines[0] if d.lines else '(nothing)'}"
    shown += _advice(list(descriptions.values()))
    return PlanMismatch(
        f"{label}: the ranks disagree on the next collective{where}; {_BROKEN if broken else _UNHARMED}:{shown}",
        index=index,
        descriptions={rank: "\n".join([d.headline, *d.lines]) for rank, d in descriptions.items()},
        places=places_of(descriptions),
        broken=broken,
    )


def message_mismatch(label: str, descriptions: Mapping[int, Description]) -> PlanMismatch:
    """Returns the error that both ranks of a message raise.

    Args:
        label: this rank.
        descriptions: both ranks' descriptions.
    """
    first, second = sorted(descriptions)
    return PlanMismatch(
        f"{label}: ranks {first} and {second} disagree on the message between them; no data was moved:"
        f"{_each(descriptions)}",
        descriptions={rank: d.headline for rank, d in descriptions.items()},
        places=places_of(descriptions),
    )


def places_of(descriptions: Mapping[int, Description]) -> dict[int, str]:
    """Returns the lines of code by rank, for PlanMismatch.places."""
    return {rank: d.place.partition("at ")[2] for rank, d in descriptions.items() if d.place}


def _each(descriptions: Mapping[int, Description]) -> str:
    return "".join(f"\n  rank {rank}: {description}" for rank, description in sorted(descriptions.items()))


def _advice(descriptions: Sequence[Description]) -> str:
    """Returns advice, if only the rows of a gather differ, or the callbacks or gradients of a step.

    It depends only on the descriptions, so that all ranks give the same advice.
    """
    headlines = [description.headline for description in descriptions]
    but_for_rows = {re.sub(r"\[\d+", "[", headline, count=1) for headline in headlines}
    if len(but_for_rows) == 1 and but_for_rows.pop().startswith(("all_gather of", "gather of")):
        return '\n  if the numbers of rows may differ, pass sizes="ask" or a list of them'
    are_of_callbacks = all(d.kind or d.callback for d in descriptions)
    are_first_uses = all(d.kind == "first use" for d in descriptions)
    if are_of_callbacks and (are_first_uses or len({d.callback for d in descriptions}) > 1):
        return _ONE_ORDER
    if not all(d.is_of_step for d in descriptions):  # a rank runs another part of its program
        return ""
    lines = [description.lines for description in descriptions]
    if all(lines) and len(set(map(frozenset, lines))) == 1:
        return (
            "\n  the gradients are the same, their order differs: hand them over in the same order on all ranks, or "
            "pass `parameters` to the callback, so that any order works"
        )
    if any(lines) and not all(lines):  # a rank is at its flush, or its bucket ends here
        return (
            "\n  some ranks have handed over fewer gradients than others: pass `parameters`, so that the error names "
            'the missing gradients, or also missing="zero" to fill them with zeros'
        )
    return ""

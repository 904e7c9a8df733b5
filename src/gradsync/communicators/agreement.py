"""What a rank believes all ranks are about to do, as 8 bytes to compare and a text to read when they differ."""

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
    from _blake2 import blake2b  # hashlib's own, without OpenSSL, which takes 4 ms to load at every start
except ImportError:
    from hashlib import blake2b

# Between a description's place, its kind and its callback, where it travels.
_BETWEEN = "\x1f"
_ONE_ORDER = (
    "\n  the ranks use different callbacks here: use them in one order on all ranks; where that is so, and the ranks "
    'make them at different lines or in threads, name each on all ranks: gs.AllreduceCallback(..., name="generator")'
)
_UNHARMED = "no data was moved"
_BROKEN = (
    "some had launched theirs already, as in the steps before: the communicator is broken, and the gradients of this "
    "step are undefined"
)


#: In place of a number of rows that may differ from rank to rank.
ROWS = "rows"

Shape = tuple[int | str, ...]


class _OnBehalf(threading.local):
    """For whom a thread of gradsync's own runs a collective, or asks about one.

    Attributes:
        submitted_at: the line that has submitted it.
        thread: which waits meanwhile.
    """

    submitted_at: Caller | None = None
    thread: int | None = None


on_behalf = _OnBehalf()


def place_of_caller() -> str:
    """Returns where this rank's program calls the collective, e.g. "at train.py:41 in step"; "" where nobody knows.

    Looked up only after a mismatch: the call has not returned then, and the stack has the line.
    """
    if on_behalf.submitted_at is not None:
        return f"submitted at {on_behalf.submitted_at}"
    found = caller(on_behalf.thread)
    return "" if found is None else f"at {found}"


class Agreement(NamedTuple):
    """One event on which all ranks must agree.

    Attributes:
        digest: 64 bits, equal on two ranks when, and for all practical purposes only when, they mean the same.
        describe: makes the text for the error; called only after a mismatch.
        event: position among the events of a step, or None outside a step.
        summarise: makes the line for the flight recorder, called only when somebody reads that; None takes the first
            line of the description. Like `describe` it keeps no array alive.
        is_message: whether it is between two ranks only; then it does not count among the group's collectives.
        item: what each line of the description after the first is about, with {} for its number.
        tell: makes what the flight recorder's dumps have of it, in parts; None where there are none.
        kind: "bucket" or "flush" of a step of gradients, or a callback's "first use"; "" elsewhere. For the advice
            after a mismatch, as is the next one.
        callback: makes what errors call the callback whose event it is; None, or "", where none is to be told apart.
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
        """Returns what the ranks are about to do in parts, for the flight recorder's dumps."""
        return {} if self.tell is None else self.tell()

    def text_for_others(self, place: str | None = None) -> str:
        """Returns what `Description.parse` reads, after a mismatch: first what nothing cuts off, place and kind.

        Args:
            place: where in the program; None is where it is now.
        """
        callback = "" if self.callback is None else self.callback()
        about = [place_of_caller() if place is None else place, self.kind, callback]
        return f"{_BETWEEN.join(about)}\n{self.describe()}"

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
    shape: Shape,
    dtype: np.dtype[np.generic] | None,
    detail: str,
    *,
    is_message: bool = False,
) -> Agreement:
    """Returns the agreement for a single collective; cached, because loops repeat themselves.

    Args:
        collective: its name.
        shape: of the arrays; ROWS in place of a number that ranks need not have in common.
        dtype: of the arrays. Equal ones give equal agreements, as they do in the cache.
        detail: whatever else the ranks must have in common.
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
        facts["detail"] = detail  # an operator, a root, the two ranks of a message
    if dtype is not None:
        facts |= {"dtype": str(dtype), "shape": list(shape)}
        if all(isinstance(length, int) for length in shape):
            facts["count"] = prod([int(length) for length in shape])
    return facts


def _array_text(dtype: np.dtype[np.generic], shape: Shape) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns a dtype without what equal ones may differ in, for their texts would too: numpy.record, alignment."""
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
    """What one rank was about to do.

    Attributes:
        headline: in one line.
        first: number of the first gradient in `lines`.
        lines: one for each gradient from there on, as many as there was room for.
        place: where in its program, as place_of_caller has it.
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
        """Returns the description whose lines stand in the text: the place, the headline, and those from `first` on."""
        about, _, described = text.partition("\n")
        place, kind, callback = [*about.split(_BETWEEN), "", ""][:3]
        headline, *lines = described.splitlines() or [""]
        return cls(headline, first, tuple(lines), place, kind, callback)

    @classmethod
    def parse_whole(cls, texts: Mapping[int, str]) -> dict[int, Description]:
        """Returns the descriptions of all ranks, each from the first line on that is not the same for all."""
        whole = {rank: cls.parse(text) for rank, text in texts.items()}
        first = first_difference([description.lines for description in whole.values()])
        return {rank: d._replace(first=first, lines=d.lines[first:]) for rank, d in whole.items()}

    def __str__(self) -> str:
        """Returns e.g. "all_reduce of float64[3] (sum), at train.py:41 in step"."""
        return f"{self.headline}, {self.place}" if self.place else self.headline


def first_difference(parts: Sequence[Sequence[object]]) -> int:
    """Returns the first position at which the sequences are not all equal; the shortest's length where they agree."""
    for position, values in enumerate(zip(*parts, strict=False)):
        if len(set(values)) > 1:
            return position
    return min(len(part) for part in parts)


def mismatch(
    label: str, agreement: Agreement | None, descriptions: Mapping[int, Description], *, broken: bool = False
) -> PlanMismatch:
    """Makes the error that every rank raises.

    Args:
        label: this rank, e.g. "rank 0/2".
        agreement: this rank's; None where that is not known any more.
        descriptions: of every rank, all from the same first gradient on.
        broken: a rank had launched its collective when another one found the difference.
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
    """Makes the error that both ranks of a message raise.

    Args:
        label: this rank.
        descriptions: of the two.
    """
    first, second = sorted(descriptions)
    return PlanMismatch(
        f"{label}: ranks {first} and {second} disagree on the message between them; nothing was moved:"
        f"{_each(descriptions)}",
        descriptions={rank: d.headline for rank, d in descriptions.items()},
        places=places_of(descriptions),
    )


def places_of(descriptions: Mapping[int, Description]) -> dict[int, str]:
    """Returns PlanMismatch.places."""
    return {rank: d.place.partition("at ")[2] for rank, d in descriptions.items() if d.place}


def _each(descriptions: Mapping[int, Description]) -> str:
    return "".join(f"\n  rank {rank}: {description}" for rank, description in sorted(descriptions.items()))


def _advice(descriptions: Sequence[Description]) -> str:
    """Returns what to do: where nothing but the rows of a gather differs, and where the gradients of a step do.

    It goes by what all ranks know alike, so that all of them tell the same.
    """
    headlines = [description.headline for description in descriptions]
    but_for_rows = {re.sub(r"\[\d+", "[", headline, count=1) for headline in headlines}
    if len(but_for_rows) == 1 and but_for_rows.pop().startswith(("all_gather of", "gather of")):
        return '\n  pass sizes="ask", or the rows of each rank, where these may differ'
    are_of_callbacks = all(d.kind or d.callback for d in descriptions)
    are_first_uses = all(d.kind == "first use" for d in descriptions)
    if are_of_callbacks and (are_first_uses or len({d.callback for d in descriptions}) > 1):
        return _ONE_ORDER
    if not all(d.is_of_step for d in descriptions):  # a rank is elsewhere in its program
        return ""
    lines = [description.lines for description in descriptions]
    if all(lines) and len(set(map(frozenset, lines))) == 1:
        return (
            "\n  the gradients are the same, their order is not: hand them over in one order on all ranks, or tell the "
            "callback `parameters`, and each may come when it will"
        )
    if any(lines) and not all(lines):  # a rank is at its flush, or its bucket ends here
        return (
            "\n  some ranks have handed over fewer gradients than others: with `parameters` the callback names those "
            'that are missing, and missing="zero" goes on without them'
        )
    return ""

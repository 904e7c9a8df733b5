"""An Agreement describes one collective, so that the ranks can check that all of them call the same one.

It has an 8-byte digest, which the ranks compare before data moves. If the digests differ, each rank sends its
description of the collective to the others. Each rank then makes the error PlanMismatch from the descriptions of all
ranks: see mismatch.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradsync.errors import Caller, caller, size_text

try:
    from _blake2 import blake2b  # hashlib's implementation, without OpenSSL, which takes 4 ms to load
except ImportError:
    from hashlib import blake2b

_MOST_BYTES_OF_OTHERS = 2048  # because shared memory has little room for the descriptions of all ranks
_SHORTENED_TO_CHARACTERS = 100

#: In a shape, replaces a number of rows that may differ between ranks.
ROWS = "rows"

Shape = tuple[int | str, ...]


# -- The line of the program that calls a collective -------------------------------------------------------------------


class _OnBehalf(threading.local):
    """The origin of the collective that a thread of gradsync runs for another thread.

    Attributes:
        submitted_at: the line of the program that has submitted the collective.
        thread: the identifier of the thread that waits for the collective.
    """

    submitted_at: Caller | None = None
    thread: int | None = None


on_behalf = _OnBehalf()


class CallSite(NamedTuple):
    """The line of the user's program that called a collective.

    Attributes:
        line: the file, the line number and the function, e.g. "train.py:41 in step"; "" if the line is not known.
        relation: the words before the line in errors, e.g. "at" or "submitted at".
    """

    line: str = ""
    relation: str = "at"

    def __str__(self) -> str:
        """Returns the relation and the line, e.g. "at train.py:41 in step"; "" if the line is not known."""
        return f"{self.relation} {self.line}" if self.line else ""


def find_call_site() -> CallSite:
    """Returns the line of the user's program that called the current collective.

    Call this function only before the collective returns, because it reads the line from the stack.
    """
    if on_behalf.submitted_at is not None:
        return CallSite(str(on_behalf.submitted_at), "submitted at")
    found = caller(on_behalf.thread)
    return CallSite("" if found is None else str(found))


# -- Descriptions: sent to the other ranks after a mismatch ----------------------------------------------------------


class Item(NamedTuple):
    """One part of a collective on which the ranks must agree: an array, or a line of text.

    Attributes:
        name: the array's name, or the line of text.
        dtype: the array's dtype; "" for a line of text; "None" if there is no array.
        shape: the array's shape; None if there is no array, or for a line of text.
    """

    name: str
    dtype: str = ""
    shape: Shape | None = None

    def __str__(self) -> str:
        """Returns the item as text, e.g. "'w': float32[3, 4]"."""
        return f"{self.name}: {_array_text(self.dtype, self.shape)}" if self.dtype else self.name


class StepSoFar(NamedTuple):
    """The state of one rank's training step at an event of the step: a bucket, or the end of the step.

    Attributes:
        others: the gradients that the rank has passed to gradsync and not yet reduced, except the gradients of this
            event.
        has_ended: whether the rank will pass no more gradients to gradsync in this step.
        sizes: the rank's options for bucket sizes, as pairs of a name and a value.
    """

    others: tuple[Item, ...] = ()
    has_ended: bool = False
    sizes: tuple[tuple[str, str], ...] = ()


class Description(NamedTuple):
    """The collective that one rank was about to run.

    Attributes:
        what: the name of the collective, e.g. "all_reduce", or the event of a step in words.
        dtype: the array's dtype; "" if the collective has no array, or several.
        shape: the array's shape; None if `dtype` is "".
        detail: all other arguments that must be equal on all ranks, e.g. the operator "sum".
        items: the collective's arrays, or lines of text. The first items may be missing because they are equal on all
            ranks, and the last items because the message to the other ranks had no room for them.
        item: the words for one item in errors, with {} for its index, e.g. "line {}".
        kind: the kind of an event of AllreduceCallback: "bucket", "flush" (the end of a step) or "first use"; "" for
            every other collective.
        callback: the name of the AllreduceCallback in errors; "" if the communicator has only one.
        made_at: the line of the program that made the callback. Errors show `made_at` only if `callback` is not "".
        settings: the options of the callback, as pairs of a name and a value.
        others, has_ended: see StepSoFar.
        item_count: how many entries `items` and `others` had together before any of them were removed.
        call_site: the line of the rank's program that called the collective.
        first: the index of `items[0]` among all items of the collective.
    """

    what: str
    dtype: str = ""
    shape: Shape | None = None
    detail: str = ""
    items: tuple[Item, ...] = ()
    item: str = "line {}"
    kind: str = ""
    callback: str = ""
    made_at: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    others: tuple[Item, ...] = ()
    has_ended: bool = False
    item_count: int = 0
    call_site: CallSite = CallSite()
    first: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether entries of `items` or `others` are missing because the message had no room for them."""
        return self.first + len(self.items) + len(self.others) < self.item_count

    @property
    def headline(self) -> str:
        """The collective in one line, e.g. "all_reduce of float64[3] (sum)"."""
        array = f" of {_array_text(self.dtype, self.shape)}" if self.dtype else ""
        detail = f" ({self.detail})" if self.detail else ""
        callback = f" (callback {self.callback}, made at {self.made_at})" if self.callback else ""
        return f"{self.what}{array}{detail}{callback}"

    def __str__(self) -> str:
        """Returns the headline and the line of code, e.g. "all_reduce of float64[3] (sum), at train.py:41 in step"."""
        return f"{self.headline}, {self.call_site}" if self.call_site.line else self.headline

    def lines(self) -> list[str]:
        """Returns the headline, then one line for each item."""
        return [self.headline, *map(str, self.items)]

    def to_lines(self, head_bytes: int) -> list[str]:
        """Returns the description as lines of ASCII text, to be sent to the other ranks.

        Each line is JSON. The first line has all fields but the items, and each further line has one item. `from_text`
        also reads a text whose end is cut off.

        Args:
            head_bytes: the largest allowed size of the first line, at least 2 KiB. If the line is longer, its fields
                are shortened.
        """
        import json  # imported here to keep the start of a rank short

        others = self.others if len(json.dumps(self.others)) <= _MOST_BYTES_OF_OTHERS else ()
        item_count = len(self.items) + len(self.others)
        fields = self._replace(items=(), others=others, item_count=item_count)
        head = json.dumps(fields)
        if len(head) > head_bytes:
            what, dtype, detail, made_at = map(_shortened, (self.what, self.dtype, self.detail, self.made_at))
            fields = fields._replace(what=what, dtype=dtype, detail=detail, made_at=made_at)
            head = json.dumps(fields._replace(shape=None, settings=(), others=()))
        return [head, *map(json.dumps, self.items)]

    def to_text(self, limit_bytes: int) -> str:
        """Returns the lines of `to_lines` as one text of at most `limit_bytes`, for `from_text`."""
        return "\n".join(self.to_lines(limit_bytes))[:limit_bytes]

    @classmethod
    def from_text(cls, text: str, first: int = 0) -> Description:
        """Parses the text that another rank has made with `to_text`, and returns that rank's description.

        Args:
            text: the other rank's text; the end of the text may be cut off.
            first: the index of the text's first item among all items of the collective.
        """
        import json  # imported here to keep the start of a rank short

        head, *lines = text.split("\n")
        try:
            what, dtype, shape, detail, _, item, kind, callback, made_at, settings, others, *rest = json.loads(head)
            has_ended, item_count, (line, relation), _ = rest
            return cls(
                str(what),
                str(dtype),
                _shape_of(shape),
                str(detail),
                _whole_items(lines, json.loads),
                str(item),
                str(kind),
                str(callback),
                str(made_at),
                tuple([(str(name), str(value)) for name, value in settings]),
                tuple([_item_of(fields) for fields in others]),
                bool(has_ended),
                int(item_count),
                CallSite(str(line), str(relation)),
                first,
            )
        except _UNREADABLE:
            return cls("(a description that cannot be read)", first=first)


_UNREADABLE = ValueError, TypeError, OverflowError, RecursionError


def _whole_items(lines: Sequence[str], load: Callable[[str], Any]) -> tuple[Item, ...]:
    """Parses one item from each line, up to a line that was cut off; returns the items."""
    items = []
    for line in lines:
        try:
            items.append(_item_of(load(line)))
        except _UNREADABLE:
            break
    return tuple(items)


def _item_of(fields: Any) -> Item:
    name, dtype, shape = fields
    return Item(str(name), str(dtype), _shape_of(shape))


def _shape_of(lengths: Any) -> Shape | None:
    return None if lengths is None else tuple([ROWS if length == ROWS else int(length) for length in lengths])


def _shortened(text: str) -> str:
    return text if len(text) <= _SHORTENED_TO_CHARACTERS else f"{text[:_SHORTENED_TO_CHARACTERS]}..."


def _array_text(dtype: object, shape: Shape | None) -> str:
    return f"{dtype}" if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


# -- Agreements ------------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """One event on which all ranks must agree: a collective, or a bucket or the end of a training step.

    Attributes:
        digest: a 64-bit number. Two ranks have equal digests if they run the same event, and in practice only then.
        describe: a function that returns the Description, called only after a mismatch and for the flight recorder's
            dumps. The function must not hold a reference to an array.
        event: the event's index in its step, from 0; None if the event does not belong to a step.
        summarise: a function that returns the event in one line of text, called when the flight recorder is read. The
            function must not hold a reference to an array. If `summarise` is None, `headline` of the Description is
            used instead.
        is_message: whether the event is a message between two ranks. Messages are not counted as collectives.
        make_facts: a function that returns fields for the flight recorder's dumps; None if there are no fields.
        so_far: a function that returns the state of this rank's step at this event. It is called only while the event
            runs. None if the event does not belong to a step.
    """

    digest: int
    describe: Callable[[], Description]
    event: int | None = None
    summarise: Callable[[], str] | None = None
    is_message: bool = False
    make_facts: Callable[[], dict[str, Any]] | None = None
    so_far: Callable[[], StepSoFar] | None = None

    def headline(self) -> str:
        """Returns the event in one line, for the flight recorder."""
        return self.describe().headline if self.summarise is None else self.summarise()

    def facts(self) -> dict[str, Any]:
        """Returns the fields of the event, for the flight recorder's dumps."""
        return {} if self.make_facts is None else self.make_facts()

    def lines(self) -> list[str]:
        """Returns the description as lines of text, for the flight recorder's dumps."""
        return self.describe().lines()

    def described(self, call_site: CallSite | None = None) -> Description:
        """Returns the description that this rank sends to the other ranks.

        Args:
            call_site: the line of the user's program that ran the event. If `call_site` is None, the event is still
                running, and the line is read from the stack.
        """
        described = self.describe()
        if call_site is not None:
            return described._replace(call_site=call_site)
        if self.so_far is None:
            return described._replace(call_site=find_call_site())
        others, has_ended, sizes = self.so_far()
        settings = described.settings + sizes
        return described._replace(call_site=find_call_site(), settings=settings, others=others, has_ended=has_ended)


def digest_of(*parts: object) -> int:
    """Returns a 64-bit digest of repr() of the arguments. Equal arguments give equal digests in all processes."""
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
    """Returns the Agreement that describes one collective. Agreements are cached, as programs repeat their collectives.

    Args:
        collective: the collective's name.
        shape: the arrays' shape, with ROWS in place of a number of rows that may differ between ranks.
        dtype: the arrays' dtype. Dtypes that compare equal give equal digests.
        detail: all other arguments that must be equal on all ranks, as text.
        is_message: see Agreement.
    """
    dtype = None if dtype is None else _plain(dtype)
    digest = digest_of(collective, shape, str(dtype), detail)
    arguments = (collective, shape, dtype, detail)
    return Agreement(
        digest,
        partial(Description, collective, "" if dtype is None else str(dtype), shape, detail),
        summarise=partial(_summary, *arguments),
        is_message=is_message,
        make_facts=partial(_facts, *arguments),
    )


def _summary(collective: str, shape: Shape, dtype: np.dtype[np.generic] | None, detail: str) -> str:
    """Returns the collective in one line, e.g. "all_reduce(sum) float32[256, 1000] 1,000 KB"."""
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


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype without numpy.record and without alignment, so that equal dtypes have the same str()."""
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

"""An Agreement describes one collective, so that the ranks can check that all call the same one.

They compare its 8-byte digest before data moves. If the digests differ, each rank sends the others its description in
lines of text (failures.py), and makes PlanMismatch of all: what each rank calls and where, the first line that differs,
and a remedy.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradsync.errors import PlanMismatch, caller, name_ranks, size_text
from gradsync.machine import machine_identity

try:
    from _blake2 import blake2b  # hashlib's implementation, without OpenSSL, which takes 4 ms to load
except ImportError:
    from hashlib import blake2b

#: The end of a Description's options in a step with weights.
WEIGHT = ", weight"
#: Before the callback, in the line of a collective that was launched.
OF_CALLBACK = " of callback "

#: This value in a shape replaces a number of rows that may differ between ranks.
ROWS = "rows"

Shape = tuple[int | str, ...]


# -- The line of the program that calls a collective -------------------------------------------------------------------


class _OnBehalf(threading.local):
    """The thread for which a thread of gradsync compares a message."""

    thread: int | None = None


on_behalf = _OnBehalf()


def find_call_site() -> str:
    """Returns the line of the user's program that called this collective, e.g. "at train.py:41 in step"; "" if unknown.

    It is read from the stack, so ask before the collective returns.
    """
    found = caller(on_behalf.thread)
    return "" if found is None else f"at {found}"


# -- Descriptions: sent to the other ranks after a mismatch ----------------------------------------------------------


class Description(NamedTuple):
    """The collective that one rank was about to run, in words.

    Attributes:
        headline: the collective in one line, e.g. "all_reduce of float64[3] (sum)".
        lines: its arrays, e.g. "'w': float32[3, 4]", or what else the ranks must agree on.
        callback: the AllreduceCallback that runs it, as text that is equal on all ranks; "" if the program calls it.
        options: the callback's options, for a bucket or the end of its step; otherwise "".
        call_site: the line of the rank's program that called it; see find_call_site.
    """

    headline: str
    lines: tuple[str, ...] = ()
    callback: str = ""
    options: str = ""
    call_site: str = ""

    @property
    def what(self) -> str:
        """The name of the collective, e.g. "all_reduce"."""
        return re.split(r" of | \(", self.headline)[0]

    def __str__(self) -> str:
        """Returns the headline and the line of code, e.g. "all_reduce of float64[3] (sum), at train.py:41 in step"."""
        return f"{self.headline}, {self.call_site}" if self.call_site else self.headline

    def to_text(self) -> str:
        """Returns the description as ASCII text, for the other ranks."""
        import json  # imported here to keep the start of a rank short

        return json.dumps([self.headline, self.callback, self.options, self.call_site, *self.lines])

    @classmethod
    def from_text(cls, text: str) -> Description:
        """Returns the description that another rank has made this text of."""
        import json  # imported here to keep the start of a rank short

        try:
            headline, callback, options, call_site, *lines = map(str, json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return cls("(a description that cannot be read)")
        return cls(headline, tuple(lines), callback, options, call_site)


def array_text(dtype: object, shape: Shape) -> str:
    """Returns dtype and shape as text, e.g. "float32[3, 4]"."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


# -- Agreements ------------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """One event on which all ranks must agree: a collective, or a whole step of a callback.

    Attributes:
        digest: 64 bits, equal on ranks that run the same event, and in practice only then.
        describe: returns the Description. It must not hold a reference to an array.
        summarise: returns the event in one line, when the flight recorder is read; None: the Description's headline
            will do. It must not hold a reference to an array either.
        is_message: whether it is a message between two ranks. Messages are not counted as collectives.
        layout: how the elements lie in memory: 0 for C order, else a number that stands for the layout of all arrays.
            Ranks with different layouts need copies in C order.
    """

    digest: int
    describe: Callable[[], Description]
    summarise: Callable[[], str] | None = None
    is_message: bool = False
    layout: int = 0

    def headline(self) -> str:
        """Returns the event in one line, for the flight recorder."""
        return self.describe().headline if self.summarise is None else self.summarise()

    def described(self) -> Description:
        """Returns the description for the other ranks. Call it while the event runs."""
        return self.describe()._replace(call_site=find_call_site())


class LayoutsDiffer(Exception):
    """The ranks agree on a collective, but their arrays lie differently in memory. All ranks raise it."""


def digest_of(*parts: object) -> int:
    """Returns a 64-bit digest of the arguments' repr()."""
    text = "\x1f".join(map(repr, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def machine_digest() -> int:
    """Returns a 64-bit number that all processes of this machine have, and those of other machines have not."""
    return digest_of("machine", machine_identity() or os.uname().nodename)


@lru_cache(maxsize=4096)
def agreement_on(
    collective: str,
    shape: Shape,
    dtype: np.dtype[np.generic] | None,
    detail: str,
    *,
    is_message: bool = False,
) -> Agreement:
    """Returns the Agreement of one collective, from a cache: programs repeat their collectives.

    Args:
        collective: its name.
        shape: the arrays' shape, with ROWS in place of a number of rows that may differ between ranks.
        dtype: the arrays' dtype. Dtypes that compare equal give equal digests.
        detail: all else that must be equal on all ranks, as text.
        is_message: see Agreement.
    """
    return Agreement(
        digest_of(collective, shape, _identity(dtype), detail),
        partial(_describe, collective, shape, dtype, detail),
        summarise=partial(_summary, collective, shape, dtype, detail),
        is_message=is_message,
    )


def _describe(collective: str, shape: Shape, dtype: np.dtype[np.generic] | None, detail: str) -> Description:
    array = "" if dtype is None else f" of {array_text(dtype, shape)}"
    return Description(f"{collective}{array}{f' ({detail})' if detail else ''}")


def _summary(collective: str, shape: Shape, dtype: np.dtype[np.generic] | None, detail: str) -> str:
    """Returns the collective in one line, e.g. "all_reduce(sum) float32[256, 1000] 1,000 KB"."""
    title = f"{collective}({detail})" if detail else collective
    if dtype is None:
        return title
    lengths = [length for length in shape if isinstance(length, int)]
    size = f" {size_text(prod(lengths) * dtype.itemsize)}" if len(lengths) == len(shape) else ""
    return f"{title} {array_text(dtype, shape)}{size}"


def _identity(dtype: np.dtype[Any] | None) -> str:
    """Returns text that is equal for equal dtypes; str() of structured ones may differ in numpy.record."""
    if dtype is None or dtype.names is None:
        return str(dtype)
    return f"{dict(dtype.fields or {})} in {dtype.itemsize} bytes"


# -- PlanMismatch: each rank makes the error from the descriptions of all ranks ---------------------------------------

_ONE_ORDER = (
    "the ranks use different callbacks here: use the callbacks in the same order on all ranks. If the order is the "
    "same, but the ranks make the callbacks at different lines of code, name the callbacks: "
    'gs.AllreduceCallback(..., name="generator")'
)
_WEIGHTS = "passed no weight: in a step either all ranks pass backward(weight=), or none does"
_NO_PLAN = (
    "handed over nothing: with weight=0 a rank may do so only if it knows the gradients from its last step, or from "
    "parameters=..."
)
_ONE_ORDER_OF_PARAMETERS = "the order of the parameters differs: pass parameters= in the same order on all ranks"
_SAME_GRADIENTS = (
    "hand over gradients of the same names, shapes and dtypes on all ranks, in any order; with parameters=... and "
    'missing="zero" a rank may leave gradients out'
)
_IS_MISSING = " is missing here on "
_SAME_ORDER = "call the same collectives in the same order on all ranks"
AFTER_REBUILD = (
    "the world was rebuilt: the first collective of a rank that was started again has to be the one that the others "
    "make after gs.rebuild()"
)
_AS_BROADCAST = (
    ", also at the edge of a step: let all ranks call gs.broadcast_tree(state, root=comm.most_advanced) there, and "
    "nothing before it"
)
_SAME_VALUES = (
    "an array as a name is known by its values at its first use, and the ranks' values differ: give all ranks the same "
    "values first, with gs.bcast_list_(arrays), or name the gradients by text, or pass parameters=[...]"
)


def mismatch(
    label: str,
    agreement: Agreement,
    descriptions: Mapping[int, Description],
    *,
    broken: bool = False,
    is_rebuilt: bool = False,
) -> PlanMismatch:
    """Returns the error for ranks that disagree on a collective, or two on a message.

    Args:
        label: this rank's name in errors, e.g. "rank 0/2".
        agreement: what this rank was about to do.
        descriptions: what each rank was, by rank.
        broken: whether the ranks found it after a launch.
        is_rebuilt: whether the world is not the first one of this run.
    """
    by_rank = dict(sorted(descriptions.items()))
    who, what = "the ranks", "the next collective"
    if agreement.is_message:
        who, what = name_ranks(list(by_rank)), "the message between them"
    shown = [f"{label}: {who} disagree on {what}; no data was moved:"]
    if broken:
        shown = [
            f"{label}: the ranks have launched different collectives, so that values are wrong on some or all ranks:"
        ]
    shown += [f"  rank {rank}: {described}" for rank, described in by_rank.items()]
    alike = _first_difference([described.lines for described in by_rank.values()])
    differing = {rank: described.lines[alike:] for rank, described in by_rank.items()}
    remedy = _remedy_for_launched(differing) if broken else _remedy(by_rank)
    if is_rebuilt and len({each.what for each in by_rank.values()} | {"broadcast_tree"}) == 2:
        remedy = AFTER_REBUILD + _AS_BROADCAST
    if any(differing.values()) and _IS_MISSING not in remedy:  # from there on, all lines differ
        shown.append(f"  first difference, line {alike + 1}:")
        shown += [f"    rank {rank}: {lines[0] if lines else '(nothing)'}" for rank, lines in differing.items()]
    if remedy:
        shown.append(f"  {remedy}")
    places = {rank: described.call_site.partition("at ")[2] for rank, described in by_rank.items()}
    return PlanMismatch(
        "\n".join(shown),
        descriptions={rank: "\n".join([by_rank[rank].headline, *lines]) for rank, lines in differing.items()},
        places={rank: place for rank, place in places.items() if place},
        broken=broken,
    )


def _first_difference(parts: Sequence[Sequence[object]]) -> int:
    """Returns the first index at which sequences differ; if none, the length of the shortest."""
    for position, values in enumerate(zip(*parts, strict=False)):
        if len(set(values)) > 1:
            return position
    return min(len(part) for part in parts)


def _remedy(descriptions: Mapping[int, Description]) -> str:
    """Returns what the program must change; "" if that is not known."""
    each = list(descriptions.values())
    if any(d.headline.startswith("(") for d in each):  # a description has not arrived: in its place is the reason
        return ""
    if all(d.callback for d in each) and len({d.callback for d in each}) > 1:
        return _ONE_ORDER
    weighted = {rank: d.options.endswith(WEIGHT) for rank, d in descriptions.items() if d.options}
    if len(weighted) == len(each) and len(set(weighted.values())) > 1:
        return f"{name_ranks([rank for rank, has in weighted.items() if not has])} {_WEIGHTS}"
    lacking = [rank for rank, d in descriptions.items() if not d.lines]
    if weighted and all(weighted.values()) and 0 < len(lacking) < len(each):
        return f"{name_ranks(lacking)} {_NO_PLAN}"
    if all(d.options for d in each):  # buckets, or ends of steps, of the same callback
        if len({d.options for d in each}) > 1:
            options = _by_value({rank: d.options for rank, d in descriptions.items()})
            return f"the callback's options differ: {options}: make the callback with the same options on all ranks"
        return _remedy_for_lines(descriptions, _SAME_GRADIENTS)
    if len({d.what for d in each}) > 1 or any(d.options for d in each):  # an all_reduce, and that of a bucket
        return _SAME_ORDER
    if any(d.lines for d in each):
        return _remedy_for_lines(descriptions, "pass the same arguments and arrays on all ranks")
    if each[0].what in ("all_gather", "gather") and len({_without_rows(d.headline) for d in each}) == 1:
        return "if the numbers of rows may differ, pass sizes=, the number of rows of each rank"
    return "pass the same arguments, and arrays of the same shape and dtype, on all ranks"


def _remedy_for_launched(launched: Mapping[int, Sequence[str]]) -> str:
    """Returns the remedy for ranks that have launched these collectives, the first of which differ."""
    callbacks = [lines[0].partition(OF_CALLBACK)[2] if lines else "" for lines in launched.values()]
    return _ONE_ORDER if all(callbacks) and len(set(callbacks)) > 1 else _SAME_ORDER


def _remedy_for_lines(descriptions: Mapping[int, Description], same: str) -> str:
    """Returns the first array that differs or is missing, with the remedy; `same` is the remedy for missing arrays."""
    by_rank = {rank: dict(line.rpartition(": ")[::2] for line in d.lines) for rank, d in descriptions.items()}
    names = list(dict.fromkeys(name for arrays in by_rank.values() for name in arrays))
    counts = {rank: len(arrays) for rank, arrays in by_rank.items()}
    if all(counts.values()) and all(name.startswith("#") for name in names):
        # Arrays of parameters=[...] are known by their number: one that is missing changes the numbers of all others.
        if len(set(counts.values())) > 1:
            return f"the numbers of parameters differ: {_by_value(counts)}: pass the same parameters= on all ranks"
        orders = {tuple(arrays.values()) for arrays in by_rank.values()}
        if len(orders) > 1 and len({tuple(sorted(order)) for order in orders}) == 1:
            return _ONE_ORDER_OF_PARAMETERS
    for name in names:
        values = {rank: arrays[name] for rank, arrays in by_rank.items() if name in arrays}
        if len(set(values.values())) > 1:
            return f"{name} differs: {_by_value(values)}: pass arrays of the same shape and dtype on all ranks"
    if not all(by_rank.values()):  # a rank ends its step, and its headline says what it lacks
        return same
    missing = {name: [rank for rank, arrays in by_rank.items() if name not in arrays] for name in names}
    if absent := {name: ranks for name, ranks in missing.items() if ranks}:
        first = next(iter(absent))
        if first.startswith("array of ") and len(set(counts.values())) == 1:
            return _SAME_VALUES
        # Where a name is misspelt, the others lack another.
        others = [f", and {name} on {name_ranks(on)}" for name, on in absent.items() if on != absent[first]]
        return f"{first}{_IS_MISSING}{name_ranks(absent[first])}{''.join(others[:1])}: {same}"
    if len({tuple(arrays) for arrays in by_rank.values()}) > 1:
        return _ONE_ORDER_OF_PARAMETERS
    return same


def _without_rows(headline: str) -> str:
    """Returns a collective's headline without the first number of its array's shape."""
    return re.sub(r"\[\d+", "[", headline)


def _by_value(values: Mapping[int, object]) -> str:
    """Returns each value with its ranks as text, e.g. "float32[3] on ranks 0 and 2; float32[4] on rank 1"."""
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {name_ranks(of_value)}" for value, of_value in ranks.items())

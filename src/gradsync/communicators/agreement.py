"""Agreements: a collective as an 8-byte digest for the ranks to compare, and as a text for PlanMismatch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradsync.diagnostics import size_text
from gradsync.errors import Caller, PlanMismatch, caller, name_ranks

try:
    from _blake2 import blake2b  # hashlib's implementation, without OpenSSL, which takes 4 ms to load
except ImportError:
    from hashlib import blake2b

# Separates the fields before a description when it is sent, and the items of a field.
_SEPARATOR = "\x1f"
_ITEM_SEPARATOR = "\x1e"
_MOST_BYTES_OF_OTHERS = 2048  # because the texts of the ranks have little room in shared memory
_ONE_ORDER = (
    "\n  the ranks use different callbacks here: use them in the same order on all ranks. If the order is the same and "
    'the ranks make them at different lines or in threads, name them: gs.AllreduceCallback(..., name="generator")'
)
_TOO_MANY = "999999999"  # a number of lines that no description has
_SIZES = ("threshold_bytes", "first_bucket_bytes")  # ranks may differ in these, as long as their buckets are equal
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


class StepSoFar(NamedTuple):
    """The step of one rank, up to an event.

    Attributes:
        others: the gradients that the rank has handed over for later events, each as a line of a description.
        has_ended: whether the rank has handed over all of its gradients.
        sizes: the limits of the rank's bucket sizes, each as "name value".
    """

    others: tuple[str, ...] = ()
    has_ended: bool = False
    sizes: tuple[str, ...] = ()


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
        make_facts: returns the fields for the flight recorder's dumps; None if there are none.
        kind: "bucket" or "flush" of a step of gradients, or a callback's "first use"; "" otherwise. For the advice
            after a mismatch, like `callback`.
        callback: returns the callback's name in errors; None or "" if there is only one callback.
        settings: the options of the callback, each as "name value". For the advice.
        so_far: returns the step of this rank up to this event. For the advice; not called after the event.
    """

    digest: int
    describe: Callable[[], str]
    event: int | None = None
    summarise: Callable[[], str] | None = None
    is_message: bool = False
    item: str = "gradient {} of the bucket"
    make_facts: Callable[[], dict[str, Any]] | None = None
    kind: str = ""
    callback: Callable[[], str] | None = None
    settings: tuple[str, ...] = ()
    so_far: Callable[[], StepSoFar] | None = None

    def facts(self) -> dict[str, Any]:
        """Returns the fields of the event, for the flight recorder's dumps."""
        return {} if self.make_facts is None else self.make_facts()

    def text_for_others(self, place: str | None = None) -> str:
        """Returns the text that `Description.parse` reads on other ranks; only the lines at its end may be cut off.

        Args:
            place: the program's line that ran the event, if the event is over; None takes the current line.
        """
        callback = "" if self.callback is None else self.callback()
        described = self.describe()
        so_far = StepSoFar() if place is not None or self.so_far is None else self.so_far()
        others = _ITEM_SEPARATOR.join(so_far.others)
        have_room = len(others) <= _MOST_BYTES_OF_OTHERS
        about = [
            place_of_caller() if place is None else place,
            self.kind,
            callback,
            _ITEM_SEPARATOR.join(self.settings + so_far.sizes),
            others if have_room else "",
            "ended" if so_far.has_ended else "",
            str(described.count("\n")) if have_room else _TOO_MANY,
        ]
        return f"{_SEPARATOR.join(about)}\n{described}"

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
        digest,
        lambda: text,
        summarise=partial(_summary, *of_it),
        is_message=is_message,
        make_facts=partial(_facts, *of_it),
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
        lines: one line for each gradient from number `first` on, as many as fit.
        place: the rank's line of code, as place_of_caller returns it.
        kind, callback, settings: see Agreement.
        others, has_ended: see StepSoFar.
        all_lines: the number of all lines, including the lines before `first` and the lines that did not fit.
    """

    headline: str
    first: int = 0
    lines: tuple[str, ...] = ()
    place: str = ""
    kind: str = ""
    callback: str = ""
    settings: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    has_ended: bool = False
    all_lines: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether gradients did not fit into the text."""
        return self.first + len(self.lines) < self.all_lines or not all(_is_spec(line) for line in self.lines[-1:])

    @property
    def is_of_step(self) -> bool:
        """Whether the collective is an event of a step of gradients."""
        return self.kind in ("bucket", "flush")

    @classmethod
    def parse(cls, text: str, first: int = 0) -> Description:
        """Parses a text from Agreement.text_for_others, whose lines begin with number `first`."""
        about, _, described = text.partition("\n")
        place, kind, callback, settings, others, ended, count = [*about.split(_SEPARATOR), *[""] * 6][:7]
        headline, *lines = described.splitlines() or [""]
        return cls(
            headline,
            first,
            tuple(lines),
            place,
            kind,
            callback,
            tuple(filter(None, settings.split(_ITEM_SEPARATOR))),
            tuple(filter(None, others.split(_ITEM_SEPARATOR))),
            ended == "ended",
            int(count) if count.isdecimal() and len(count) < 10 else 0,
        )

    @classmethod
    def parse_whole(cls, texts: Mapping[int, str]) -> dict[int, Description]:
        """Returns the descriptions of all ranks. Their lines begin at the first line that differs between ranks."""
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
        descriptions: every rank's description; all begin with the same gradient.
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
    shown += _advice(descriptions)
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


def _advice(descriptions: Mapping[int, Description]) -> str:
    """Returns the last line of the error: the difference between the ranks and a remedy; "" if no more is known.

    The advice depends only on the descriptions, so all ranks give the same advice.
    """
    each = list(descriptions.values())
    headlines = {rank: description.headline for rank, description in descriptions.items()}
    but_for_rows = {re.sub(r"\[\d+", "[", headline, count=1) for headline in headlines.values()}
    if len(but_for_rows) == 1 and but_for_rows.pop().startswith(("all_gather of", "gather of")):
        return '\n  if the numbers of rows may differ, pass sizes="ask" or a list of them'
    are_of_callbacks = all(d.kind or d.callback for d in each)
    are_first_uses = all(d.kind == "first use" for d in each)
    if are_of_callbacks and (are_first_uses or len({d.callback for d in each}) > 1):
        return _ONE_ORDER
    advice = ""
    if all(d.is_of_step for d in each):  # else a rank runs another part of its program
        advice = _advice_on_settings(descriptions) or _advice_on_gradients(descriptions)
    elif all(d.lines and _is_spec(d.lines[0]) for d in each):  # of the memory of buckets
        firsts = {rank: _parsed(d.lines[0]) for rank, d in descriptions.items()}
        names = {name for name, _ in firsts.values()}
        if len(names) == 1 and len(set(firsts.values())) > 1:
            advice = _difference(names.pop(), {rank: spec for rank, (_, spec) in firsts.items()})
    if not advice and len(descriptions) > 2:
        odd, others = _split(headlines)
        advice = f"{name_ranks(odd)} {_verb(odd, 'differs', 'differ')} from {name_ranks(others)}" if others else ""
    return f"\n  {advice}" if advice else ""


def _advice_on_settings(descriptions: Mapping[int, Description], *, are_sizes: bool = False) -> str:
    """Returns advice on options of the callback, and numbers of local passes, that differ between ranks; else "".

    Args:
        descriptions: the descriptions of all ranks.
        are_sizes: whether to look at the options for bucket sizes only; otherwise at all other options.
    """
    by_rank = {rank: dict(map(_named, d.settings)) for rank, d in descriptions.items()}
    found, passes = [], ""
    for name in dict.fromkeys(name for settings in by_rank.values() for name in settings):
        values = {rank: settings.get(name) for rank, settings in by_rank.items()}
        if len(set(values.values())) == 1 or (name in _SIZES) != are_sizes:
            continue
        if name == "local_passes":
            numbers = _by_value({rank: value or "none" for rank, value in values.items()})
            passes = f"the ranks had different numbers of local passes before this step, but need the same: {numbers}"
        elif None in values.values() and len(set(values.values())) == 2:
            found.append(f"{name} is set on {name_ranks([rank for rank in values if values[rank] is not None])} only")
        else:
            found.append(f"{name} differs: {_by_value({rank: value or 'unset' for rank, value in values.items()})}")
    options = f"{'; '.join(found)}: make the callback with the same options on all ranks" if found else ""
    return "; ".join(filter(None, [options, passes]))


def _advice_on_gradients(descriptions: Mapping[int, Description]) -> str:
    """Returns advice on the first gradient that differs between ranks, or that a rank has not handed over."""
    here = {rank: dict(map(_parsed, filter(_is_spec, d.lines))) for rank, d in descriptions.items()}
    known = {rank: dict(map(_parsed, filter(_is_spec, d.others))) | here[rank] for rank, d in descriptions.items()}
    if not any(here.values()):  # all are at their flush
        here = known
    numbers = {rank: d.all_lines + len(d.others) for rank, d in descriptions.items()}
    are_all = all(d.has_ended and not d.is_cut for d in descriptions.values())
    if (
        are_all
        and len(set(numbers.values())) > 1
        and all(name[:1] == "#" for specs in known.values() for name in specs)
    ):
        return (
            f"the ranks handed over different numbers of gradients: {_by_value(numbers)}: hand over the same gradients "
            "in the same order; give them names to see here which one is missing"
        )
    names = dict.fromkeys(name for specs in here.values() for name in specs)
    for name in names:
        specs = {rank: specs[name] for rank, specs in known.items() if name in specs}
        if len(set(specs.values())) > 1:
            return _difference(name, specs)
    if _may_be_prefixes(descriptions) and (advice := _advice_on_settings(descriptions, are_sizes=True)):
        return advice
    firsts = {rank: next(iter(specs), None) for rank, specs in here.items()}
    missing = _missing(filter(None, firsts.values()), known)
    if not missing:  # with parameters= the first gradient of a bucket may be there, and a later one missing
        missing = dict([*_missing(names, known).items()][:1])
    if not missing:
        if len({tuple(specs) for specs in here.values()}) == 1:
            return ""
        odd, rest = _split({rank: tuple(specs) for rank, specs in here.items()})
        where = f" on {name_ranks(odd)} from that on {name_ranks(rest)}" if rest and len(descriptions) > 2 else ""
        return (
            f"the gradients are the same, their order differs{where}: hand them over in the same order on all ranks, "
            "or pass parameters=..., then any order is allowed"
        )
    is_certain = not any(descriptions[rank].is_cut for ranks in missing.values() for rank in ranks)
    if len(missing) > 1 or not is_certain:
        at_once = _by_value({rank: name or "no gradient" for rank, name in firsts.items()})
        return (
            f"the ranks hand over different gradients here: {at_once}: use the same names in the same order, or pass "
            "parameters=..., then any order is allowed"
        )
    [(name, ranks)] = missing.items()
    have_ended = all(descriptions[rank].has_ended for rank in ranks)
    what = f"did not hand over {name}" if have_ended else f"{_verb(ranks, 'has', 'have')} not handed over {name} yet"
    others = [rank for rank in descriptions if rank not in ranks]
    auxiliary = "did" if have_ended else _verb(others, "has", "have")
    beside = f", {name_ranks(others)} {auxiliary}" if len(descriptions) > 2 else ""
    return (
        f"{name_ranks(ranks)} {what}{beside}: hand over the same gradients on all ranks, or pass parameters=... and "
        'missing="zero", to fill missing ones with zeros'
    )


def _missing(names: Iterable[str], known: Mapping[int, Mapping[str, object]]) -> dict[str, list[int]]:
    """Returns, by name, the ranks that do not know a gradient; without the names that all ranks know."""
    ranks = {name: [rank for rank, specs in known.items() if name not in specs] for name in names}
    return {name: absent for name, absent in ranks.items() if absent}


def _difference(name: str, specs: Mapping[int, tuple[str, str]]) -> str:
    """Returns e.g. "'b2' has another shape on rank 1 than on ranks 0 and 2"."""
    dtypes = {rank: dtype for rank, (dtype, _) in specs.items()}
    is_dtype = len(set(dtypes.values())) > 1
    values = dtypes if is_dtype else {rank: shape for rank, (_, shape) in specs.items()}
    what = "dtype" if is_dtype else "shape"
    odd, others = _split(values)
    where = f"another {what} on {name_ranks(odd)} than on {name_ranks(others)}" if others else f"different {what}s"
    return f"{name} has {where}: {_by_value(values)}"


def _may_be_prefixes(descriptions: Mapping[int, Description]) -> bool:
    """Whether every bucket begins as the longest one does."""
    lines = [d.lines for d in descriptions.values()]
    longest = max(lines, key=len)
    return all(each == longest[: len(each)] for each in lines)


def array_line(name: str, dtype: object, shape: Sequence[int]) -> str:
    """Returns the line of an array in a description: "'w': float32[3, 4]"; see _is_spec and _parsed."""
    return f"{name}: {dtype}{list(shape)}"


def _is_spec(line: str) -> bool:
    """Whether a line of array_line is whole; the last line of a description may be cut off."""
    return line.endswith("]")


def _parsed(line: str) -> tuple[str, tuple[str, str]]:
    """Returns the name, and the dtype and shape, in a line of array_line."""
    name, _, spec = line.rpartition(": ")
    dtype, bracket, shape = spec.partition("[")
    return name, (dtype, bracket + shape)


def _named(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition(" ")
    return name, value


def _split(values: Mapping[int, object]) -> tuple[list[int], list[int]]:
    """Returns the ranks that differ, and the ranks that they differ from.

    If there are two values, the first list has the ranks with the rarer value; of two lists of equal length, the one
    with the lowest rank is second. If there are more values, the first list has all ranks, and the second is empty.
    """
    groups = _groups(values)
    if len(groups) != 2:
        return sorted(values), []
    first, second = groups.values()  # the first group has the lowest rank
    return (first, second) if len(first) < len(second) else (second, first)


def _groups(values: Mapping[int, object]) -> dict[object, list[int]]:
    """Returns the ranks by value, in ascending order."""
    groups: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def _by_value(values: Mapping[int, object]) -> str:
    """Returns e.g. "1.0 on ranks 0 and 2, 2.0 on rank 1"."""
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in _groups(values).items())


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many

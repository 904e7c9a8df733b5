"""An Agreement describes one collective, so that the ranks can check that all of them call the same collective.

An Agreement has an 8-byte digest, which the ranks compare before data moves. (NCCL is an exception: see
nccl/speculative_agreement.py.) If the digests differ, each rank sends its description of the collective to the other
ranks (see failures.py). Each rank then makes the error PlanMismatch from the descriptions of all ranks. The message of
the error begins with the name of the rank. Then the message shows the description of each rank. If the ranks have
different lists of arrays, the message also shows the first array that differs. The last line is advice, if there is
any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradsync.errors import Caller, PlanMismatch, caller, name_ranks, size_text

try:
    from _blake2 import blake2b  # hashlib's implementation, without OpenSSL, which takes 4 ms to load
except ImportError:
    from hashlib import blake2b

#: This value in a shape replaces a number of rows that may differ between ranks.
ROWS = "rows"

#: `what` in the Description of a message between two ranks.
MESSAGE = "message"

Shape = tuple[int | str, ...]


# -- The line of the program that calls a collective -------------------------------------------------------------------


class _OnBehalf(threading.local):
    """The origin of the collective that a thread of gradsync runs for another thread.

    Attributes:
        submitted_at: the line of the program that has submitted the collective.
        thread: the identifier of the thread that called the collective.
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

    Call this function only before the collective returns, because the function reads the line from the stack.
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
        others: the gradients that the rank has passed to gradsync and that are not reduced yet, except the gradients of
            this event.
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
        shape: the array's shape; without meaning if `dtype` is "".
        detail: the other arguments as text, e.g. the operator "sum". All ranks must pass equal arguments, except for
            the row counts of all_to_all, which must fit the row counts of the other ranks.
        items: the collective's arrays, or lines of text. `mismatch` removes the leading items that are equal on
            all ranks.
        item: the words for one item in errors, with {} in place of the item's index, e.g. "line {}".
        kind: the kind of an event of AllreduceCallback: "bucket", "flush" (the end of a step) or "first use"; "" for
            every other collective.
        callback: the name of the AllreduceCallback in errors; "" if the communicator has only one callback.
        made_at: the line of the program that made the callback. Errors show `made_at` only if `callback` is not "".
        settings: the options of the callback, as pairs of a name and a value.
        others, has_ended: see StepSoFar.
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
    call_site: CallSite = CallSite()
    first: int = 0

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

    def to_text(self) -> str:
        """Returns the description as ASCII text, to be sent to the other ranks."""
        import json  # imported here to keep the start of a rank short

        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Description:
        """Returns the description of another rank, which has made the text with `to_text`."""
        import json  # imported here to keep the start of a rank short

        try:
            what, dtype, shape, detail, items, item, kind, callback, made_at, settings, others, *rest = json.loads(text)
            has_ended, (line, relation), first = rest
            return cls(
                str(what),
                str(dtype),
                _shape_of(shape),
                str(detail),
                tuple(map(_item_of, items)),
                str(item),
                str(kind),
                str(callback),
                str(made_at),
                tuple([(str(name), str(value)) for name, value in settings]),
                tuple(map(_item_of, others)),
                bool(has_ended),
                CallSite(str(line), str(relation)),
                int(first),
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            return cls("(a description that cannot be read)")


def _item_of(fields: Any) -> Item:
    name, dtype, shape = fields
    return Item(str(name), str(dtype), _shape_of(shape))


def _shape_of(lengths: Any) -> Shape | None:
    return None if lengths is None else tuple([ROWS if length == ROWS else int(length) for length in lengths])


def _array_text(dtype: object, shape: Shape | None) -> str:
    return f"{dtype}" if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


# -- Agreements ------------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """One event on which all ranks must agree: a collective, or a bucket or the end of a training step.

    Attributes:
        digest: a 64-bit number. Two ranks have equal digests if they run the same event, and in practice only then.
        describe: a function that returns the Description. The function must not hold a reference to an array.
        event: the event's index in its step, from 0; None if the event does not belong to a step.
        summarise: a function that returns the event in one line of text, called when the flight recorder is read. The
            function must not hold a reference to an array. If `summarise` is None, `headline` of the Description is
            used instead.
        is_message: whether the event is a message between two ranks. Messages are not counted as collectives.
        so_far: a function that returns the state of this rank's step at this event. The function is called only while
            the event runs. `so_far` is None if the event does not belong to a step.
    """

    digest: int
    describe: Callable[[], Description]
    event: int | None = None
    summarise: Callable[[], str] | None = None
    is_message: bool = False
    so_far: Callable[[], StepSoFar] | None = None

    def headline(self) -> str:
        """Returns the event in one line, for the flight recorder."""
        return self.describe().headline if self.summarise is None else self.summarise()

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
    """Returns a 64-bit digest of repr() of the arguments. Arguments with the same repr() give the same digest."""
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
    return Agreement(
        digest_of(collective, shape, _identity(dtype), detail),
        partial(Description, collective, "" if dtype is None else str(dtype), shape, detail),
        summarise=partial(_summary, collective, shape, dtype, detail),
        is_message=is_message,
    )


def _summary(collective: str, shape: Shape, dtype: np.dtype[np.generic] | None, detail: str) -> str:
    """Returns the collective in one line, e.g. "all_reduce(sum) float32[256, 1000] 1,000 KB"."""
    title = f"{collective}({detail})" if detail else collective
    if dtype is None:
        return title
    lengths = [length for length in shape if isinstance(length, int)]
    size = f" {size_text(prod(lengths) * dtype.itemsize)}" if len(lengths) == len(shape) else ""
    return f"{title} {_array_text(dtype, shape)}{size}"


def _identity(dtype: np.dtype[Any] | None) -> str:
    """Returns a text that is equal for equal dtypes; str() of equal structured dtypes may differ in numpy.record."""
    if dtype is None or dtype.names is None:
        return str(dtype)
    return f"{dict(dtype.fields or {})} in {dtype.itemsize} bytes"


# -- PlanMismatch: each rank makes the error from the descriptions of all ranks ---------------------------------------

_ONE_ORDER = (
    "the ranks use different callbacks here: use the callbacks in the same order on all ranks. If the order is the "
    "same, but the ranks make the callbacks at different lines or in threads, name the callbacks: "
    'gs.AllreduceCallback(..., name="generator")'
)
_SIZES = ("threshold_bytes",)  # ranks may differ in it if their buckets are equal
_NO_SITE = CallSite()
_UNHARMED = "no data was moved"
_BROKEN = (
    "some ranks had already launched their collective, because gradsync expected this collective after the earlier "
    "collectives: the communicator is broken, and the gradients of this step are undefined"
)


def mismatch(
    label: str, agreement: Agreement | None, descriptions: Mapping[int, Description], *, broken: bool = False
) -> PlanMismatch:
    """Returns the error that the ranks raise if they disagree on a collective, or if two ranks disagree on a message.

    Args:
        label: this rank's name in errors, e.g. "rank 0/2".
        agreement: the Agreement that describes this rank's collective; None if this rank does not have it any more.
        descriptions: the description of each rank.
        broken: whether a rank had already launched its collective.
    """
    index = None if agreement is None else agreement.event
    where = "" if index is None else f", number {index + 1} of this step"
    who, what = "the ranks", f"the next collective{where}"
    if all(described.what == MESSAGE for described in descriptions.values()):
        who, what = name_ranks(sorted(descriptions)), "the message between them"
    alike = first_difference([described.items for described in descriptions.values()])
    differing = {
        rank: described._replace(items=described.items[alike:], first=alike)
        for rank, described in sorted(descriptions.items())
    }
    shown = _each(differing)
    first = next((described for described in differing.values() if described.items), None)
    if first is not None:
        shown += f"\n  first difference, {first.item.replace('{}', str(first.first))}:"
        for rank, described in differing.items():
            shown += f"\n    rank {rank}: {described.items[0] if described.items else '(nothing)'}"
    if advice := _advice(differing):
        shown += f"\n  {advice}"
    return PlanMismatch(
        f"{label}: {who} disagree on {what}; {_BROKEN if broken else _UNHARMED}:{shown}",
        index=index,
        descriptions={rank: "\n".join(described.lines()) for rank, described in differing.items()},
        places=_places(differing),
        broken=broken,
    )


def first_difference(parts: Sequence[Sequence[object]]) -> int:
    """Returns the first index at which the sequences differ; if they do not, the length of the shortest sequence."""
    for position, values in enumerate(zip(*parts, strict=False)):
        if len(set(values)) > 1:
            return position
    return min(len(part) for part in parts)


def _places(descriptions: Mapping[int, Description]) -> dict[int, str]:
    return {rank: described.call_site.line for rank, described in descriptions.items() if described.call_site.line}


def _each(descriptions: Mapping[int, Description]) -> str:
    return "".join(f"\n  rank {rank}: {described}" for rank, described in sorted(descriptions.items()))


# -- Advice on a mismatch ---------------------------------------------------------------------------------------------


def _advice(descriptions: Mapping[int, Description]) -> str:
    """Returns the last line of the error: the difference between the ranks, and advice; "" if there is no advice."""
    each = list(descriptions.values())
    if any(d.what.startswith("(") for d in each):  # a description has not arrived: in its place is the reason
        return ""
    but_for_rows = {d._replace(shape=(d.shape or ())[1:], call_site=_NO_SITE) for d in each}
    if len(but_for_rows) == 1 and each[0].what in ("all_gather", "gather"):
        return "if the numbers of rows may differ, pass sizes=, the number of rows of each rank"
    are_of_callbacks = all(d.kind or d.callback for d in each)
    are_first_uses = all(d.kind == "first use" for d in each)
    if are_of_callbacks and (are_first_uses or len({d.callback for d in each}) > 1):
        return _ONE_ORDER
    advice = ""
    firsts = {rank: d.items[0] for rank, d in descriptions.items() if d.items and d.items[0].shape is not None}
    if all(d.kind in ("bucket", "flush") for d in each):  # else a rank runs a different part of its program
        advice = _advice_on_settings(descriptions) or _advice_on_gradients(descriptions)
    elif len(firsts) == len(each) and len({item.name for item in firsts.values()}) == 1 < len(set(firsts.values())):
        # The ranks' lists of arrays, e.g. for the memory of buckets, differ in one array.
        advice = _difference(firsts)
    if advice:
        return advice
    odd, others = _split({rank: d.headline for rank, d in descriptions.items()})
    is_clear = len(descriptions) > 2 and bool(others)
    where = f"{name_ranks(odd)} {_verb(odd, 'differs', 'differ')} from {name_ranks(others)}" if is_clear else ""
    return ": ".join(filter(None, [where, _action(each)]))


def _action(each: Sequence[Description]) -> str:
    """Returns what the program must change; "" if the ranks run the same kind of collective on lists of arrays."""
    if len({d.kind for d in each}) == 1 and any(d.items for d in each):
        return ""
    for differing, action in (
        ({(d.kind, d.what) for d in each}, "call the same collectives in the same order on all ranks"),
        ({d.dtype for d in each}, "pass arrays of the same dtype on all ranks, for example with astype"),
        ({d.shape for d in each}, "pass arrays of the same shape on all ranks"),
        ({d.detail for d in each}, "pass the same arguments on all ranks"),
    ):
        if len(differing) > 1:
            return action
    return ""


def _advice_on_settings(descriptions: Mapping[int, Description], *, are_sizes: bool = False) -> str:
    """Returns advice if the callback's options or the numbers of local passes differ between ranks; else "".

    If `are_sizes` is True, the function compares only the options for bucket sizes; otherwise it compares all others.
    """
    by_rank = {rank: dict(d.settings) for rank, d in descriptions.items()}
    found, passes = [], ""
    for name in dict.fromkeys(name for settings in by_rank.values() for name in settings):
        values = {rank: settings.get(name) for rank, settings in by_rank.items()}
        if len(set(values.values())) == 1 or (name in _SIZES) != are_sizes:
            continue
        if name == "local_passes":
            numbers = _by_value({rank: value or "none" for rank, value in values.items()})
            passes = (
                "the ranks had different numbers of local passes before this step, but need equal numbers: " + numbers
            )
        elif None in values.values() and len(set(values.values())) == 2:
            found.append(f"{name} is set on {name_ranks([rank for rank in values if values[rank] is not None])} only")
        else:
            found.append(f"{name} differs: {_by_value({rank: value or 'unset' for rank, value in values.items()})}")
    options = f"{'; '.join(found)}: make the callback with the same options on all ranks" if found else ""
    return "; ".join(filter(None, [options, passes]))


def _advice_on_gradients(descriptions: Mapping[int, Description]) -> str:
    """Returns advice on the first gradient that differs between ranks, or that a rank has not passed to gradsync."""
    here = {rank: {item.name: item for item in d.items} for rank, d in descriptions.items()}
    known = {rank: {item.name: item for item in d.others} | here[rank] for rank, d in descriptions.items()}
    if not any(here.values()):  # every rank ends its step
        here = known
    numbers = {rank: d.first + len(d.items) + len(d.others) for rank, d in descriptions.items()}
    if (
        all(d.has_ended for d in descriptions.values())
        and len(set(numbers.values())) > 1
        and all(name[:1] == "#" for specs in known.values() for name in specs)
    ):
        return (
            f"the ranks handed over different numbers of gradients: {_by_value(numbers)}: hand over the same gradients "
            "in the same order on all ranks; if the gradients have names, this error names the missing gradient"
        )
    names = dict.fromkeys(name for specs in here.values() for name in specs)
    for name in names:
        specs = {rank: specs[name] for rank, specs in known.items() if name in specs}
        if len(set(specs.values())) > 1:
            return _difference(specs)
    if _may_be_prefixes(descriptions) and (advice := _advice_on_settings(descriptions, are_sizes=True)):
        return advice
    firsts = {rank: next(iter(specs), None) for rank, specs in here.items()}
    missing = _missing(filter(None, firsts.values()), known)
    if not missing:  # with parameters= the first gradient of a bucket may be present, and a later gradient missing
        missing = dict([*_missing(names, known).items()][:1])
    if not missing:
        if len({tuple(specs) for specs in here.values()}) == 1:
            return ""
        odd, rest = _split({rank: tuple(specs) for rank, specs in here.items()})
        where = f" on {name_ranks(odd)} from the order on {name_ranks(rest)}" if rest and len(descriptions) > 2 else ""
        return (
            f"the gradients are the same, but their order differs{where}: hand them over in the same order on all "
            "ranks, or pass parameters=... to allow any order"
        )
    if len(missing) > 1:
        at_once = _by_value({rank: name or "no gradient" for rank, name in firsts.items()})
        return (
            f"the ranks hand over different gradients here: {at_once}: use the same names in the same order, or pass "
            "parameters=... to allow any order"
        )
    [(name, ranks)] = missing.items()
    have_ended = all(descriptions[rank].has_ended for rank in ranks)
    what = f"did not hand over {name}" if have_ended else f"{_verb(ranks, 'has', 'have')} not handed over {name} yet"
    others = [rank for rank in descriptions if rank not in ranks]
    auxiliary = "did" if have_ended else _verb(others, "has", "have")
    beside = f", but {name_ranks(others)} {auxiliary}" if len(descriptions) > 2 else ""
    return (
        f"{name_ranks(ranks)} {what}{beside}: hand over the same gradients on all ranks, or pass parameters=... and "
        'missing="zero", to fill missing gradients with zeros'
    )


def _missing(names: Iterable[str], known: Mapping[int, Mapping[str, object]]) -> dict[str, list[int]]:
    """Returns, for each of the names that is missing on a rank, the ranks on which the name is missing."""
    ranks = {name: [rank for rank, specs in known.items() if name not in specs] for name in names}
    return {name: absent for name, absent in ranks.items() if absent}


def _difference(items: Mapping[int, Item]) -> str:
    """Returns the difference between items of one name, e.g. "'b2' has a different shape on rank 1 than on rank 0"."""
    dtypes = {rank: item.dtype for rank, item in items.items()}
    is_dtype = len(set(dtypes.values())) > 1
    values = dtypes if is_dtype else {rank: str(list(item.shape or ())) for rank, item in items.items()}
    what = "dtype" if is_dtype else "shape"
    odd, others = _split(values)
    where = f"a different {what} on {name_ranks(odd)} than on {name_ranks(others)}" if others else f"different {what}s"
    return f"{next(iter(items.values())).name} has {where}: {_by_value(values)}"


def _may_be_prefixes(descriptions: Mapping[int, Description]) -> bool:
    """Whether the items of every rank are equal to the first items of the longest list of items."""
    longest = max([d.items for d in descriptions.values()], key=len)
    return all(d.items == longest[: len(d.items)] for d in descriptions.values())


def _split(values: Mapping[int, object]) -> tuple[list[int], list[int]]:
    """Returns two lists: the ranks whose value is rarer, and the other ranks.

    If both values are equally frequent, the lowest rank is in the second list. If there are not exactly two different
    values, the first list has all ranks, and the second list is empty.
    """
    groups = _groups(values)
    if len(groups) != 2:
        return sorted(values), []
    first, second = groups.values()  # the first group has the lowest rank
    return (first, second) if len(first) < len(second) else (second, first)


def _groups(values: Mapping[int, object]) -> dict[object, list[int]]:
    """Returns, for each value, the ranks that have it, in ascending order."""
    groups: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def _by_value(values: Mapping[int, object]) -> str:
    """Returns each value with its ranks as text, e.g. "1.0 on ranks 0 and 2, 2.0 on rank 1"."""
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in _groups(values).items())


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many

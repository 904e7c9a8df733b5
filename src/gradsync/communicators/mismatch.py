"""PlanMismatch, the error if ranks call different collectives: each rank makes it from the descriptions of all ranks.

The message shows the first difference between the descriptions, and gives advice. The message is the same on all ranks,
because it depends only on the descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gradsync.communicators.agreement import Agreement, CallSite, Description, Item
from gradsync.errors import PlanMismatch, name_ranks

_ONE_ORDER = (
    "the ranks use different callbacks here: use them in the same order on all ranks. If the order is the same and "
    'the ranks make them at different lines or in threads, name them: gs.AllreduceCallback(..., name="generator")'
)
_SIZES = ("threshold_bytes", "first_bucket_bytes")  # ranks may differ in these, as long as their buckets are equal
_NO_SITE = CallSite()
_UNHARMED = "no data was moved"
_BROKEN = (
    "some ranks had already launched their collective, because it was the same as in the previous step: the "
    "communicator is broken, and the gradients of this step are undefined"
)


def mismatch(
    label: str, agreement: Agreement | None, descriptions: Mapping[int, Description], *, broken: bool = False
) -> PlanMismatch:
    """Returns the error that every rank raises if the ranks disagree on a collective.

    Args:
        label: this rank's name in errors, e.g. "rank 0/2".
        agreement: the Agreement that describes this rank's collective; None if this rank no longer has it.
        descriptions: the description of each rank. The attribute `first` is equal in all descriptions.
        broken: whether a rank had already launched its collective.
    """
    index = None if agreement is None else agreement.event
    where = "" if index is None else f", number {index + 1} of this step"
    alike = first_difference([described.items for described in descriptions.values()])
    differing = {
        rank: described._replace(items=described.items[alike:], first=described.first + alike)
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
        f"{label}: the ranks disagree on the next collective{where}; {_BROKEN if broken else _UNHARMED}:{shown}",
        index=index,
        descriptions={rank: "\n".join(described.lines()) for rank, described in differing.items()},
        places=_places(differing),
        broken=broken,
    )


def message_mismatch(label: str, descriptions: Mapping[int, Description]) -> PlanMismatch:
    """Returns the error that the two ranks of a message raise if they disagree on it.

    Args:
        label: this rank's name in errors.
        descriptions: the description of each of the two ranks.
    """
    first, second = sorted(descriptions)
    return PlanMismatch(
        f"{label}: ranks {first} and {second} disagree on the message between them; no data was moved:"
        f"{_each(descriptions)}",
        descriptions={rank: described.headline for rank, described in descriptions.items()},
        places=_places(descriptions),
    )


def first_difference(parts: Sequence[Sequence[object]]) -> int:
    """Returns the first index at which the sequences differ; the length of the shortest sequence if none does."""
    for position, values in enumerate(zip(*parts, strict=False)):
        if len(set(values)) > 1:
            return position
    return min(len(part) for part in parts)


def _places(descriptions: Mapping[int, Description]) -> dict[int, str]:
    return {rank: described.call_site.line for rank, described in descriptions.items() if described.call_site.line}


def _each(descriptions: Mapping[int, Description]) -> str:
    return "".join(f"\n  rank {rank}: {described}" for rank, described in sorted(descriptions.items()))


# -- Advice ----------------------------------------------------------------------------------------------------------


def _advice(descriptions: Mapping[int, Description]) -> str:
    """Returns the last line of the error: the difference between the ranks, and advice; "" if there is no advice."""
    each = list(descriptions.values())
    but_for_rows = {d._replace(shape=(d.shape or ())[1:], call_site=_NO_SITE) for d in each}
    if len(but_for_rows) == 1 and each[0].what in ("all_gather", "gather"):
        return 'if the numbers of rows may differ, pass sizes="ask" or a list of the numbers'
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
    if not advice and len(descriptions) > 2:
        odd, others = _split({rank: d.headline for rank, d in descriptions.items()})
        advice = f"{name_ranks(odd)} {_verb(odd, 'differs', 'differ')} from {name_ranks(others)}" if others else ""
    return advice


def _advice_on_settings(descriptions: Mapping[int, Description], *, are_sizes: bool = False) -> str:
    """Returns advice if the callback's options or the numbers of local passes differ between ranks; else "".

    Args:
        descriptions: the description of each rank.
        are_sizes: True compares only the options for bucket sizes; False compares all other options.
    """
    by_rank = {rank: dict(d.settings) for rank, d in descriptions.items()}
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
    """Returns advice on the first gradient that differs between ranks, or that a rank has not passed to gradsync."""
    here = {rank: {item.name: item for item in d.items} for rank, d in descriptions.items()}
    known = {rank: {item.name: item for item in d.others} | here[rank] for rank, d in descriptions.items()}
    if not any(here.values()):  # every rank ends its step
        here = known
    numbers = {rank: d.item_count for rank, d in descriptions.items()}
    are_all = all(d.has_ended and not d.is_cut for d in descriptions.values())
    if (
        are_all
        and len(set(numbers.values())) > 1
        and all(name[:1] == "#" for specs in known.values() for name in specs)
    ):
        return (
            f"the ranks handed over different numbers of gradients: {_by_value(numbers)}: hand over the same gradients "
            "in the same order on all ranks; if the gradients have names, this error says which one is missing"
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
    """Returns, for each name that is missing on a rank, the ranks on which it is missing.

    Args:
        names: the names of gradients.
        known: for each rank its gradients by name.
    """
    ranks = {name: [rank for rank, specs in known.items() if name not in specs] for name in names}
    return {name: absent for name, absent in ranks.items() if absent}


def _difference(items: Mapping[int, Item]) -> str:
    """Returns the difference of items with one name, e.g. "'b2' has a different shape on rank 1 than on rank 0"."""
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
    """Returns two lists: the ranks that differ, and the ranks from which they differ.

    If there are two values, the first list has the ranks with the rarer value. If both values are equally frequent, the
    lowest rank is in the second list. If there are more than two values, the first list has all ranks, and the second
    list is empty.
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

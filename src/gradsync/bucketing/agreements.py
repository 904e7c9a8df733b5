"""Checks that all ranks use the same callback, and run the same events in each step.

The events of a step are the reductions of its buckets, and its flush. This module makes an Agreement for each event: a
digest, which the ranks compare, and a description, which they exchange if the digests differ.

If ranks used their callbacks in different orders, they would average the gradients of different models. So the ranks
compare callbacks at the first use of a callback on a communicator. The ranks compare the name that the program gave the
callback or, if it has no name, the lines of code that constructed it. Afterwards the digest of each event contains the
callback's number on that communicator.

The communicator numbers callbacks in the order of first use, not of construction: one rank may construct a callback
that it never uses. The number alone is not enough: if rank 0 first uses callback A and rank 1 first uses callback B,
both callbacks get number 1.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

from gradsync.bucketing.plan import Bucket, list_of_names
from gradsync.communicators.agreement import Agreement, Description, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import get_world
from gradsync.diagnostics import names_text
from gradsync.errors import InvalidArgument, callers, shown, size_text
from gradsync.reduction import ReduceOp


class StepEvents:
    """Makes an Agreement for each event of a step. A step that repeats the last step reuses the last step's Agreements.

    Args:
        op: the operator of the reduction: sum or mean.
        settings: the options on which the ranks must agree, by name, with their values as text; a flag has the value
            "".
        threshold_bytes: the option, which may differ between ranks as long as their buckets are equal.
    """

    def __init__(self, op: ReduceOp, settings: Mapping[str, str], threshold_bytes: object) -> None:
        self._reduce_op = op
        self._threshold_bytes = threshold_bytes
        self._callback: KnownCallback | None = None
        self._index = 0
        self.change_settings(settings)

    def change_settings(self, settings: Mapping[str, str]) -> None:
        """Changes the settings of later events; call it between steps."""
        self._op = ", ".join([self._reduce_op.value, *[f"{name} {each}".rstrip() for name, each in settings.items()]])
        size = "" if self._threshold_bytes is None else f", threshold_bytes {self._threshold_bytes}"
        self._shown_options = self._op + size
        self._known: list[tuple[Bucket | Flush, Agreement]] = []  # the events of the last step

    def change_callback(self, callback: KnownCallback | None) -> None:
        """Includes a callback, or no callback, in the digests of later events."""
        self._callback = callback
        self._known = []

    def of_callback(self, agreement: Agreement) -> Agreement:
        """Includes the callback in an Agreement; before the callback's first use, returns the Agreement unchanged."""
        return agreement if self._callback is None else self._callback.include_in(agreement)

    def begin_step(self) -> None:
        """Begins a step."""
        self._index = 0

    def next(self, event: Bucket | Flush) -> Agreement:
        """Returns the Agreement that the ranks compare before the next event of the step."""
        index = self._index
        if index == 0 and isinstance(event, Flush):  # an empty step leaves the known events as they are
            return self._make(event, 0)
        self._index = index + 1
        if index < len(self._known):
            known, agreement = self._known[index]
            if known is event or known == event:
                return agreement
        agreement = self._make(event, index)
        self._known[index:] = [(event, agreement)]
        return agreement

    def _make(self, event: Bucket | Flush, index: int) -> Agreement:
        content = event.specs if isinstance(event, Bucket) else tuple(event)
        return self.of_callback(
            Agreement(
                digest_of("gradients", index, self._op, content),
                partial(_describe, event, self._op, self._shown_options),
                index,
                partial(_summarise, event, self._op),
            )
        )


class Flush(NamedTuple):
    """The end of a step.

    Attributes:
        gradients: the number of gradients in the step.
        missing: the names of the parameters for which this rank has no gradient.
    """

    gradients: int
    missing: tuple[str, ...] = ()


def _describe(event: Bucket | Flush, op: str, options: str) -> Description:
    if isinstance(event, Flush):
        without = f", without a gradient for {list_of_names(event.missing)}" if event.missing else ""
        return Description(f"flush ({op}) after {_count(event.gradients, 'gradient')}{without}", options=options)
    lines = tuple(map(str, event.specs))
    what = f"all_reduce ({op}) of a bucket of {_count(len(lines), 'gradient')}, {event.size_bytes} bytes"
    return Description(what, lines, options=options)


def _summarise(event: Bucket | Flush, op: str) -> str:
    if isinstance(event, Flush):
        return f"flush({op}) after {_count(event.gradients, 'gradient')}"
    names = names_text([spec.label for spec in event.specs])
    return f"all_reduce({op}) {event.dtype} {size_text(event.size_bytes)} {names}"


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"


# -- Which callback it is --------------------------------------------------------------------------------------------

_FIRST_USE = "the first use of a callback"
_MOST_CHARACTERS = 80  # in a callback's name


class KnownCallback(NamedTuple):
    """The number and name of a callback on a communicator. All ranks have checked that they use the same callback.

    This object keeps neither the callback nor the communicator alive.

    Attributes:
        number: the callback's number on the communicator, from 1, in the order of first use; the same on all ranks.
        name: the name that the program gave the callback, or None.
        made_at: the line of this rank's program that constructed the callback.
        communicator: a weak reference to the communicator.
    """

    number: int
    name: str | None
    made_at: str
    communicator: ReferenceType[Communicator]

    def include_in(self, agreement: Agreement) -> Agreement:
        """Returns a copy of an Agreement; its digest and texts also include this callback."""
        return agreement._replace(
            digest=digest_of(agreement.digest, self.number),
            describe=partial(self._describe, agreement),
            summarise=partial(self._summarise, agreement),
        )

    def _shown(self) -> str:
        """Returns the callback's name in quotes, or its number; "" if the communicator has only one callback."""
        if self.name is not None:
            return repr(self.name)
        communicator = self.communicator()
        others = [] if communicator is None else [each.known_on(communicator) for each in _alive(communicator)]
        return str(self.number) if self.number > 1 or any(each is not self for each in others) else ""

    def _describe(self, agreement: Agreement) -> Description:
        described, shown = agreement.describe(), self._shown()
        which = f" (callback {shown}, made at {self.made_at})" if shown else ""
        return described._replace(headline=f"{described.headline}{which}", callback=f"number {self.number}")

    def _summarise(self, agreement: Agreement) -> str:
        shown = self._shown()
        return f"{agreement.headline()}{f' (callback {shown})' if shown else ''}"


class CallbackIdentity:
    """Identifies one callback by its name, or by the lines of code that constructed it.

    Only the callback's Step keeps a reference to this object, so the callback and this object have the same lifetime.

    Args:
        name: the name that the program gave the callback, or None.
        group: the callback's communicator; None means the world communicator.

    Raises:
        InvalidArgument: the name is not a string of printable characters, or is too long.
    """

    def __init__(self, name: str | None, group: Communicator | None) -> None:
        if name is not None and (
            not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS or not name.isprintable()
        ):
            raise InvalidArgument(
                f"AllreduceCallback needs name as text of 1 to {_MOST_CHARACTERS} printable characters, or None, got "
                f"{shown(name)}"
            )
        self._name = name
        self._group = group
        self._stack = tuple([each.short() for each in callers()]) or ("an unknown line",)
        # Each thread has its own count: threads make callbacks in any order, so a common count would differ between
        # ranks.
        counts = _made.counts.setdefault(_made if group is None else group, Counter())
        self._number = counts[self._stack]  # how many unnamed callbacks this thread constructed at these lines before
        counts[self._stack] += name is None
        identity = (self._stack, self._number) if name is None else name
        self._digest = digest_of(identity) >> 1  # 63 bits, because ranks share signed 64-bit numbers
        self._known: WeakKeyDictionary[Communicator, KnownCallback] = WeakKeyDictionary()
        _living[next(_serials)] = self

    def known_on(self, communicator: Communicator) -> KnownCallback | None:
        """Returns the callback's number and name on a communicator; None before the callback's first use there."""
        return self._known.get(communicator)

    def agree(self, communicator: Communicator) -> KnownCallback:
        """Checks that the other ranks use the same callback.

        Every rank must call it, before the callback's first use on a communicator.

        Raises:
            PlanMismatch: ranks use different callbacks; all ranks raise this error.
            RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
        """
        agreement = self._agreement(_FIRST_USE, self._name)
        digests = {digest for [digest] in communicator._share_numbers(_FIRST_USE, [self._digest], agreement)}
        if len(digests) > 1:  # constructed at different lines, perhaps on purpose, or used in different orders
            holds = self._holds_other(digests - {self._digest}, communicator)
            agreement = self._agreement(_FIRST_USE, "made at different lines")
            if any(held for [held] in communicator._share_numbers(_FIRST_USE, [int(holds)], agreement)):
                # Raises PlanMismatch, because the digests differ.
                communicator._agree(self._agreement(_FIRST_USE, self._digest, shows_stack=True))
        number = _used[communicator] = _used.get(communicator, 0) + 1
        known = KnownCallback(number, self._name, _line_of(self._stack[0]), ref(communicator))
        self._known[communicator] = known
        return known

    def _agreement(self, *parts: object, shows_stack: bool = False) -> Agreement:
        """Returns the Agreement of the first use; its texts show the line that constructed the callback.

        Args:
            parts: the parts on which the ranks must agree.
            shows_stack: whether the description also shows the calls that led to this line.
        """
        name = "" if self._name is None else f" {self._name!r}"
        what = f"the first use of {'callback' if name else 'a callback'}{name} (made at {self._stack[0]})"
        lines = [f"called from {line}" for line in self._stack[1:]]
        lines.append(f"number {self._number + 1} of the callbacks made at this line")
        shown = tuple(lines) if shows_stack and not name else ()
        description = Description(what, shown, callback=f"{self._digest:x}")
        which = f"callback{name}" if name else "the callback"
        summary = f"the first step of {which} made at {_line_of(self._stack[0])}"
        return Agreement(digest_of(*parts), lambda: description, summarise=lambda: summary)

    def _holds_other(self, digests: set[int], communicator: Communicator) -> bool:
        """Whether this rank has a callback with one of the given digests that was not used on the communicator yet."""

        def is_there() -> bool:
            return any(each._digest in digests and each.known_on(communicator) is None for each in _alive(communicator))

        if is_there():
            gc.collect()  # deletes callbacks that are only in reference cycles
        return is_there()

    def is_for(self, communicator: Communicator) -> bool:
        """Whether the callback reduces gradients on a communicator."""
        return self._group is communicator or (self._group is None and get_world() is communicator)


class _Made(threading.local):
    """Counts the unnamed callbacks that this thread has constructed.

    Attributes:
        counts: for each communicator, the number of callbacks by the lines of code that constructed them. For the world
            communicator, the key is this object.
    """

    def __init__(self) -> None:
        self.counts: WeakKeyDictionary[object, Counter[tuple[str, ...]]] = WeakKeyDictionary()


_made = _Made()
_living: WeakValueDictionary[int, CallbackIdentity] = WeakValueDictionary()
_serials = count()
_used: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()  # the number of callbacks used on a communicator


def _alive(communicator: Communicator) -> list[CallbackIdentity]:
    """Returns the identities of a communicator's live callbacks. Any thread may call it."""
    found = [reference() for reference in _living.valuerefs()]
    return [each for each in found if each is not None and each.is_for(communicator)]


def _line_of(call: str) -> str:
    """Returns the part "file:line" of the text "file:line in function"."""
    return call.partition(" in ")[0]

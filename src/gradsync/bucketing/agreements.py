"""Checks that all ranks use the same callback, and run the same events in each step.

The events of a step are the reductions of its buckets, and its flush. Before an event, the ranks compare an Agreement:
a digest and a description of the event.

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
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, WeakValueDictionary, ref

from gradsync.bucketing.plan import Bucket, GradientSpec, list_of_names
from gradsync.communicators.agreement import Agreement, Description, Item, StepSoFar, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import get_world
from gradsync.diagnostics import names_text
from gradsync.errors import InvalidArgument, callers, shown, size_text
from gradsync.reduction import ReduceOp

#: A function that returns three values: this rank's gradients that are not reduced yet; whether this rank has handed
#: over all gradients of the step; and the options for the size of a bucket, by name.
Arrived = Callable[[], tuple[list[GradientSpec], bool, dict[str, str]]]


_Settings = tuple[tuple[str, str], ...]


class StepEvents:
    """Makes an Agreement for each event of a step. A step that repeats the last step reuses its Agreements.

    Args:
        op: the operator of the reduction: sum or mean.
        settings: the options on which the ranks must agree, by name, with their values as text; a flag has the value
            "".

    Attributes:
        local_passes: the number of local passes (backward passes without communication) before this step.
        arrived: a weak reference to the method of Step that returns the state of the step, for errors; see Arrived.
            None: the errors do not show this state.
    """

    arrived: WeakMethod[Arrived] | None = None

    def __init__(self, op: ReduceOp, settings: Mapping[str, str] | None = None) -> None:
        self._reduce_op = op
        self._callback: KnownCallback | None = None
        self._others: dict[int, Agreement] = {}
        self.local_passes = 0
        self._index = 0
        self.change_settings(settings or {})

    def change_settings(self, settings: Mapping[str, str]) -> None:
        """Changes the settings of later events; call it between steps."""
        op = self._reduce_op.value
        self._op = ", ".join([op, *[f"{name} {value}".rstrip() for name, value in settings.items()]])
        self._settings = (("reduce_method", op), *settings.items())
        # The events of the last step, each with the number of local passes before it.
        self._known: list[tuple[Bucket | _Flush, int, Agreement]] = []

    def change_callback(self, callback: KnownCallback | None) -> None:
        """Includes a callback, or no callback, in the digests of later events."""
        self._callback = callback
        self._known = []
        self._others = {}

    def of_callback(self, agreement: Agreement) -> Agreement:
        """Returns a copy of an Agreement that includes the callback; for collectives outside the steps."""
        if self._callback is None:
            return agreement
        known = self._others.get(agreement.digest)
        if known is None:
            known = self._others[agreement.digest] = self._callback.include_in(agreement)
        return known

    def begin_step(self, passes: int = 0) -> None:
        """Begins a step that follows `passes` local passes."""
        self._index = 0
        self.local_passes = passes

    def bucket(self, bucket: Bucket) -> Agreement:
        """Returns the Agreement that the ranks compare before they reduce a bucket, the next event of the step."""
        index = self._index
        if index < len(self._known):
            known, passes, agreement = self._known[index]
            if known is bucket and passes == self.local_passes:  # a repeated step has the same bucket objects
                self._index = index + 1
                return agreement
        return self._add(bucket)

    def flush(self, gradients: int, missing: tuple[str, ...] = ()) -> Agreement:
        """Returns the Agreement that the ranks compare at the end of a step.

        Args:
            gradients: the number of gradients in the step.
            missing: the names of the parameters for which this rank has no gradient.
        """
        event, index = _Flush(gradients, missing), self._index
        if index == 0:  # an empty step leaves the known events as they are
            return self._make(event, 0)
        if index < len(self._known):
            known, passes, agreement = self._known[index]
            if known == event and passes == self.local_passes:
                self._index = index + 1
                return agreement
        return self._add(event)

    def _add(self, event: Bucket | _Flush) -> Agreement:
        """Makes the Agreement of an event that differs from the last step's event at the same index."""
        index, self._index = self._index, self._index + 1
        agreement = self._make(event, index)
        self._known[index:] = [(event, self.local_passes, agreement)]
        return agreement

    def _make(self, event: Bucket | _Flush, index: int) -> Agreement:
        of_it = (event, self._op, self.local_passes)
        content = event.specs if isinstance(event, Bucket) else tuple(event)
        digest = digest_of("gradients", index, self._op, content, self.local_passes)
        describe, summarise = _TEXTS[type(event)]
        passes = (("local_passes", str(self.local_passes)),) if self.local_passes else ()
        agreement = Agreement(
            digest,
            partial(describe, *of_it, self._settings + passes),
            index,
            partial(summarise, *of_it),
            so_far=None if self.arrived is None else partial(_so_far, self.arrived, event),
        )
        return agreement if self._callback is None else self._callback.include_in(agreement)


class _Flush(NamedTuple):
    """The end of a step, with the number of its gradients and the names of parameters without a gradient."""

    gradients: int
    missing: tuple[str, ...]


def _so_far(arrived: WeakMethod[Arrived], event: Bucket | _Flush) -> StepSoFar:
    """Returns the state of this rank's step at an event, for the error of a mismatch."""
    method = arrived()
    if method is None:
        return StepSoFar()
    specs, has_ended, sizes = method()
    own = {spec.name for spec in event.specs} if isinstance(event, Bucket) else set()
    return StepSoFar(tuple([spec.item for spec in specs if spec.name not in own]), has_ended, tuple(sizes.items()))


def _describe_bucket(bucket: Bucket, op: str, passes: int, settings: _Settings) -> Description:
    items = tuple([spec.item for spec in bucket.specs])
    of_what = f"{_count(len(items), 'gradient')}, {bucket.size_bytes} bytes"
    what = f"all_reduce ({op}) of a bucket of {of_what}{_after(passes)}"
    return Description(what, items=items, item="gradient {} of the bucket", kind="bucket", settings=settings)


def _summarise_bucket(bucket: Bucket, op: str, _passes: int) -> str:
    names = names_text([spec.label for spec in bucket.specs])
    return f"all_reduce({op}) {bucket.dtype} {size_text(bucket.size_bytes)} {names}"


def _describe_flush(flush: _Flush, op: str, passes: int, settings: _Settings) -> Description:
    without = f", without one for {list_of_names(flush.missing)}" if flush.missing else ""
    what = f"flush ({op}) after {_count(flush.gradients, 'gradient')}{without}{_after(passes)}"
    return Description(what, kind="flush", settings=settings)


def _summarise_flush(flush: _Flush, op: str, _passes: int) -> str:
    return f"flush({op}) after {_count(flush.gradients, 'gradient')}"


_TEXTS: dict[type, Any] = {
    Bucket: (_describe_bucket, _summarise_bucket),
    _Flush: (_describe_flush, _summarise_flush),
}


def _after(passes: int) -> str:
    return f", after {_count(passes, 'local pass', 'local passes')}" if passes else ""


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


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
        used: a list with one element: the number of callbacks that were used on the communicator. All callbacks of the
            communicator share this list.
        communicator: a weak reference to the communicator.
    """

    number: int
    name: str | None
    made_at: str
    used: list[int]
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
        has_others = self.used[0] > 1 or (
            communicator is not None and any(each.is_other(self.number, communicator) for each in _alive())
        )
        return str(self.number) if has_others else ""

    def _describe(self, agreement: Agreement) -> Description:
        return agreement.describe()._replace(callback=self._shown(), made_at=self.made_at)

    def _summarise(self, agreement: Agreement) -> str:
        shown = self._shown()
        return f"{agreement.headline()}{f' (callback {shown})' if shown else ''}"


class CallbackIdentity:
    """Identifies one callback by its name, or by the lines of code that constructed it.

    Only the callback refers to this object, so both have the same lifetime.

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
        self._number = 0 if name is not None else _made.count(group, self._stack)
        identity = (self._stack, self._number) if name is None else name
        self._digest = digest_of(identity) >> 1  # 63 bits, because ranks share signed 64-bit numbers
        self._known: WeakKeyDictionary[Communicator, KnownCallback] = WeakKeyDictionary()
        _living[next(_serials)] = self

    def known_on(self, communicator: Communicator) -> KnownCallback | None:
        """Returns the callback's number and name on a communicator; None before the callback's first use there."""
        return self._known.get(communicator)

    def agree(self, communicator: Communicator) -> KnownCallback:
        """Checks that the other ranks use the same callback.

        Collective; runs before the callback's first use on a communicator.

        Raises:
            PlanMismatch: ranks use different callbacks; all ranks raise it.
            RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
        """
        agreement = self._agreement(_FIRST_USE, self._name)
        digests = {digest for [digest] in communicator._share_numbers(_FIRST_USE, [self._digest], agreement)}
        if len(digests) > 1:  # constructed at different lines, perhaps on purpose, or used in different orders
            holds = self._holds_other(digests - {self._digest}, communicator)
            agreement = self._agreement(_FIRST_USE, "made at different lines")
            if any(held for [held] in communicator._share_numbers(_FIRST_USE, [int(holds)], agreement)):
                communicator._agree(self._agreement(_FIRST_USE, self._digest, shows_stack=True))  # the digests differ
        used = _used.setdefault(communicator, [0])
        used[0] += 1
        name = KnownCallback(used[0], self._name, _line_of(self._stack[0]), used, ref(communicator))
        self._known[communicator] = name
        return name

    def _agreement(self, *parts: object, shows_stack: bool = False) -> Agreement:
        stack = self._stack if shows_stack else self._stack[:1]
        describe = partial(_describe, self._name, stack, self._number if shows_stack else None)
        summarise = partial(_summary, self._name, self._stack)
        return Agreement(digest_of(*parts), describe, summarise=summarise)

    def _holds_other(self, digests: set[int], communicator: Communicator) -> bool:
        """Whether this rank has a callback with one of the given digests that was not used on the communicator yet."""

        def is_there() -> bool:
            others = [each for each in _alive() if each._digest in digests]
            return any(each._is_for(communicator) and each.known_on(communicator) is None for each in others)

        if is_there():
            gc.collect()  # deletes callbacks that are only in reference cycles
        return is_there()

    def is_other(self, number: int, communicator: Communicator) -> bool:
        """Whether this callback belongs to the communicator, and is not the one with the given number."""
        known = self.known_on(communicator)
        return self._is_for(communicator) and (known is None or known.number != number)

    def _is_for(self, communicator: Communicator) -> bool:
        return self._group is communicator or (self._group is None and get_world() is communicator)


class _Made(threading.local):
    """Counts the unnamed callbacks that this thread has constructed, by communicator and lines of code."""

    def __init__(self) -> None:
        self._of_world: dict[tuple[str, ...], int] = {}
        self._of_groups: WeakKeyDictionary[Communicator, dict[tuple[str, ...], int]] = WeakKeyDictionary()

    def count(self, group: Communicator | None, stack: tuple[str, ...]) -> int:
        """Returns how many callbacks were constructed at the same lines of code before, and counts one more."""
        counts = self._of_world if group is None else self._of_groups.setdefault(group, {})
        number = counts[stack] = counts.get(stack, -1) + 1
        return number


_made = _Made()
_living: WeakValueDictionary[int, CallbackIdentity] = WeakValueDictionary()
_serials = count()
_used: WeakKeyDictionary[Communicator, list[int]] = WeakKeyDictionary()


def _alive() -> list[CallbackIdentity]:
    """Returns the identities of live callbacks. Any thread may call it."""
    found = [reference() for reference in _living.valuerefs()]
    return [each for each in found if each is not None]


def _describe(name: str | None, stack: tuple[str, ...], number: int | None) -> Description:
    """Describes the first use of a callback: the line and the calls that constructed it."""
    if name is not None:
        return Description(f"the first use of callback {name!r} (made at {stack[0]})", kind="first use")
    lines = [f"called from {line}" for line in stack[1:]]
    if number is not None:
        lines.append(f"number {number + 1} of the callbacks made at this line")
    items = tuple(map(Item, lines))
    what = f"the first use of a callback (made at {stack[0]})"
    return Description(what, items=items, item="how they were made", kind="first use")


def _summary(name: str | None, stack: tuple[str, ...]) -> str:
    return f"the first step of {'the callback' if name is None else f'callback {name!r}'} made at {_line_of(stack[0])}"


def _line_of(call: str) -> str:
    """Returns the part "file:line" of the text "file:line in function"."""
    return call.partition(" in ")[0]

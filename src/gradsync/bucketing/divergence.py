"""Do all ranks have the same parameters? They compare digests before the first two steps, and every so many.

Gradients are averaged, parameters are not: a rank that begins with other values, or makes another update, trains a
model of its own, and no gradient shows it. The ranks can compare only what a callback knows as arrays. Each rank by
itself sees one more mistake in the first step: an update inside of the block, by gradients that are not averaged yet.

The digests of ResNet-50's parameters (161 arrays, 102 MB) take 18 ms of a core of an AMD EPYC VM (NumPy 2.4; the least
time.process_time() of 15 calls of ArrayKind.digest for each): every 1000 steps, that is 0.02 % of steps of 79 ms.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np

from gradsync.communicators import world
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of, runs_beside_host
from gradsync.errors import PlanMismatch

_log = logging.getLogger("gradsync")
_WHAT = "comparison of the parameters' values"
#: How the flight recorder's lines begin for what gives all ranks the same values, or compares them.
_SHARING = ("broadcast", "bcast_list_", "objects.broadcast", "check_consistency", _WHAT)
_UNKNOWN = 0  # in place of a digest
_told: WeakSet[Communicator] = WeakSet()  # where nothing was broadcast; told once
#: The NumPy arrays that were broadcast before the first step, by id.
_broadcast: WeakKeyDictionary[Communicator, dict[int, ref[Any]]] = WeakKeyDictionary()


class Parameter(NamedTuple):
    """A parameter of the step.

    Attributes:
        name: the same on all ranks.
        array: its values; None, or something that is no array, if they are not known.
        gradient: this step's, as a native array; None if it has not been handed over.
    """

    name: str
    array: Any
    gradient: Any


class Divergence:
    """Compares the parameters of one callback on one communicator.

    Args:
        check_every: how many steps from one comparison to the next; 0: none.
        raises: whether values that differ are an error, and not a warning.
        communicator: whose ranks compare.
    """

    def __init__(self, check_every: int, raises: bool, communicator: Communicator) -> None:
        self._every = check_every if communicator.world_size > 1 else 0
        self._raises, self._communicator = raises, communicator
        self._steps = 0  # that have ended
        self._compared_at = -1  # the steps that had ended at the last comparison
        self._equal_at: int | None = None  # the same for the last comparison that found no difference
        self._digests: list[int] = []  # of this rank, at the last comparison
        self._updates = 0  # since then
        self._has_warned = self._has_told = False
        self._is_unsure = False  # whether the ranks began with the same parameters; told at the end of the step
        self._has_gradients = False  # `parameters=` names the gradients' arrays, not the parameters
        self._before: list[tuple[Any, int]] = []  # what may be parameters, with digests from the first step's beginning
        self._made_before = 0  # the steps of all callbacks that had ended then

    @property
    def is_due(self) -> bool:
        """Whether the ranks compare their parameters in this step; equal on all ranks."""
        # The second step shows what the first has made of states that differ, such as a momentum that nobody broadcast.
        # (Not on a GPU, where the host has to wait for it.)
        is_second = self._steps == 1 and not runs_beside_host(self._communicator)
        is_time = self._compared_at < 0 or is_second or self._steps % (self._every or 1) == 0
        return self._every > 0 and is_time and self._compared_at != self._steps

    def begin_step(self, parameters: Any) -> None:
        """Looks at the parameters, when a step has its first gradient; in the first step only.

        Args:
            parameters: the callback's option. If it has no arrays, those that were broadcast may be the parameters.
        """
        if self._steps or not self._every or runs_beside_host(self._communicator):
            return
        arrays = arrays_of(self._communicator)
        given = parameters.values() if isinstance(parameters, Mapping) else parameters or ()
        known = [array for array in given if type(array) is np.ndarray]
        if not known:
            refs = [found for each in _and_world(self._communicator) for found in _broadcast.get(each, {}).values()]
            known = [array for found in refs if (array := found()) is not None]
        self._before = [(array, arrays.digest(array)) for array in known]
        self._made_before = self._made()

    def end_step(self, *, is_used: bool) -> None:
        """Counts a step that all ranks have ended; `is_used`: with results that change the parameters."""
        self._steps += 1
        self._updates += is_used
        if self._is_unsure:
            self._is_unsure = False
            self._tell_of_no_broadcast()

    def compare(self, parameters: Sequence[Parameter], step: Agreement, *, is_fixed: bool) -> None:
        """Compares the parameters' values. Every rank must call it.

        Args:
            parameters: those of the step, in the plan's order.
            step: the agreement on the step.
            is_fixed: whether the callback has the option `parameters`: then some ranks may know arrays, others shapes.

        Raises:
            PlanMismatch: the steps differ; ranks name the same parameters in another order; or values differ, and this
                is an error. All ranks raise it.
            RankFailed, CollectiveTimeout, CommunicatorClosed: the exchange has failed.
        """
        communicator = self._communicator
        is_told = self._compared_at >= 0 or _was_shared(communicator)
        is_early = self._was_early(parameters)
        mine = self._digests_of(parameters)
        rows: list[list[int]] = [[]]
        if is_fixed or any(each.array is not None for each in parameters):
            agreement = Agreement(digest_of(_WHAT, step.digest), step.describe, summarise=lambda: _WHAT)
            rows = communicator.share_numbers(_WHAT, mine, agreement)
        known = [at for at, of_ranks in enumerate(zip(*rows, strict=True)) if all(of_ranks)]
        different = [at for at in known if any(row[at] != rows[0][at] for row in rows)]
        if different:
            self._check_order([each.name for each in parameters], different, rows)
            self._report(parameters, different, len(known), rows, is_early=is_early)
        elif known:
            self._equal_at, self._has_warned = self._steps, False
        else:
            self._is_unsure = not is_told
            if is_early and not communicator.rank:
                _log.warning(
                    "%s: arrays that were broadcast, of the gradients' shapes, were changed inside the block, before "
                    "the gradients were averaged: if they are the parameters, each rank trains with its own. Update "
                    "them after the block, from sync.results(); check_every=0 if that is meant",
                    communicator.label,
                )
        self._compared_at = self._steps
        if any(mine) and mine == self._digests and self._updates:
            if self._updates == self._steps == 1:  # the first rate may be 0
                return
            self._tell_of_no_change()
        self._digests, self._updates = mine, 0

    def _was_early(self, parameters: Sequence[Parameter]) -> bool:
        """Whether all parameters have changed since the first step's first gradient.

        What was broadcast may be something else, such as the statistics of a layer, which do change in the block. So
        for each gradient an array of its shape must have changed. And a step of another callback may have ended in the
        block: those that changed may be its parameters, such as a discriminator's.
        """
        arrays, before, self._before = arrays_of(self._communicator), self._before, []
        changed = [array for array, digest in before if arrays.digest(array) != digest]
        gradients = [each.gradient for each in parameters if each.gradient is not None]
        ranges = sorted(arrays.byte_bounds(each) for each in gradients if each.size) if changed else []
        begins, ends = [begin for begin, _ in ranges], list(accumulate((end for _, end in ranges), max))

        def is_apart(array: Any) -> bool:  # from all gradients: there may be thousands of both
            begin, end = arrays.byte_bounds(array)
            below = bisect_left(begins, end)
            return below == 0 or ends[below - 1] <= begin

        shapes = Counter(each.shape for each in changed if is_apart(each))
        is_own = self._made() == self._made_before
        return is_own and bool(shapes) and not Counter(each.shape for each in gradients) - shapes

    def _made(self) -> int:
        return sum(each.completed_steps for each in _and_world(self._communicator))

    def _digests_of(self, parameters: Sequence[Parameter]) -> list[int]:
        """Returns each parameter's digest, or _UNKNOWN.

        Some arrays tell nothing of the parameter's values. The program may have replaced a read-only one, as JAX's are.
        And an array that shares memory with a gradient is the gradient, which was passed for its shape.
        """
        if self._has_gradients or any(_share_memory(each.array, each.gradient) for each in parameters):
            self._has_gradients = True
            return [_UNKNOWN] * len(parameters)
        arrays, digests = arrays_of(self._communicator), []
        for each in parameters:
            native = None
            if hasattr(each.array, "dtype"):
                native = self._communicator.native_array(each.array, f"parameter {each.name}")
            if native is None or not arrays.writeable(native):
                digests.append(_UNKNOWN)
            else:
                digest = arrays.digest(native) or 1
                digests.append(digest - 2**64 if digest >= 2**63 else digest)  # the exchange is of signed numbers
        return digests

    def _check_order(self, names: Sequence[str], different: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Raises PlanMismatch if two ranks have the same values, each only once, under each other's names."""
        unique = []
        for row in rows:
            counts = Counter(row)
            unique.append({row[at]: at for at in different if counts[row[at]] == 1})
        for rank, theirs in enumerate(unique):
            if rank and theirs and theirs.keys() == unique[0].keys() and theirs != unique[0]:
                at = next(at for at in different if rows[0][at] in theirs and theirs[rows[0][at]] != at)
                label, ranks = self._communicator.label, self._communicator.ranks
                raise PlanMismatch(
                    f"{label}: the ranks name the same parameters in another order: rank {ranks[rank]} has the values "
                    f"of rank {ranks[0]}'s {names[at]} under {names[theirs[rows[0][at]]]}. Their gradients would be "
                    "mixed: name each parameter alike on all ranks, in the same order in parameters=",
                    descriptions={ranks[0]: names[at], ranks[rank]: names[theirs[rows[0][at]]]},
                )

    def _report(
        self,
        parameters: Sequence[Parameter],
        different: Sequence[int],
        count: int,
        rows: Sequence[Sequence[int]],
        *,
        is_early: bool,
    ) -> None:
        """Warns of values that differ, once, or raises PlanMismatch."""
        communicator = self._communicator
        first, name = rows[0], parameters[different[0]].name
        other = next(rank for rank, row in enumerate(rows) if row[different[0]] != first[different[0]])
        which = (
            f"The first parameter that differs is {name}: rank {communicator.ranks[other]} has other values than rank "
            f"{communicator.ranks[0]}; {len(different)} of {count} arrays differ. Gradients are averaged, parameters "
            "are not: "
        )
        if is_early:
            text = "the parameters differ between the ranks, for they were changed inside the block, before its "
            text += "gradients were averaged. " + which + "update them after the block, from sync.results()"
        elif self._steps == 0:
            text = "the parameters differ between the ranks before the first step. " + which
            text += "call gs.bcast_list_(arrays, root=0) with all parameters before the first step. Or was a parameter "
            text += "changed inside the block? Update after it"
        else:
            since = "" if self._equal_at is None else f"they were equal before step {self._equal_at + 1}, and "
            text = f"the parameters have diverged: {since}they differ before step {self._steps + 1}. " + which
            text += "see that all ranks make the same updates, from the same results, or broadcast them again"
        if self._raises:
            raise PlanMismatch(
                f"{communicator.label}: {text}",
                descriptions={
                    rank: f"{name} with digest {row[different[0]] % 2**64:016x}"
                    for rank, row in zip(communicator.ranks, rows, strict=True)
                },
            )
        if not self._has_warned and not communicator.rank:
            _log.warning("%s: %s", communicator.label, text)
        self._has_warned = True

    def _tell_of_no_broadcast(self) -> None:
        communicator = self._communicator
        if not communicator.rank and communicator not in _told:
            _told.add(communicator)
            began, since, call = "began with", "before the first step", "gs.broadcast_tree(parameters)"
            of_list = "gs.bcast_list_(arrays)"
            if communicator is not world.current:  # such as one of gs.from_mpi()
                call, of_list = "gs.broadcast_tree(parameters, communicator=comm)", "gs.bcast_list_(arrays, group=comm)"
            elif communicator.is_rebuilt:
                began, since = "have", "since gs.rebuild()"
                call = "gs.broadcast_tree(state, root=comm.most_advanced)"
            _log.warning(
                "%s: nobody knows whether all ranks %s the same parameters: nothing was broadcast %s, and the callback "
                "has no arrays to compare. Call %s or %s before the first step, or pass "
                "parameters={name: array}; check_every=0 if they are equal anyway",
                communicator.label,
                began,
                since,
                call,
                of_list,
            )

    def _tell_of_no_change(self) -> None:
        if not self._communicator.rank and not self._has_told:
            _log.warning(
                "%s: no parameter has changed in %d steps, so their comparison tells nothing. It sees the arrays that "
                "the callback was given: update them in place (w -= lr * g, not w = w - lr * g), or pass check_every=0",
                self._communicator.label,
                self._updates,
            )
        self._has_told = True


def note_broadcast(communicator: Communicator, natives: Sequence[Any]) -> None:
    """Remembers what a program broadcasts before its first step: most likely its parameters."""
    if not communicator.has_begun:
        earlier = {key: found for key, found in _broadcast.get(communicator, {}).items() if found() is not None}
        _broadcast[communicator] = earlier | {id(each): ref(each) for each in natives if type(each) is np.ndarray}


def _was_shared(communicator: Communicator) -> bool:
    """Whether something was broadcast or compared on a communicator, or on the world; True if that is forgotten."""
    for each in _and_world(communicator):
        entries = each.recorder.entries()
        if each.recorder.begun > len(entries) or any(entry.what.headline().startswith(_SHARING) for entry in entries):
            return True
    return False


def _and_world(communicator: Communicator) -> set[Communicator]:
    return {communicator, world.current or communicator}


def _share_memory(array: Any, gradient: Any) -> bool:
    if array is gradient:
        return array is not None
    return isinstance(array, np.ndarray) and isinstance(gradient, np.ndarray) and np.may_share_memory(array, gradient)

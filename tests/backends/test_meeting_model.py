"""All interleavings of three ranks that meet, as _kernels.c does it: publish, arrive, wake, spin or sleep, read.

Spins and yields change nothing, and are no steps. In the model, a sleep does not end by itself: a wake-up that is lost
is then a rank that sleeps for ever. Only where a rank has aborted, sleepers wake up, to look for failures. The model
can fail: it finds each fault that the tests plant.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from gradsync.communicators.shared_memory.memory import SLOTS

RANKS = range(3)
WRITING = -1


class Model:
    """What a rank does next, and what it must see.

    A state is a tuple: the ranks' (position, round, rank it waits for or reads, arrival it has seen), then the shared
    words: arrivals, sleepers, digests by parity, slots, and the rounds in which ranks have aborted, or 0.

    Args:
        odd_one: the rank that brings another digest to the second round, or None.
        aborter: the rank that may abort, at any point, or None.
        fault: what to get wrong, or "".
    """

    def __init__(self, rounds, odd_one=None, aborter=None, fault=""):
        self.rounds, self.odd_one, self.aborter, self.fault = rounds, odd_one, aborter, fault
        self.slots = 1 if fault == "one slot" else SLOTS
        self.words = 1 if fault == "one digest word" else 2
        self.arrives = ["look for sleepers", "arrive"] if fault == "looks before it arrives" else ["arrive", "wake"]
        nothing = (0, 0, 0)
        self.start = (
            (("publish", 1, 0, 0),) * 3,
            *(nothing, nothing, ((0,) * self.words,) * 3, ((0,) * self.slots,) * 3, nothing),
        )

    def digest(self, rank, number):
        return 10 * number + (rank == self.odd_one and number == 2)

    def explore(self):
        """Returns in which ways the ranks can end; raises AssertionError where one sleeps for ever or reads wrongly."""
        seen, todo, ends = {self.start}, [self.start], set()
        while todo:
            state = todo.pop()
            following = [new for rank in RANKS for new in self.steps(state, rank)]
            if not following:
                ends.add(tuple(position for position, *_ in state[0]))
                assert all(position in ("done", "differs", "failed", "aborted") for position, *_ in state[0]), state
            fresh = set(following) - seen
            seen |= fresh
            todo += fresh
        return ends

    def steps(self, state, rank):
        """Yields the states after one step of a rank; none if it has ended, or sleeps."""
        ranks, arrived, sleepers, digests, slots, aborted = state
        position, number, other, glimpse = ranks[rank]
        place, odd = number % self.slots, number % self.words

        def then(position, number=number, other=other, glimpse=0, woken=False, **words):
            new = list(ranks)
            if woken:  # the kernel wakes all that sleep on this rank's arrival
                new = [("woken", *its[1:]) if its[0] == "asleep" and its[2] == rank else its for its in new]
            new[rank] = (position, number, other, glimpse)
            return (tuple(new), *(words.get(name, now) for name, now in zip(NAMES, state[1:], strict=True)))

        if position in ("done", "differs", "failed", "aborted"):
            return
        if rank == self.aborter and position != "asleep":
            yield then("aborted", aborted=put(aborted, rank, number))
        match position:
            case "publish":  # in two steps: meanwhile nobody may read it
                yield then("published", slots=put2(slots, rank, place, WRITING))
            case "published":
                words = {"slots": put2(slots, rank, place, number)}
                yield then("bring", **words)
            case "bring":
                yield then(self.arrives[0], digests=put2(digests, rank, odd, self.digest(rank, number)))
            case "look for sleepers":  # the fault
                yield then("arrive", glimpse=sleepers[rank])
            case "arrive":
                after, first = self.arrives[-1], (rank + 1) % 3
                has_looked = after == "arrive"
                woken = has_looked and glimpse > 0
                yield then(
                    "load" if has_looked else "wake", other=first, woken=woken, arrived=put(arrived, rank, number)
                )
            case "wake":
                yield then("load", woken=sleepers[rank] > 0)
            case "load":
                if arrived[other] < number:
                    yield then("count", glimpse=arrived[other])
                elif (other + 1) % 3 != rank:
                    yield then("load", other=(other + 1) % 3)
                else:
                    yield then("met", other=(rank + 1) % 3)
            case "count":
                yield then("compare", glimpse=glimpse, sleepers=put(sleepers, other, sleepers[other] + 1))
            case "compare":  # the kernel does, and lets the rank sleep, in one step
                is_late = arrived[other] != glimpse and self.fault != "sleeps without a look"
                yield then("woken" if is_late else "asleep")
            case "asleep":
                if any(aborted):
                    yield then("check")
            case "woken":
                yield then("load", sleepers=put(sleepers, other, sleepers[other] - 1))
            case "check":
                is_told = any(0 < at <= number for at in aborted)
                yield then("failed" if is_told else "woken")
            case "met":
                is_told = any(0 < at <= number for at in aborted)
                yield then("failed" if is_told else "read")
            case "read":
                its_digest = digests[other][odd]
                assert its_digest in (10 * number, 10 * number + 1), f"{state}: a digest of another round"
                assert slots[other][place] == number, f"{state}: the slot is written again"
                differs = [digests[each][odd] != self.digest(rank, number) for each in RANKS]
                if (other + 1) % 3 != rank:
                    yield then("read", other=(other + 1) % 3)
                elif any(differs):
                    yield then("differs")
                elif number == self.rounds:
                    yield then("done")
                else:
                    yield then("publish", number=number + 1)


NAMES = ("arrived", "sleepers", "digests", "slots", "aborted")


def put(values, place, value):
    return (*values[:place], value, *values[place + 1 :])


def put2(table, row, place, value):
    return put(table, row, put(table[row], place, value))


def test_no_wake_up_is_lost_and_no_slot_is_read_when_it_is_written_again():
    assert Model(rounds=4).explore() == {("done",) * 3}


@pytest.mark.parametrize("odd_one", RANKS)
def test_all_ranks_see_that_one_differs(odd_one):
    assert Model(rounds=3, odd_one=odd_one).explore() == {("differs",) * 3}


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_abort_ends_all_waits(rounds):
    ends = Model(rounds, aborter=1).explore()
    assert {first for first, _, _ in ends} == {"done", "failed"}
    assert {other for _, other, _ in ends} == {"done", "aborted"}


FAULTS = ["one slot", "one digest word", "sleeps without a look", "looks before it arrives"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_finds(fault):
    with pytest.raises(AssertionError):
        Model(rounds=3, fault=fault).explore()


# -- Which slot is free when ------------------------------------------------------------------------------------------


def accesses(kind, rank, first):
    """Yields what a rank does in a collective: (round that it has met last, writes, owner, slot's round, cell, value).

    A cell is what one rank reads, or reduces, of a slot. Chunks are those of all_reduce_large.
    """
    others = [each for each in RANKS if each != rank]
    if kind == "one round":  # all but large reductions; a move of several rounds is several of these
        yield from ((first - 1, True, rank, first, cell, "in") for cell in RANKS)
        yield from ((first, False, other, first, cell, "in") for other in others for cell in RANKS)
        return
    for k in range(kind + 2):
        met = first + k - 1
        if k >= 2:  # deliver
            yield from ((met, False, rank, met - 1, cell, "out") for cell in others)
        if k < kind:  # publish
            yield from ((met, True, rank, met + 1, cell, "in") for cell in others)
        if 1 <= k <= kind:  # reduce
            yield from ((met, False, other, met, rank, "in") for other in others)
            yield from ((met, True, other, met, rank, "out") for other in others)


def check_slots(slots):
    """Two ranks race for a cell if one writes it after the same meeting after which the other reads or writes it."""
    kinds, first, done = ["one round", 1, 2, 3, 4], 1, []
    for kind in [each for pair in itertools.product(kinds, kinds) for each in pair]:
        rounds = 1 if kind == "one round" else kind + 1
        done += [(*what, rank) for rank in RANKS for what in accesses(kind, rank, first)]
        first += rounds
    by_cell = defaultdict(list)
    for met, writes, owner, number, cell, value, rank in done:
        by_cell[owner, number % slots, cell].append((met, writes, number, value, rank))
    for whole in by_cell.values():
        for (met, writes, *_, rank), (other_met, other_writes, *_, other) in itertools.combinations(whole, 2):
            assert met != other_met or rank == other or not (writes or other_writes), "a race"
        held = None
        for _, writes, number, value, _ in sorted(whole, key=lambda each: each[0]):
            held = (number, value) if writes else held
            assert held == (number, value), "another round's values"


def test_slots_suffice_for_all_collectives_after_one_another():
    check_slots(SLOTS)
    with pytest.raises(AssertionError):
        check_slots(SLOTS - 1)

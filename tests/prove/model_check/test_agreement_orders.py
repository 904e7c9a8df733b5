"""Agreements of ranks in any interleaving, and any sequence of what ranks tell: every question is answered once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_agreement import AGREED, LAUNCHED, AgreeingBench

from gradsync.rendezvous.frames import Decision, FrameType


class PredictingRank:
    """One rank as the communicators drive it: goes ahead where it predicts, unless it was asked; asks elsewhere."""

    def __init__(self, bench: AgreeingBench, rank: int, digests: list[int], predicted: list[int | None]) -> None:
        self.bench = bench
        self.rank = rank
        self.digests = digests
        self.predicted = predicted
        self.position = 0
        self.went_ahead: set[int] = set()
        self.asked_at = -1
        self.is_waiting = False
        self.decisions: dict[int, tuple[Decision, int]] = {}
        self.is_broken = False

    @property
    def is_done(self) -> bool:
        return self.is_broken or self.position == len(self.digests)

    def hear(self) -> bool:
        """Reads the next message that has come for it; returns whether there was one."""
        inbox = self.bench.inbox.get(self.rank)
        if not inbox:
            return False
        kind, *fields = inbox.pop(0)
        if kind is FrameType.ASKED:
            position = fields[1]
            if position in self.went_ahead:
                self.bench.tell_launched(self.rank, self.digests[position], position)
            elif position >= self.position:
                self.asked_at = position
            return True
        assert kind is FrameType.REPLY
        decision, decided_at = fields[1]
        self.is_waiting = False
        self.decisions[self.position] = (Decision(decision), decided_at)
        self.is_broken = decision != AGREED
        self.position += 1
        return True

    def go_on(self) -> bool:
        """Does its next collective, if it does not wait; returns whether it did anything."""
        if self.is_waiting or self.is_done:
            return False
        digest = self.digests[self.position]
        if digest == self.predicted[self.position] and self.asked_at != self.position:
            self.went_ahead.add(self.position)
            self.position += 1
        else:
            self.is_waiting = True
            self.bench.agree(self.rank, digest, self.position)
        return True


@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_predicting_ranks_never_go_on_after_they_differ(data, world_size: int, count: int) -> None:
    common = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    predicted = data.draw(st.lists(st.none() | st.integers(0, 1), min_size=count, max_size=count))
    odd_rank = data.draw(st.integers(0, world_size - 1))
    odd_position = data.draw(st.integers(0, count))  # == count: they never differ
    bench = AgreeingBench(world_size)
    ranks = []
    for rank in range(world_size):
        digests = list(common)
        if rank == odd_rank and world_size > 1 and odd_position < count:
            digests[odd_position] = 1 - digests[odd_position]
        ranks.append(PredictingRank(bench, rank, digests, predicted))
    moves = [(rank, move) for rank in ranks for move in (rank.go_on, rank.hear)]
    for index in data.draw(st.lists(st.integers(0, len(moves) - 1), max_size=40)):
        moves[index][1]()
    while any(move() for _, move in moves):
        pass

    differ_at = odd_position if world_size > 1 else count
    for rank in ranks:
        assert rank.is_done, "a rank waits for ever"
        for position, (decision, decided_at) in rank.decisions.items():
            assert (decision is AGREED) == (position < differ_at)
            assert decided_at == (position if decision is AGREED else differ_at)
    at_difference = {rank.decisions[differ_at] for rank in ranks if differ_at in rank.decisions}
    assert len(at_difference) <= 1
    assert differ_at == count or at_difference, "nobody noticed that they differ"
    went_ahead = any(differ_at in rank.went_ahead for rank in ranks)
    assert (LAUNCHED in {decision for decision, _ in at_difference}) == went_ahead
    assert bench.open_positions() == 0
    assert bench.core.next_deadline() is None


commands = st.one_of(
    st.tuples(st.just("agree"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("passed"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.integers(1, 2000)),
    st.tuples(st.just("bye"), st.integers(0, 3)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
)


@given(st.integers(1, 4), st.lists(commands, max_size=40))
def test_any_sequence_answers_every_question_once(world_size: int, script: list[tuple]) -> None:
    bench = AgreeingBench(world_size)
    present = set(range(world_size))
    open_requests: dict[int, tuple[int, int]] = {}  # sequence -> rank, position
    reported: dict[tuple[int, int], set[int]] = {}  # rank, position -> every digest that it ever reported there

    def collect() -> None:
        decisions: dict[int, set[tuple[Decision, int]]] = {}
        for rank in range(world_size):
            for kind, *fields in bench.take(rank):
                if kind is FrameType.ASKED or (kind is FrameType.FAILED and fields[0] == 0):
                    continue
                asker, position = open_requests.pop(fields[0])
                assert asker == rank
                if kind is FrameType.REPLY:
                    decision, decided_at = fields[1]
                    decisions.setdefault(position, set()).add((Decision(decision), decided_at))
        for position, said in decisions.items():
            assert len(said) == 1, "the ranks that wait together hear the same"
            [(decision, decided_at)] = said
            assert decided_at == position or (decision is LAUNCHED and decided_at < position)
            if decision is AGREED:
                assert set.intersection(*(reported[rank, position] for rank in range(world_size)))

    for name, *arguments in script:
        if name == "wait":
            bench.wait(arguments[0] / 1000)
        elif arguments[0] in present:
            rank = arguments[0]
            if name in ("agree", "passed"):
                digest, position = arguments[1:3]
                reported.setdefault((rank, position), set()).add(digest)
            if name == "agree":
                before = bench._sequence
                open_requests[before + 1] = (rank, position)
                bench.agree(rank, digest, position)
            elif name == "passed":
                bench.tell_launched(rank, digest, position)
            else:
                mine = [sequence for sequence, (asker, _) in open_requests.items() if asker == rank]
                if name == "cancel" and mine:
                    bench.cancel(rank, mine[0])
                elif name in ("bye", "lose"):
                    present.discard(rank)
                    for sequence in mine:
                        del open_requests[sequence]
                    bench.leave(rank) if name == "bye" else bench.lose(rank)
                    bench.take(rank)
                    if name == "lose":  # everybody is told of it instead
                        open_requests.clear()
        collect()
    for sequence, (asker, _) in list(open_requests.items()):
        bench.cancel(asker, sequence)
    collect()
    assert not open_requests
    assert bench.core.next_deadline() is None

"""Ranks that do not come to a collective, in the core with a virtual clock: notices, inquiries, and one verdict."""

from __future__ import annotations

import pytest
from core_bench import Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.rendezvous import stuck
from gradsync.rendezvous.connection import failure_of
from gradsync.rendezvous.frames import (
    DEATH,
    MAX_FAILURE_BYTES,
    MAX_REPORT_BYTES,
    MAX_STATUS_GROUPS,
    OF_MESSAGES,
    SILENCE,
    STUCK,
    FrameType,
    Message,
)
from gradsync.rendezvous.liveness import ProcessState

WHAT = "all_reduce #57"


class WaitingBench(Bench):
    """Ranks 0 to world_size - 1 of one generation, with pids from 1000, on the connections of their numbers."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.histories: dict[int, dict[str, list]] = {}
        self.join_all(first_pid=1000)

    def come_to(self, position: int, *ranks: int, group: str = "world") -> None:
        for rank in ranks:
            self.send(rank, FrameType.HEARTBEAT, {group: position})
        self.inbox.clear()

    def wait_in(
        self,
        rank: int,
        missing: list[int] | None = None,
        position: int = 57,
        group: str = "world",
        ranks: list[int] | None = None,
    ) -> None:
        self.send(rank, FrameType.STUCK, group, ranks, position, WHAT, 5000, missing, False)

    def miss(
        self,
        rank: int,
        missing: list[int] | None = None,
        position: int = 57,
        group: str = "world",
        ranks: list[int] | None = None,
    ) -> None:
        self.send(rank, FrameType.STUCK, group, ranks, position, WHAT, 300_000, missing, True)

    def inquiries(self, rank: int) -> int:
        return [message[0] for message in self.take(rank)].count(FrameType.STATUS_REQUEST)

    def answer(self, rank: int, text: str, position: int = 57) -> None:
        history = self.histories.pop(rank, {})
        groups = {"world", *history}
        status = {name: (position if name == "world" else 0, history.get(name, [])) for name in groups}
        self.send(rank, FrameType.STATUS, status, text)

    def verdict(self) -> tuple:
        """Returns what all ranks that are still there were told, the same: kind, missing ranks, text."""
        self.wait(0)
        present = [c for c in range(self.world_size) if c in self.core._member_of]
        told = [[m for m in self.take(connection) if m[0] is FrameType.FAILED] for connection in present]
        assert [len(messages) for messages in told] == [1] * len(present)
        assert len({messages[0] for messages in told}) == 1
        _, sequence, kind, _, _, missing, text = told[0][0]
        assert sequence == 0
        return kind, missing, text


def test_operator_is_told_once_who_waits_for_whom() -> None:
    bench = WaitingBench(4)
    bench.come_to(57, 0, 1, 3)
    bench.come_to(56, 2)
    for rank in (0, 1, 3):
        bench.wait_in(rank, [2])
        bench.wait(0.05)
    bench.wait(20)
    bench.wait_in(1, [2])
    bench.wait(20)
    assert bench.notices[:1] == [
        "ranks 0, 1 and 3 have waited 5 s in all_reduce #57 for rank 2; "
        "rank 2 (pid 1002) is running, and has begun 56 collectives"
    ]
    assert not any(" waited " in notice for notice in bench.notices[1:])


def test_server_works_out_who_is_missing_from_the_heartbeats() -> None:
    bench = WaitingBench(3)
    bench.come_to(57, 0)
    bench.come_to(58, 1)  # launched ahead, on a GPU
    bench.wait_in(0)
    bench.wait(1)
    assert bench.notices == ["ranks 0 and 1 have waited 5 s in all_reduce #57 for rank 2; rank 2 (pid 1002) is running"]


def test_wait_in_which_nobody_is_missing_says_so() -> None:
    bench = WaitingBench(2)
    bench.come_to(57, 0, 1)
    bench.wait_in(0)
    bench.wait(1)
    known = "as far as the server knows, every rank has begun it"
    assert bench.notices == [f"ranks 0 and 1 have waited 5 s in all_reduce #57; {known}"]


def in_message(rank: int, peer: int, line: int) -> str:
    return f"message(rank {rank} to rank {peer}) after #3 (int64[3] 24 bytes, at train.py:{line} in step)"


def test_ranks_that_wait_for_each_other_in_messages_are_told_with_their_lines() -> None:
    bench = WaitingBench(3)
    bench.come_to(3, 0, 1, 2)
    for _ in range(2):  # of each message, though they have one collective before them
        bench.send(0, FrameType.STUCK, "world", None, OF_MESSAGES, in_message(0, 1, 41), 5000, [1], False)
        bench.wait(0.1)
        bench.send(1, FrameType.STUCK, "world", None, OF_MESSAGES, in_message(1, 0, 50), 5010, [0], False)
        bench.wait(20)
    bench.send(0, FrameType.STUCK, "world", None, OF_MESSAGES, in_message(0, 1, 60), 5000, [1], False)
    bench.wait(1)
    told = (
        f"rank 0 has waited 5 s in {in_message(0, 1, 41)} for rank 1\n"
        f"  rank 1 has waited 5.01 s in {in_message(1, 0, 50)} for rank 0"
    )
    alone = (
        f"rank 0 has waited 5 s in {in_message(0, 1, 60)} for rank 1; "
        "rank 1 (pid 1001) is running, and has begun 3 collectives"
    )
    assert [notice for notice in bench.notices if " waited " in notice] == [told, told, alone]


def test_the_verdict_on_messages_has_all_that_reached_the_deadline() -> None:
    bench = WaitingBench(3)
    bench.come_to(3, 0, 1, 2)
    for rank, line in ((0, 41), (1, 50)):
        what = in_message(rank, 1 - rank, line)
        bench.send(rank, FrameType.STUCK, "world", None, OF_MESSAGES, what, 300_000, [1 - rank], True)
    for rank in range(3):
        bench.answer(rank, f"rank {rank} in send()", position=3)
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (1,))
    summary, *_, last = text.split("\n\n")
    assert summary == (
        f"rank 0 waited 300 s in {in_message(0, 1, 41)} for rank 1\n"
        f"rank 1 waited 300 s in {in_message(1, 0, 50)} for rank 0\n"
        f"ranks wait for each other in a circle: rank 0 waits in {in_message(0, 1, 41)} for rank 1, "
        f"rank 1 waits in {in_message(1, 0, 50)} for rank 0"
    )
    assert last == "missing: rank 1 (pid 1001) is running, and has begun 3 collectives:\n  rank 1 in send()"


def test_absent_rank_that_answers_is_named_to_all_itself_too() -> None:
    bench = WaitingBench(4)
    bench.come_to(57, 0, 1, 3)
    bench.miss(0, [2])
    assert [bench.inquiries(rank) for rank in range(4)] == [1] * 4
    bench.miss(3, [2])  # asked once
    assert bench.inquiries(1) == 0
    for rank in (0, 1, 3):
        bench.answer(rank, "in wait()")
    bench.answer(2, "in load_batch()\nin read()", position=56)
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (2,))
    assert text.split("\n\n") == [
        "ranks 0, 1 and 3 waited 300 s in all_reduce #57 for rank 2",
        "ranks 0, 1 and 3:\n  in wait()",
        "missing: rank 2 (pid 1002) is running, and has begun 56 collectives:\n  in load_batch()\n  in read()",
        "rank 2 did not arrive at all_reduce #57: see the report of each missing rank above. If ranks need more time, "
        "pass a longer collective_timeout_seconds to init_process_group()",
    ]
    assert bench.core.next_deadline() is None


@pytest.mark.parametrize(
    ("state", "says"),
    [(ProcessState.RUNNING, "holds Python's lock"), (ProcessState.UNKNOWN, "cannot be seen from the server")],
)
def test_absent_rank_that_does_not_answer_is_named_so(state: ProcessState, says: str) -> None:
    bench = WaitingBench(2)
    bench.miss(0, [1])
    bench.answer(0, "in wait()")
    bench.wait(stuck.ANSWER_SECONDS)
    bench.find(1, state)
    bench.wait(0.05)
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (1,))
    assert "did not answer" in text
    assert says in text


def test_what_a_look_found_before_a_sign_of_life_means_nothing() -> None:
    bench = WaitingBench(2)
    bench.wait(2)
    bench.find(1, ProcessState.STOPPED)
    bench.come_to(56, 1)
    bench.miss(0, [1])
    bench.answer(0, "in wait()")
    bench.wait(stuck.ANSWER_SECONDS)
    bench.wait(0.05)
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (1,))
    assert "(it did not answer the server's status request in time)" in text


@pytest.mark.parametrize("state", [state for state in ProcessState if state.is_fatal])
def test_absent_rank_that_is_found_stopped_has_failed(state: ProcessState) -> None:
    bench = WaitingBench(2)
    bench.miss(0, [1])
    bench.answer(0, "in wait()")
    bench.wait(stuck.ANSWER_SECONDS)
    bench.find(1, state)
    bench.wait(0.05)
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (SILENCE, ())
    assert text.startswith(f"rank 1/2 (pid 1001) {state.value}")


def test_verdict_comes_even_if_a_look_is_not_answered() -> None:
    bench = WaitingBench(2)
    bench.miss(0, [1])
    bench.wait(stuck.ANSWER_SECONDS + 0.1)
    assert bench.verdict()[:2] == (STUCK, (1,))


def test_who_is_held_up_by_the_missing_rank_is_not_the_culprit() -> None:
    """Rank 1 has not come because it waits for what rank 2 is to set."""
    bench = WaitingBench(3)
    bench.send(1, FrameType.GET, "set by rank 2", None)
    bench.miss(0, [1, 2])
    for rank in range(3):
        bench.answer(rank, f"rank {rank} is here")
    bench.wait(0)
    [failed] = [message for message in bench.take(0) if message[0] is FrameType.FAILED]
    assert failed[2:4] == (STUCK, 2)
    assert failed[5] == (1, 2)
    error = failure_of(Message(failed[0], 9, failed[1:]), "rank 0/3")
    assert error.missing_ranks == (2, 1)  # type: ignore[attr-defined]


def test_death_during_an_inquiry_is_the_verdict() -> None:
    bench = WaitingBench(3)
    bench.miss(0, [2])
    bench.answer(0, "in wait()")
    bench.lose(2)
    assert bench.verdict()[0] == DEATH
    bench.inbox.clear()
    bench.answer(1, "in wait()")
    bench.wait(10)
    assert bench.inbox == {}


def test_report_after_a_failure_starts_no_inquiry() -> None:
    bench = WaitingBench(2)
    bench.send(1, FrameType.REPORT_FAILURE, "ValueError", None)
    bench.inbox.clear()
    for rank in (0, 1):
        bench.miss(rank, [1 - rank])
    bench.wait(1)  # it has been pushed to all
    assert bench.inbox == {}


def test_two_stuck_at_once_are_one_verdict() -> None:
    bench = WaitingBench(4)
    bench.miss(0, [1], group="pair")
    bench.miss(2, [3])
    for rank in range(4):
        assert bench.inquiries(rank) == 1
        bench.answer(rank, f"rank {rank}")
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (1,))
    assert text.startswith("rank 0 waited 300 s in all_reduce #57 for rank 1\n")
    assert "  rank 3" in text


def test_rank_that_has_left_is_named_so_and_not_waited_for() -> None:
    bench = WaitingBench(3)
    bench.send(2, FrameType.LEAVE, "", None, 0)
    bench.inbox.clear()
    bench.miss(0, [2])
    for rank in (0, 1):
        bench.answer(rank, "in wait()")
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (2,))
    assert "rank 2 (pid 1002) has left" in text


def test_answers_that_are_late_or_unasked_mean_nothing() -> None:
    bench = WaitingBench(2)
    bench.answer(1, "unasked")
    bench.miss(0, [1])
    bench.answer(0, "in wait()")
    bench.wait(stuck.ANSWER_SECONDS + 0.1)
    assert "unasked" not in bench.verdict()[2]
    bench.answer(1, "late")
    assert bench.inbox == {}


def test_missing_ranks_that_do_not_exist_are_left_out() -> None:
    bench = WaitingBench(2)
    bench.miss(0, [0, 1, 7])
    for rank in (0, 1):
        bench.answer(rank, "")
    assert bench.verdict()[1] == (1,)


def test_report_before_the_generation_has_formed_is_left_out() -> None:
    bench = Bench(2)
    bench.join(0, 0)
    bench.take(0)
    for is_over in (True, False):
        bench.send(0, FrameType.STUCK, "world", None, 1, WHAT, 1, None, is_over)
    assert bench.take(0) == []


def test_reports_of_many_ranks_fit_one_frame_the_missing_ones_last() -> None:
    bench = WaitingBench(100)
    bench.miss(0, [98, 99])
    for rank in range(100):
        bench.answer(rank, f"rank {rank} " + "é" * (MAX_REPORT_BYTES // 2 - 10))
    _, missing, text = bench.verdict()
    assert missing == (98, 99)
    assert len(text.encode()) <= MAX_FAILURE_BYTES - 3 * 2
    assert text.index("  rank 0 ") < text.index("  rank 98 ") < text.index("  rank 99 ")
    assert "\n\nand 68 more reports, left out here\n\nranks 98 and 99 did not arrive at all_reduce #57" in text


def test_waits_do_not_pile_up() -> None:
    bench = WaitingBench(2)
    for position in range(3000):
        bench.wait_in(0, [1], position)
        bench.wait(1)
    [generation] = bench.core._generations
    assert len(generation.stuck._reports) <= 1024


happenings = st.lists(
    st.tuples(
        st.sampled_from(["miss", "wait_in", "answer", "beat", "lose", "bye", "find", "wait"]),
        st.integers(0, 3),
        st.integers(55, 59),
        st.none() | st.lists(st.integers(0, 3), unique=True).map(sorted),
        st.sampled_from(list(ProcessState)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(happenings)
def test_any_order_of_events_ends_in_at_most_one_verdict_for_all(happenings: list[tuple]) -> None:
    bench = WaitingBench(4)
    for what, rank, position, missing, state in happenings:
        if rank not in bench.core._member_of:
            continue
        if what in ("miss", "wait_in"):
            getattr(bench, what)(rank, missing, position)
        elif what == "answer":
            bench.answer(rank, f"rank {rank}", position)
        elif what == "beat":
            bench.send(rank, FrameType.HEARTBEAT, {"world": position})
        elif what == "lose":
            bench.lose(rank)
        elif what == "bye":
            bench.send(rank, FrameType.LEAVE, "", None, 0)
        elif what == "find":
            bench.find(rank, state)
        else:
            bench.wait(0.2)
    bench.wait(stuck.ANSWER_SECONDS + 1)
    told = {rank: [m[2:] for m in bench.take(rank) if m[0] is FrameType.FAILED and m[1] == 0] for rank in range(4)}
    verdicts = {verdict for rank in range(4) for verdict in told[rank]}
    assert len(verdicts) <= 1
    asked = any(what == "miss" for what, *_ in happenings)
    generations = bench.core._generations
    if asked and generations and generations[0].failure is None:
        # Whoever asked has left since, or was never there.
        assert generations[0].stuck._inquiry is None


# Groups.


def test_only_members_of_the_group_can_be_missing() -> None:
    bench = WaitingBench(4)
    bench.come_to(57, 0, group="pair")
    bench.come_to(99, 1, 2)  # of the world
    bench.wait_in(0, group="pair", ranks=[0, 3])
    bench.wait(1)
    assert bench.notices == ["rank 0 has waited 5 s in all_reduce #57 for rank 3; rank 3 (pid 1003) is running"]


def test_verdict_on_a_group_goes_to_all_and_names_its_members() -> None:
    bench = WaitingBench(4)
    bench.come_to(57, 1, group="pair")
    bench.come_to(57, 0, 2)
    bench.miss(1, group="pair", ranks=[1, 3])
    for rank in range(4):
        bench.answer(rank, f"rank {rank} is here")
    kind, missing, text = bench.verdict()
    assert (kind, missing) == (STUCK, (3,))
    assert text.startswith("rank 1 waited 300 s in all_reduce #57 for rank 3\n")


@pytest.mark.parametrize(("told_groups", "missing"), [(MAX_STATUS_GROUPS - 1, (1,)), (MAX_STATUS_GROUPS, ())])
def test_who_tells_of_all_the_groups_it_may_can_be_anywhere_in_others(told_groups: int, missing: tuple) -> None:
    bench = WaitingBench(3)
    bench.miss(0, group="pair", ranks=[0, 1])
    bench.send(0, FrameType.STATUS, {"pair": (57, [])}, "in wait()")
    bench.send(1, FrameType.STATUS, {f"group {n}": (9, []) for n in range(told_groups)}, "in wait()")
    bench.send(2, FrameType.STATUS, {}, "in wait()")
    assert bench.verdict()[:2] == (STUCK, missing)


def tell(bench: WaitingBench, rank: int, **groups: list[tuple[int, str, bool]]) -> None:
    history = {
        name: [[number, hash(what) % 2**64, what, runs] for number, what, runs in calls]
        for name, calls in groups.items()
    }
    bench.histories[rank] = history


def test_report_begins_with_what_a_rank_did_differently() -> None:
    bench = WaitingBench(3)
    bench.come_to(57, 0, 1)
    bench.miss(0, [2])
    for rank in range(3):
        tell(bench, rank, world=[(55, "barrier", False), (56, "flush" if rank == 1 else "all_reduce(sum)", False)])
        bench.answer(rank, f"in wait() of {rank}")
    _, missing, text = bench.verdict()
    assert missing == (2,)
    assert text.splitlines()[:3] == [
        "ranks 0 and 1 waited 300 s in all_reduce #57 for rank 2",
        "rank 1 called flush as #56 of group 'world', where the others called all_reduce(sum)",
        "",
    ]


def test_report_begins_with_a_circle_of_ranks() -> None:
    bench = WaitingBench(2)
    bench.come_to(3, 0, group="a")
    bench.come_to(5, 1, group="b")
    bench.wait_in(1, [0], 5, "b")
    bench.miss(0, [1], 3, "a")
    tell(bench, 0, a=[(3, "barrier", True)], b=[(4, "barrier", False)])
    tell(bench, 1, a=[(2, "barrier", False)], b=[(5, "all_reduce(sum)", True)])
    for rank in range(2):
        status = {name: (calls[-1][0], calls) for name, calls in bench.histories[rank].items()}
        bench.send(rank, FrameType.STATUS, status, "in wait()")
    assert bench.verdict()[2].splitlines()[1] == (
        "ranks wait for each other in a circle: rank 0 waits in barrier (#3 of group 'a') for rank 1, "
        "rank 1 waits in all_reduce(sum) (#5 of group 'b') for rank 0"
    )


def test_histories_that_answer_no_inquiry_are_left_out() -> None:
    bench = WaitingBench(2)
    bench.come_to(57, 0)
    tell(bench, 1, world=[(56, "flush", False)])
    bench.answer(1, "unasked")
    bench.miss(0, [1])
    tell(bench, 0, world=[(56, "barrier", False)])
    for rank in range(2):
        bench.answer(rank, "in wait()")
    assert "called" not in bench.verdict()[2]

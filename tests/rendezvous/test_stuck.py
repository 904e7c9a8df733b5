"""Collectives that do not end: one notice while ranks wait, and at the deadline one report for all ranks."""

from __future__ import annotations

import logging
import re
import threading

import pytest

import gradsync as gs
from commands import wait_until
from rendezvous.clients import connect, failure_of, on_each, thread_of, together, world, world_with_peer
from rendezvous.peer import PATIENCE_SECONDS, FakeServer, Kind, accept_join

WHAT = "all_reduce #7 (float32[4] 16 bytes, at train.py:41 in step)"
OF_MESSAGES = 0  # in place of a collective's number: a wait in a send or receive


def describe(client, positions, text, calls=None):
    client.describe_with(lambda: positions, lambda: (text, calls or {}))


def stuck_error(client, group="world", number=7, what=WHAT, missing=None):
    """What a rank raises whose collective has reached its deadline."""
    try:
        client.report_stuck(group, number, what, 300.0, missing)
    except gs.GradsyncError as error:
        return error


def text_of(error):
    """The report without what differs between ranks and runs."""
    return re.sub(r"pid \d+", "pid PID", str(error).partition(": ")[2])


@pytest.mark.ranks(3, fresh=True, options={"collective_timeout_seconds": 0.5})
def test_a_rank_that_does_not_come_is_named_to_all_with_the_line_that_waits(comm, tmp_path):
    if comm.rank == 1:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    with pytest.raises(gs.CollectiveTimeout, match="test_stuck.py") as raised:
        comm.barrier()
    assert raised.value.missing_ranks == (1,)
    (tmp_path / str(comm.rank)).touch()


def test_all_ranks_get_one_report(file_regression):
    with world(4) as clients:
        where = ["in wait()", "in load_batch()\nin read()", "in wait()", "in wait()"]
        for client in clients:
            describe(client, {"world": 6 if client.rank == 1 else 7}, where[client.rank])
        calls = [lambda client=client: stuck_error(client) for client in (clients[0], clients[2])]
        errors = together(*calls, lambda: failure_of(clients[1]), lambda: failure_of(clients[3]))
        assert [type(error) for error in errors] == [gs.CollectiveTimeout] * 4
        assert {error.missing_ranks for error in errors} == {(1,)}
        [text] = {text_of(error) for error in errors}
        file_regression.check(text)
        for client in clients:
            client.report_waiting("world", 7, WHAT, 5.0, [1])  # too late, and harmless
            with pytest.raises(gs.CollectiveTimeout):
                client.check()


def test_what_a_rank_did_differently_begins_the_report(file_regression):
    with world(3) as clients:
        for client in clients:
            what = "flush" if client.rank == 1 else "all_reduce(sum)"
            calls = [(5, 1, "barrier", False), (6, 2 + (client.rank == 1), what, False)]
            describe(client, {"world": 6}, "in wait()", {"world": calls})
        error = stuck_error(clients[0], missing=[2])
        assert error.missing_ranks == (2,)
        file_regression.check(text_of(error))


def test_ranks_that_wait_for_each_other_are_a_circle(file_regression):
    """In messages: each sends first, and nobody receives."""
    with world(2) as clients:
        for client in clients:
            describe(client, {"world": 3}, f"rank {client.rank} in send()")

        def wait(client):
            other = 1 - client.rank
            what = f"message(rank {client.rank} to rank {other}) after #3 (at train.py:{41 + client.rank} in step)"
            client.report_waiting("world", OF_MESSAGES, what, 5.0, [other])
            client.barrier("both have said it")
            return failure_of(client) if client.rank else stuck_error(client, "world", OF_MESSAGES, what, [other])

        errors = on_each(clients, wait)
        assert [type(error) for error in errors] == [gs.CollectiveTimeout] * 2
        [text] = {text_of(error) for error in errors}
        file_regression.check(text)


def test_a_circle_of_two_groups_is_found():
    with world(2) as clients:
        describe(clients[0], {"a": 3, "b": 4}, "", {"a": [(3, 1, "barrier", True)], "b": [(4, 1, "barrier", False)]})
        describe(clients[1], {"a": 2, "b": 5}, "", {"a": [(2, 1, "barrier", False)], "b": [(5, 2, "all_reduce", True)]})
        clients[1].report_waiting("b", 5, "all_reduce #5", 5.0, [0])
        clients[1].set("said", b"")
        clients[0].get("said")
        error = stuck_error(clients[0], "a", 3, "barrier #3", [1])
        assert error.missing_ranks == (1,)
        assert "circle" in str(error)


def test_a_group_s_members_alone_can_be_missing():
    with world(3) as clients:
        describe(clients[0], {"pair": 4}, "here")
        pair = clients[0].group([2, 0], "pair")
        error = stuck_error(pair, "pair", 4, "barrier #4")
        assert error.missing_ranks == (2,)
        assert failure_of(clients[1]).missing_ranks == (2,)
        assert pair.has_failed()


@pytest.mark.parametrize(("groups", "missing"), [(15, (2,)), (16, ())])
def test_a_rank_that_names_as_many_groups_as_it_may_can_be_anywhere_in_others(groups, missing):
    with world_with_peer(3) as (clients, peer):
        for client in clients:
            describe(client, {"pair": 4}, "")
        with thread_of(lambda: stuck_error(clients[0], "pair", 4, "barrier #4")) as got:
            assert peer.answer().kind == Kind.STATUS_REQUEST
            peer.send(Kind.STATUS, {f"group {number}": [9, []] for number in range(groups)}, "")
            assert got().missing_ranks == missing


def test_ranks_that_do_not_exist_and_the_rank_itself_are_not_missing():
    with world(3) as clients:
        assert stuck_error(clients[0], missing=[0, 1, 7]).missing_ranks == (1,)


def test_a_rank_that_has_left_is_missing_and_not_asked():
    with world(3) as clients:
        clients[2].close()
        error = stuck_error(clients[0], missing=[2])
        assert error.missing_ranks == (2,)
        assert "has left" in str(error)


def test_a_rank_that_is_itself_held_up_is_not_the_first_to_blame():
    """Rank 1 waits for what rank 2 is to set."""
    with (
        world_with_peer(3, rank=1) as (clients, peer),
        thread_of(lambda: stuck_error(clients[0], missing=[1, 2])) as got,
    ):
        assert peer.answer().kind == Kind.STATUS_REQUEST
        peer.send(Kind.GET, "set by rank 2", None)
        peer.send(Kind.STATUS, {}, "in get()")
        assert got().missing_ranks == (2, 1)


def test_the_death_of_a_rank_that_is_asked_is_the_failure():
    with world_with_peer(3) as (clients, peer), thread_of(lambda: stuck_error(clients[0], missing=[2])) as waiting:
        assert peer.answer().kind == Kind.STATUS_REQUEST
        peer.stream.close()
        error = waiting()
        assert (type(error), error.rank) == (gs.RankFailed, 2)


def test_a_rank_that_does_not_answer_is_missing_all_the_same():
    with world_with_peer(2) as (clients, peer):
        describe(clients[0], {"world": 7}, "in wait()")
        error = stuck_error(clients[0], missing=[1])
        assert (type(error), error.missing_ranks) == (gs.CollectiveTimeout, (1,))
        assert "did not answer" in str(error)
        assert peer.answer().kind == Kind.STATUS_REQUEST  # once
        assert peer.answer().kind == Kind.FAILED


def test_an_answer_that_nobody_has_asked_for_is_not_in_the_report():
    with world_with_peer(2) as (clients, peer):
        peer.send(Kind.STATUS, {"world": [7, [[7, 9, "flush", True]]]}, "unasked")
        with thread_of(lambda: stuck_error(clients[0], missing=[1])) as waiting:
            assert peer.answer().kind == Kind.STATUS_REQUEST
            peer.send(Kind.STATUS, {"world": [6, []]}, "asked")
            text = str(waiting())
        assert "unasked" not in text
        assert "asked" in text


def test_a_report_after_a_failure_gets_that_failure():
    with world_with_peer(2) as (clients, peer):
        clients[0].report_failure("ValueError")
        assert type(stuck_error(clients[0], missing=[1])) is gs.RankFailed
        assert peer.answer().kind == Kind.FAILED
        for is_over in (True, False):
            peer.send(Kind.STUCK, "world", None, 7, WHAT, 300_000, [0], is_over)
        assert peer.ask(Kind.SET, "key", b"").kind == Kind.FAILED


def test_a_rank_that_says_too_much_or_raises_harms_nobody():
    with world(3) as clients:
        clients[0].describe_with(lambda: 1 / 0, lambda: 1 / 0)
        calls = [(number, number, "x" * 500, True) for number in range(300)]
        clients[1].describe_with(
            lambda: {"g" * 2000: -3, **{str(number): number for number in range(40)}},
            lambda: ("é" * 20_000, {"0": calls}),
        )
        error = stuck_error(clients[2], missing=[1])
        assert (type(error), error.missing_ranks) == (gs.CollectiveTimeout, (1,))
        assert "ZeroDivisionError" in str(error)
        assert "ééé" in str(error)


def test_reports_of_many_ranks_fit_and_the_missing_ones_are_kept():
    with world(40) as clients:
        for client in clients:
            describe(client, {"world": 7}, f"this is rank {client.rank}; " + "é" * 8000)
        text = str(stuck_error(clients[0], missing=[38, 39]))
        assert "this is rank 38" in text
        assert "this is rank 39" in text
        assert "left out" in text


def test_a_report_that_takes_long_holds_up_nothing_else():
    asked, goes_on = threading.Event(), threading.Event()

    def report():
        asked.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return "after all", {}

    with world(2) as clients:
        clients[1].describe_with(dict, report)
        with thread_of(lambda: stuck_error(clients[0], missing=[1])) as waiting:
            assert asked.wait(PATIENCE_SECONDS)
            clients[1].set("key", b"value")
            assert clients[1].get("key") == b"value"
            goes_on.set()
            assert "after all" in str(waiting())


@pytest.mark.slow  # ten seconds
def test_a_server_that_does_not_answer_leaves_the_rank_s_own_view():
    def serve(peer):
        accept_join(peer)
        while (message := peer.receive()) is not None and message.kind != Kind.LEAVE:
            if message.kind == Kind.HEARTBEAT:
                peer.send(Kind.PULSE)

    with FakeServer(serve) as server, connect(server.address) as client:
        error = stuck_error(client, missing=[2])
        assert (type(error), error.missing_ranks) == (gs.CollectiveTimeout, (2,))


# -- Notices ----------------------------------------------------------------------------------------------------------


def notices(caplog):
    return [record.getMessage() for record in caplog.records if " waited " in record.getMessage()]


def test_one_notice_says_who_waits_for_whom(caplog):
    with caplog.at_level(logging.WARNING, "gradsync"), world(4) as clients:
        for client in (clients[0], clients[3], clients[1]):
            client.report_waiting("world", 4, "barrier #4", 5.0, [2])
        wait_until(lambda: notices(caplog))
        clients[1].report_waiting("world", 4, "barrier #4", 15.0, [2])
        clients[1].report_waiting("world", 5, "barrier #5", 5.0, [2])
        wait_until(lambda: len(notices(caplog)) > 1)
        first, second = notices(caplog)
        assert first.startswith("gradsync: ranks 0, 1 and 3 have waited 5 s in barrier #4 for rank 2; rank 2 (pid ")
        assert "barrier #5" in second


def test_who_is_missing_follows_from_what_each_rank_has_begun():
    with world_with_peer(3) as (clients, peer):
        describe(clients[0], {"world": 7}, "")
        describe(clients[1], {"world": 8}, "")  # launched ahead, on a GPU
        peer.send(Kind.HEARTBEAT, {"world": 6})
        with thread_of(lambda: stuck_error(clients[0])) as waiting:
            while (kind := peer.answer().kind) != Kind.STATUS_REQUEST:
                assert kind == Kind.REPLY
            peer.send(Kind.STATUS, {"world": [6, []]}, "")
            assert waiting().missing_ranks == (2,)


def test_waits_in_messages_are_all_in_the_notice_with_their_lines(caplog):
    with caplog.at_level(logging.WARNING, "gradsync"), world(2) as clients:
        for client in clients:
            what = f"message({client.rank} to {1 - client.rank}) at train.py:{41 + client.rank}"
            client.report_waiting("world", OF_MESSAGES, what, 5.0, [1 - client.rank])
        wait_until(lambda: notices(caplog))
        [notice] = notices(caplog)
        assert "train.py:41" in notice
        assert "train.py:42" in notice

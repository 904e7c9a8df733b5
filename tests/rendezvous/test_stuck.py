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


@pytest.mark.ranks(2, fresh=True, options={"collective_timeout_seconds": 0.5})
def test_a_rank_that_does_not_come_is_named_to_all_with_the_line_that_waits(comm, tmp_path):
    if comm.rank == 1:
        wait_until((tmp_path / "0").exists)
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


def test_a_group_s_members_alone_can_be_missing():
    with world(3) as clients:
        describe(clients[0], {"pair": 4}, "here")
        pair = clients[0].group([2, 0], "pair")
        error = stuck_error(pair, "pair", 4, "barrier #4")
        assert error.missing_ranks == (2,)
        assert failure_of(clients[1]).missing_ranks == (2,)
        assert pair.has_failed()


def test_a_rank_that_has_left_is_missing_and_not_asked():
    with world(3) as clients:
        clients[2].close()
        error = stuck_error(clients[0], missing=[2])
        assert error.missing_ranks == (2,)
        assert "has left" in str(error)


def test_the_death_of_a_rank_that_is_asked_is_the_failure():
    with world_with_peer(3) as (clients, peer), thread_of(lambda: stuck_error(clients[0], missing=[2])) as waiting:
        assert peer.answer().kind == Kind.ASK
        peer.stream.close()
        error = waiting()
        assert (type(error), error.rank) == (gs.RankFailed, 2)


def test_a_rank_that_says_too_much_or_raises_harms_nobody():
    with world(3) as clients:
        clients[0].describe_with(lambda: 1 / 0, lambda: 1 / 0)
        calls = [(number, number, "x" * 200, True) for number in range(128)]
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
        peer.rest()

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

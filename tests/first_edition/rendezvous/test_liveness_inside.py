"""Heartbeats between real processes and threads: who is stopped is named, who is busy is not, a verdict meets all."""

from __future__ import annotations

import gc
import os
import re
import select
import threading
import warnings

import pytest
from rendezvous_ranks import SECRET, connect, connect_all, run_threads

from gradsync.errors import CollectiveTimeout, RankFailed
from gradsync.machine import machine_identity
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.liveness import Liveness
from gradsync.rendezvous.messages import FrameType, Message
from gradsync.rendezvous.pushes import Pushes
from gradsync.rendezvous.self_report import SelfReport
from gradsync.rendezvous.server import RendezvousServer


def heartbeat_thread(client: RendezvousClient) -> threading.Thread:
    return client._requests._liveness._thread


def describe_and_wait(client: RendezvousClient, position: int, report: str) -> None:
    """Returns once the client's heartbeats tell this position."""
    is_told = threading.Event()

    def positions() -> dict[str, int]:
        is_told.set()
        return {"world": position}

    client.describe_with(positions, lambda: report)
    assert is_told.wait(30)


@pytest.mark.parametrize("end", ["abandon", "report_failure"])
def test_verdict_reaches_a_rank_that_calls_nothing(end: str) -> None:
    with RendezvousServer(2, secret=SECRET) as server:
        sleeping, other = connect_all(server, 2)
        getattr(other, end)(*(["why"] if end == "report_failure" else []))
        thread = heartbeat_thread(sleeping)
        thread.join(30)  # it ends once the generation has
        assert not thread.is_alive()
        assert isinstance(sleeping._requests._inbox.failure, RankFailed)
        sleeping.close()
        other.close()


def test_absence_is_one_verdict_with_what_every_rank_does() -> None:
    with RendezvousServer(3, secret=SECRET) as server:
        clients = connect_all(server, 3)
        reports = ["in wait()", "in load_batch()", "in wait()"]
        positions = [7, 6, 7]
        run_threads([lambda r=r: describe_and_wait(clients[r], positions[r], reports[r]) for r in range(3)])

        def report(client: RendezvousClient) -> None:
            client.report_absence("world", 7, "all_reduce #7 (float32, 4 KB)", 300.0, None)

        errors = run_threads([lambda: report(clients[0]), lambda: report(clients[2])])
        thread = heartbeat_thread(clients[1])
        thread.join(30)
        with pytest.raises(CollectiveTimeout) as caught:
            clients[1].check()
        errors.insert(1, caught.value)
        for rank, error in enumerate(errors):
            assert type(error) is CollectiveTimeout
            assert error.missing_ranks == (1,)
            assert str(error).startswith(f"rank {rank}/3: ranks 0 and 2 waited 300 s in all_reduce #7 (float32, 4 KB)")
            with pytest.raises(CollectiveTimeout, match=re.escape(str(error))):
                clients[rank].barrier()
        assert len({str(error).partition(": ")[2] for error in errors}) == 1
        pid = os.getpid()
        assert str(errors[0]).split("\n\n")[1:] == [
            f"missing: rank 1 (pid {pid}) is in phase 'running', and has begun 6 collectives:\n  in load_batch()",
            "ranks 0 and 2:\n  in wait()",
        ]
        for client in clients:
            client.report_waiting("world", 7, "all_reduce #7", 5.0, [1])  # too late, and harmless
            client.close()


def test_heartbeats_end_with_the_client() -> None:
    with RendezvousServer(2, secret=SECRET) as server:
        clients = connect_all(server, 2)
        threads = [heartbeat_thread(client) for client in clients]
        assert all(thread.is_alive() and thread.daemon for thread in threads)
        clients[0].close()
        clients[1].abandon()
        assert not any(thread.is_alive() for thread in threads)


def test_forgotten_client_is_closed() -> None:
    with RendezvousServer(1, secret=SECRET) as server:
        client = connect(server, 0, 1)
        describe_and_wait(client, 1, "")
        thread = heartbeat_thread(client)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del client
            gc.collect()
            thread.join(30)
            assert not thread.is_alive()
        assert server.wait_until_empty(30)


class FakeConnection:
    """Keeps what is sent; the server is found as the test says."""

    address = "server:1"

    def __init__(self) -> None:
        self.sent: list[tuple] = []
        self.finding = Finding.RUNNING
        self.pids: list[int | None] = []
        self.is_shut_down = False
        self.is_stuck = False

    def post_if_idle(self, *message) -> None:
        self.sent.append(message)

    def post(self, *message) -> None:
        self.sent.append(message)

    def look_at_server(self, pid: int | None) -> Finding:
        self.pids.append(pid)
        return self.finding

    def input_waiter(self) -> select.poll:
        return select.poll()

    def shut_down(self) -> None:
        self.is_shut_down = True


class FakeInbox:
    def __init__(self) -> None:
        self.heard_at = 0.0
        self.failure: Exception | None = None
        self.server: tuple[str, int] | None = (machine_identity(), 7)

    def give_up(self, failure: Exception) -> None:
        self.failure = failure


class Heart:
    """A client's heartbeats by a virtual clock; the server was heard of at 100 s."""

    def __init__(self) -> None:
        self.connection, self.inbox = FakeConnection(), FakeInbox()
        self.liveness = Liveness(self.connection, self.inbox, SelfReport(self.connection), "rank 0/2")
        self.liveness._silence.restart(100.0)
        self.now = 100.0

    def beat(self, times: int, *, was_late: bool = False) -> None:
        for _ in range(times):
            self.now += 0.5
            self.liveness.beat(self.now, was_late=was_late)

    def hear(self) -> None:
        self.inbox.heard_at = self.now


def test_rank_beats_from_when_it_is_seated() -> None:
    heart = Heart()
    heart.inbox.server = None
    heart.beat(10)
    assert heart.connection.sent == []
    heart.inbox.server = ("elsewhere", 7)
    heart.beat(3)
    assert heart.connection.sent == [(FrameType.HEARTBEAT, {})] * 3
    assert heart.connection.pids == [None]  # a process elsewhere cannot be looked at


def test_slow_server_is_worth_one_warning(caplog) -> None:
    heart = Heart()
    heart.beat(40)
    heart.hear()
    heart.beat(4)
    assert heart.inbox.failure is None
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0/2: the rendezvous server at server:1 (pid 7) has not been heard of for 5 s, but runs "
        "(a long call that holds Python's lock?)",
        "rank 0/2: the rendezvous server at server:1 (pid 7) is heard of again",
    ]
    assert set(heart.connection.pids) == {7}


@pytest.mark.parametrize("finding", [finding for finding in Finding if finding.is_fatal])
def test_lost_server_is_a_failure_that_sticks(finding: Finding) -> None:
    heart = Heart()
    heart.connection.finding = finding
    heart.beat(3)
    assert heart.inbox.failure is None
    heart.beat(1)
    assert re.match(rf"rank 0/2: the rendezvous server .* {re.escape(finding.value)}", str(heart.inbox.failure))
    assert heart.connection.is_shut_down
    assert heart.liveness.is_over


def test_a_message_that_is_never_finished_is_a_failure() -> None:
    heart = Heart()
    heart.beat(1)
    heart.connection.is_stuck = True
    heart.beat(1)
    assert "server:1 (pid 7) is lost: it has left a message unfinished for 5 s" in str(heart.inbox.failure)
    assert heart.connection.is_shut_down


def test_rank_that_was_itself_not_running_blames_nobody() -> None:
    heart = Heart()
    heart.connection.finding = Finding.STOPPED
    heart.beat(3)
    heart.now += 60
    heart.beat(1, was_late=True)
    heart.beat(2)
    assert heart.inbox.failure is None


def test_report_that_raises_says_so() -> None:
    connection = FakeConnection()
    report = SelfReport(connection)
    report.answer(1)
    report.describe_with(lambda: {"g" * 2000: -3, **{str(n): n for n in range(40)}}, lambda: "é" * 20_000)
    report.answer(2)
    report.describe_with(lambda: 1 / 0, lambda: 1 / 0)
    report.answer(3)
    first, second, third = (message[1:] for message in connection.sent)
    assert first == (1, {}, "(nothing is known of what it does)")
    assert len(second[1]) == 16
    assert min(second[1].values()) == 0
    assert len(second[2].encode()) <= 16 * 1024
    assert third == (3, {}, "(its report cannot be made: ZeroDivisionError: division by zero)")


def test_who_is_told_of_failures_hears_the_first_line_and_may_raise() -> None:
    report = SelfReport(FakeConnection())
    report.note_trouble("nobody listens")
    heard: list[str] = []
    report.describe_with(dict, str, on_trouble=heard.append)
    Pushes(None, report).answer(Message(FrameType.FAILED, 0, (0, 0, 1, "forward", [], "rank 1 died\nin line 3")))
    assert heard == ["rank 1 died"]
    report.describe_with(dict, str, on_trouble=lambda text: 1 / 0)
    report.note_trouble("it raises")


def test_who_asks_has_the_answer_before_anything_else_is_done_about_it() -> None:
    """Such as to write a dump, which may take longer than the server waits for answers."""
    connection = FakeConnection()
    report = SelfReport(connection)
    sent: list[int] = []
    report.describe_with(dict, str, on_trouble=lambda text: sent.append(len(connection.sent)))
    report.answer(1)
    assert sent == [1]


def test_a_history_goes_before_the_status_and_may_raise() -> None:
    connection = FakeConnection()
    report = SelfReport(connection)
    report.describe_with(dict, str, lambda: {"world": [(1, 2, "barrier", True)]})
    report.answer(1)
    report.describe_with(dict, str, lambda: 1 / 0)
    report.answer(2)
    assert [message[0] for message in connection.sent] == [FrameType.HISTORY, FrameType.STATUS, FrameType.STATUS]

"""Threads, forks and signal handlers of a rank: none of them tears a message, holds up the end, or hides a death."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time

import pytest

import gradsync as gs
import interrupts
from commands import is_running, wait_until
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, join_all, together, world
from rendezvous.peer import SECRET


class Interrupt(Exception):
    pass


def interrupt(*_):
    raise Interrupt


ENDS = (Interrupt, gs.CollectiveTimeout, gs.RendezvousTimeout, gs.RankFailed, gs.CommunicatorClosed)


def interrupted(function, number, handle=interrupt):
    return interrupts.interrupted(function, number, ends=ENDS, by=signal.SIGUSR1, handle=handle)


CALLS = {
    "barrier": lambda client: client.barrier(timeout_seconds=0.002),
    "set": lambda client: client.set("k", b"v"),
    "announce_left": lambda client: client.announce_left("comm", 1),
    "report_stuck": lambda client: client.report_stuck("world", 1, "barrier #1", 5.0, [1]),
    "report_failure": lambda client: client.report_failure("why"),
    "close": lambda client: client.close(),
}
GOES_ON = "barrier", "set", "announce_left"


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_raises_at_any_point_keeps_no_rank_from_going_on_or_ending(name):
    """Each message has the number after the last one's; the server ends a connection that loses or repeats one."""
    number, struck = 0, True
    while struck:
        number += 1
        with RendezvousServer(2, secret=SECRET) as server:
            client, other = join_all(server, 2)
            struck = interrupted(lambda client=client: CALLS[name](client), number)
            if name in GOES_ON:
                client.set("after", b"%d" % number)
                assert other.get("after") == b"%d" % number
            assert together(client.close, other.close) == [None, None], f"call {number}"
            client.abandon()
    assert number > 5


def test_no_byte_is_lost_or_sent_twice_by_a_timer_whose_handler_raises():
    """At points that are no calls of Python, too: in the middle of a send."""
    armed = False

    def handle(*_):
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    kept = signal.signal(signal.SIGALRM, handle)
    try:
        with world(2) as (client, other):
            interrupts = 0
            while interrupts < 50:
                signal.setitimer(signal.ITIMER_REAL, 0.0003)
                try:
                    armed = True
                    for number in range(20):
                        client.announce_left(f"comm {number}", number)
                    client.set("key", bytes(30_000))
                    armed = False
                except Interrupt:
                    interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            client.set("key", b"in step")
            assert other.get("key") == b"in step"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)


@pytest.mark.slow
@pytest.mark.ranks(1, on=("local",), fresh=True)
def test_a_handler_may_report_a_failure_and_close_while_a_message_is_sent(comm):
    faulthandler.dump_traceback_later(10, exit=True)
    number, struck = 0, True
    while struck:
        number += 1
        with world(1) as [client]:
            report = lambda *_, client=client: (client.report_failure("preempted"), client.close())  # noqa: E731
            struck = interrupted(lambda client=client: client.set("key", b"value"), number, report)
    faulthandler.cancel_dump_traceback_later()
    assert number > 5


@pytest.mark.slow
def test_a_handler_may_stop_a_server_at_any_point_before_it_waits():
    number, waited_seconds = 1, 0.0
    while waited_seconds < 2.0:
        server = RendezvousServer(1, secret=SECRET)
        timer = threading.Timer(2.0, server.stop)  # once it waits for connections, no point is left
        timer.start()
        began = time.monotonic()
        handle = lambda *_, server=server: server.stop()  # noqa: E731
        ends = (gs.RendezvousError,)  # stopped before it began to serve
        interrupts.interrupted(server.serve_forever, number, ends=ends, by=signal.SIGUSR1, handle=handle)
        waited_seconds = time.monotonic() - began
        timer.cancel()
        with socket.create_server(("127.0.0.1", int(server.address.rpartition(":")[2]))):
            number += 3
    assert number > 200, "the handler has waited for its own thread"


@pytest.mark.ranks(2, ends={1: -signal.SIGKILL})
def test_a_forked_child_does_not_hide_the_death_of_its_parent(comm, tmp_path):
    """Though it holds the connection open."""
    pid, ends = tmp_path / "pid", tmp_path / "ends"
    if comm.rank == 1:
        if (child := os.fork()) == 0:
            wait_until(ends.exists)
            os._exit(0)
        pid.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as raised:
        comm.barrier()
    assert raised.value.rank == 1
    child = int(pid.read_text())
    assert is_running(child)
    ends.touch()
    wait_until(lambda: not is_running(child))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.ranks(1, on=("local",), fresh=True)
def test_a_fork_in_the_middle_of_a_send_harms_neither_parent_nor_child(comm):
    with RendezvousServer(1, secret=SECRET) as server:
        client = connect(server)
        group, ends = client.group([0], "group"), threading.Event()

        def send():
            while not ends.is_set():
                client.announce_left("comm", 1)
                client.set("key", b"value")

        def child():
            for use in (client.barrier, client.check, group.barrier, lambda: client.set("k", b"")):
                with pytest.raises(gs.CommunicatorClosed):
                    use()
            client.report_failure("nobody hears this")
            client.report_waiting("world", 1, "barrier #1", 5.0, None)
            group.close()
            client.close()
            server.stop()
            os._exit(7)

        sending = threading.Thread(target=send)
        sending.start()
        for _ in range(20):  # in the middle of what the other thread does
            if (pid := os.fork()) == 0:
                try:
                    child()
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            client.barrier()
        ends.set()
        sending.join()
        client.close()
        assert server.wait_until_empty(60)

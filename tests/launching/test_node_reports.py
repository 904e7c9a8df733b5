"""The messages between launchers: their records, and the cause for which the ranks of all machines end."""

import json
import select
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradsync.errors import RendezvousError
from gradsync.launching.in_rank.result import ErrorReport
from gradsync.launching.nodes import Cause, _Link, cause_of, decode_record, signal_cause
from gradsync.launching.outcome import Outcome, RankOutcome
from gradsync.launching.signals import SignalInbox
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer


def failed(rank, *, text="Traceback\nValueError: x\n", code=1):
    return RankOutcome(rank, 100 + rank, code, error=ErrorReport(text, "ValueError: x", False), order=0)


def outcome(*ranks, signal_number=None):
    return Outcome(tuple(ranks), signal_number)


def test_a_cause_survives_the_way():
    cause = cause_of(3, outcome(failed(7)))
    assert cause.text.endswith(" failed with exit code 1:\nTraceback\nValueError: x\n")
    assert Cause.from_bytes(cause.to_bytes(), 0) == cause


@pytest.mark.parametrize(
    "told",
    [b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"node": 1}', b'{"node": true}', b'{"node": 1, "how": 2}'],
)
def test_what_no_launcher_of_this_version_would_tell_is_refused_in_words(told):
    with pytest.raises(RendezvousError, match="the record of node 1 cannot be read: .*; run the same version"):
        decode_record(1, told)
    cause = Cause.from_bytes(told, 2)
    assert (cause.node, cause.exit_code, cause.may_retry) == (2, 1, False)
    assert cause.how.startswith("cannot read why another node ended the run: ")
    assert cause.how.endswith("; run the same version of gradsync on every machine")


@pytest.mark.parametrize("wrong", [{"node": "1"}, {"n_ranks": True}, {"start": 1}, {"more": 1}])
def test_a_node_that_cannot_be_is_refused(wrong):
    good = {
        "node": 1, "host": "h", "address": "10.0.0.1", "n_ranks": 2,
        "restart": 0, "max_restarts": 0, "master_port": 4000, "start": "00ff",
    }  # fmt: skip
    assert decode_record(1, json.dumps(good).encode()).n_ranks == 2
    with pytest.raises(RendezvousError, match="the record of node 1 cannot be read"):
        decode_record(1, json.dumps(good | wrong).encode())


@pytest.mark.parametrize("line", ["é\x00 line\n", "x", "\N{PILE OF POO}"])
def test_the_end_of_a_long_text_is_kept(line):
    data = Cause(0, "failed", line * 100_000 + "\nValueError: the last\n", 1).to_bytes()
    assert len(data) <= 60 * 1024
    text = Cause.from_bytes(data, 0).text
    assert text.startswith("gradsync: (the beginning of this report is left out)\n")
    assert text.endswith("ValueError: the last\n")


def test_exit_codes():
    assert cause_of(0, outcome(failed(0), signal_number=15)) == signal_cause(0, 15)
    assert cause_of(0, outcome(RankOutcome(0, 100, 7, order=0))).exit_code == 7
    assert cause_of(0, outcome(RankOutcome(0, 100, -9, order=0))).exit_code == 137
    assert cause_of(0, outcome(failed(0))).may_retry
    assert (signal_cause(0, 2).exit_code, signal_cause(0, 2).may_retry) == (130, False)


@pytest.fixture
def joined():
    """Two clients of one server, as the launchers of two machines."""
    secret = b"s" * 32
    with RendezvousServer(2, secret=secret, of_launchers=True) as server, ThreadPoolExecutor() as pool:
        joining = [
            pool.submit(RendezvousClient.connect, server.address, secret=secret, rank=rank, world_size=2, noun="node")
            for rank in range(2)
        ]
        clients = [each.result() for each in joining]
        yield server, *clients
        for client in clients:
            client.abandon()


def cause_from(link):
    """Waits until a link has the cause that another launcher has set."""
    with SignalInbox(installs_handlers=False) as signals:
        link.watch(signals)
        assert select.select([signals.descriptor], [], [], 20)[0]


def test_a_launcher_that_does_not_end_after_a_failure_is_named_at_the_limit(joined):
    # The launcher of node 1 is alive and silent, as when its terminal is blocked.
    with _Link(joined[1], 0, 0.2) as link:
        assert link.wait_for_ends(outcome(failed(0))) == cause_of(0, outcome(failed(0)))
        assert link.late_nodes == (1,)


def test_a_node_that_failed_and_does_not_end_is_named_by_a_node_whose_ranks_ended_well(joined):
    _, client, other = joined
    with _Link(client, 0, 0.2) as link, ThreadPoolExecutor() as pool:
        link.watch(SignalInbox(installs_handlers=False))
        waiting = pool.submit(link.wait_for_ends, outcome(RankOutcome(0, 100, 0)))
        with pytest.raises(TimeoutError):  # no failure is known: no limit
            waiting.result(1)
        cause = cause_of(1, outcome(failed(1)))
        other.set("cause", cause.to_bytes())
        assert waiting.result(20) == cause
        assert link.late_nodes == (1,)


def test_the_loss_of_the_server_does_not_outrank_a_cause_that_was_known_before(joined):
    server, client, other = joined
    cause = cause_of(1, outcome(failed(1)))
    other.set("cause", cause.to_bytes())
    with _Link(client, 0, 20) as link:
        cause_from(link)
        server.stop()
        assert link.wait_for_ends(outcome(RankOutcome(0, 100, 0))) == cause


def test_the_loss_of_the_server_outranks_a_failure_that_follows_from_it(joined):
    server, client, other = joined
    error = ErrorReport("RankFailed: rank 0 died\n", "RankFailed: rank 0 died", is_consequence=True)
    cause = cause_of(1, outcome(RankOutcome(1, 101, 1, error=error, order=0)))
    other.set("cause", cause.to_bytes())
    with _Link(client, 0, 20) as link:
        cause_from(link)
        server.stop()
        found = link.wait_for_ends(outcome(RankOutcome(0, 100, 0)))
        assert found.is_lost
        assert "the rendezvous server on node 0 is gone" in found.how

"""A launcher does not wait for ever for what another one has to tell."""

import threading
from types import SimpleNamespace

from gradsync.launching.nodes import run as link
from gradsync.launching.nodes.run import NodeReport, report_of
from gradsync.launching.outcome import Outcome, RankOutcome
from gradsync.launching.signals import SignalInbox


class SilentOther:
    """The connection of node 0 to a run in which node 1 has said that it fails, and then nothing more."""

    def __init__(self):
        self._closed = threading.Event()
        self._values = {"first": NodeReport(1, 0).to_bytes()}

    def get(self, key, *, from_rank=None, timeout_seconds):
        while key not in self._values:
            if self._closed.wait(0.01):
                raise link.CommunicatorClosed("closed")
        return self._values[key]

    def set(self, key, value, *, replace=True):
        if replace or key not in self._values:
            self._values[key] = value

    def has_failed(self):
        return False

    def close(self):
        self._closed.set()


def test_after_a_failure_a_silent_launcher_is_waited_for_a_minute_only(monkeypatch):
    monkeypatch.setattr(link, "_REPORT_SECONDS", 0.3)
    nodes = [SimpleNamespace(node=node, host=f"host{node}", address=f"10.0.0.{node}") for node in range(2)]
    meeting = SimpleNamespace(client=SilentOther(), nodes=nodes, own=nodes[0])
    told = []
    with SignalInbox() as signals, link.NodeLink(meeting, signals, SimpleNamespace(tell=told.append)) as connection:
        verdict = connection.settle(report_of(0, Outcome((RankOutcome(0, 100, -15, order=0, was_stopped=True),))))
    assert told == [
        "gradsync: node 1 (host1, 10.0.0.1) has not told how its ranks ended within 0.3 s of a failure; "
        "not waiting for it any more"
    ]
    assert verdict.cause.node == 0  # all that is known
    assert verdict.is_lost
    assert not verdict.may_retry

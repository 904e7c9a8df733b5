"""What launchers tell each other of their ranks' ends, and whose counts as the cause."""

import pytest

from gradsync.errors import RendezvousError
from gradsync.launching.nodes import (
    NodeRecord,
    NodeReport,
    _clipped,
    cause_of,
    decode,
    encode,
    loss_report,
    report_of,
    signal_report,
)
from gradsync.launching.outcome import Outcome, RankOutcome
from gradsync.launching.rank_report import ErrorReport


def failed(rank, *, order=0, consequence=False, stopped=False, text="Traceback\nValueError: x\n", code=1):
    error = ErrorReport(text, "ValueError: x", consequence)
    return RankOutcome(rank, 100 + rank, code, error=error, order=order, was_asked_to_end=stopped)


def outcome(*ranks, signal_number=None):
    return Outcome(tuple(ranks), signal_number)


def test_ranks_that_ended_well_are_no_cause():
    report = report_of(1, outcome(RankOutcome(2, 102, 0)))
    assert report.level is None
    assert cause_of([report, report_of(0, outcome())], None) is None


def test_a_report_survives_the_way():
    report = report_of(3, outcome(failed(7)))
    assert decode(NodeReport, encode(report), "a report") == report


@pytest.mark.parametrize(
    "told",
    [b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"node": 1}', b'{"node": true}', b'{"node": 1, "how": 2}'],
)
def test_what_no_launcher_of_this_version_would_tell_is_refused_in_words(told):
    with pytest.raises(RendezvousError, match="the record of node 1 cannot be read: .*; run the same version"):
        NodeRecord.from_bytes(1, told)
    if told != b'{"node": 1}':  # a report of a node where nothing failed
        with pytest.raises(
            RendezvousError, match="cannot be read: .*; run the same version of gradsync on every machine"
        ):
            decode(NodeReport, told, "a report")


@pytest.mark.parametrize("wrong", [{"node": 2}, {"n_ranks": 0}, {"master_port": 65536}, {"start": 1}])
def test_a_node_that_cannot_be_is_refused(wrong):
    import json

    good = {
        "node": 1, "host": "h", "address": "10.0.0.1", "interface": None, "n_ranks": 2, "n_gpus": 0,
        "restart": 0, "max_restarts": 0, "master_port": 4000, "start": "00ff",
    }  # fmt: skip
    assert NodeRecord.from_bytes(1, json.dumps(good).encode()).n_ranks == 2
    with pytest.raises(RendezvousError, match="the record of node 1 cannot be read"):
        NodeRecord.from_bytes(1, json.dumps(good | wrong).encode())


def test_the_end_of_a_long_report_is_kept():
    text = _clipped("é\x00 line\n" * 50_000 + "ValueError: the last\n").decode()
    assert len(text.encode()) < 60 * 1024
    assert text.startswith("gradsync: (the beginning of this report is left out)\n")
    assert text.endswith("ValueError: the last\n")


def test_which_end_is_the_cause():
    own = report_of(2, outcome(failed(4)))
    late = report_of(1, outcome(failed(2, stopped=True)))
    suffering = report_of(0, outcome(failed(0, consequence=True)))
    stopped = report_of(3, outcome(RankOutcome(6, 106, -15, order=0, was_asked_to_end=True)))
    lost, signalled = loss_report(4, "is gone"), signal_report(5, 2)
    in_order = [signalled, lost, own, late, suffering, stopped]
    for first, cause in enumerate(in_order):
        assert cause_of(reversed(in_order[first:]), None) is cause


def test_of_equal_ends_the_first_that_was_told_counts():
    reports = [report_of(node, outcome(failed(node))) for node in range(3)]
    assert cause_of(reports, 2).node == 2
    assert cause_of(reports, None).node == 0


def test_exit_codes():
    assert report_of(0, outcome(failed(0, code=7), signal_number=15)).exit_code == 143
    assert report_of(0, outcome(RankOutcome(0, 100, 7, order=0))).exit_code == 7
    assert report_of(0, outcome(RankOutcome(0, 100, -9, order=0))).exit_code == 137
    assert not signal_report(0, 2).may_retry
    assert not report_of(0, outcome(RankOutcome(0, 100, None, order=0))).may_retry

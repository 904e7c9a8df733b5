"""The supervisor's loop with ranks that are not processes, in six cases that real ones cannot be made to do.

A rank that no SIGKILL ends, two reports in one moment, and orders of events that a machine gives by chance.
"""

import contextlib
import os
import signal

import pytest

from gradsync.launching import supervisor
from gradsync.launching.in_rank.result import ErrorReport
from gradsync.launching.job import Job, Target
from gradsync.launching.outcome import RankOutcome
from gradsync.launching.signals import SignalInbox
from gradsync.launching.supervisor import Supervisor
from gradsync.rendezvous.secret_files import Endpoint


class PlayedRank:
    """A rank whose end and report the test writes; notes the signals that it is sent."""

    def __init__(self, rank, *, dies_of=(signal.SIGTERM, signal.SIGKILL)):
        self.rank = rank
        self.outcome = RankOutcome(rank, 1000 + rank)
        self.sent_kill = self.stopped = self.has_ended = False
        self.received = []
        self.abandoned = False
        self._dies_of = dies_of
        self._will_end_with = None
        self.sentinel = -1
        self.status, self._status_writer = os.pipe()
        self.report, self._report_writer = os.pipe()
        self._will_report = None

    def start(self, *_):
        """Has begun."""

    def end(self, exit_code):
        self._will_end_with = exit_code
        self._close_writers()

    def fail(self, error):
        self._will_report = error
        os.write(self._report_writer, b"!")

    def read_status(self):
        self.has_ended = True
        self.read_report()
        if self.outcome.error is None:
            self.outcome.exit_code = self._will_end_with
        return False

    def read_report(self):
        if self._will_report is not None:
            self.outcome.error, self.outcome.exit_code = self._will_report, 1
        return False

    def is_paused(self):
        return self.stopped

    def send_signal(self, number):
        self.received.append(signal.Signals(number))
        self.sent_kill = self.sent_kill or number == signal.SIGKILL
        if number in self._dies_of and self._status_writer >= 0:
            self.end(-number)

    def reap(self):
        self._close_readers()

    def abandon(self):
        self.abandoned = True
        self._close_writers()
        self._close_readers()

    def _close_writers(self):
        for descriptor in (self._status_writer, self._report_writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._status_writer = self._report_writer = -1

    def _close_readers(self):
        os.close(self.status)
        os.close(self.report)


@contextlib.contextmanager
def watching(*ranks, **options):
    elsewhere = Endpoint("127.0.0.1:1", b"s" * 32)  # nobody meets
    with pytest.MonkeyPatch.context() as patch, SignalInbox() as signals:
        patch.setattr(supervisor, "RankProcess", lambda rank: ranks[rank])
        job = Job(Target({}, ()), len(ranks), grace_seconds=0.05, endpoint=elsewhere)
        with Supervisor(job, signals, **options) as watch:
            watch.start()
            yield watch


def report(text="ValueError: boom", **options):
    return ErrorReport(text, text, **({"is_consequence": False} | options))


def then_ends(first, first_code, second, second_code):
    """Once `first` has told its failure, it ends; once it has ended, `second` does."""

    def act(rank):
        if rank is first and not first.has_ended:
            first.end(first_code)
        elif rank is first:
            second.end(second_code)

    return act


def test_a_rank_that_cannot_be_killed_is_reported_and_left():
    hanging, failing = PlayedRank(0, dies_of=[]), PlayedRank(1)
    with watching(hanging, failing) as watch:
        failing.end(1)
        outcome = watch.finish()
    assert hanging.abandoned
    assert hanging.received[:2] == [signal.SIGTERM, signal.SIGKILL]
    assert outcome.root_cause.rank == 1
    assert outcome.ranks[0].exit_code is None
    assert "could not be killed" in outcome.ranks[0].describe()
    assert not outcome.may_be_tried_again


def test_a_failure_outranks_a_result_that_cannot_be_sent():
    unsendable, failing = PlayedRank(0), PlayedRank(1)
    with watching(unsendable, failing) as watch:
        unsendable.fail(report("first", is_unsendable=True))
        failing.fail(report("second"))
        outcome = watch.finish()
    assert outcome.root_cause.rank == 1


def test_a_sigkill_for_want_of_memory_is_told_apart_from_the_launchers_own(monkeypatch):
    class Killer:
        def has_killed(self):
            return True

    monkeypatch.setattr(supervisor, "OomWatch", Killer)
    hungry, other = PlayedRank(0), PlayedRank(1, dies_of=[signal.SIGKILL])
    with watching(hungry, other) as watch:
        hungry.outcome.peak_bytes = 3 << 30
        hungry.end(-signal.SIGKILL)
        outcome = watch.finish()
    assert outcome.root_cause.memory_kill
    assert "it had used 3 GB" in outcome.root_cause.describe()
    assert not outcome.ranks[1].memory_kill


@pytest.mark.parametrize(("is_timeout", "is_paused"), [(True, False), (False, True), (False, False)])
def test_the_cause_is_awaited_only_from_a_rank_that_may_tell_it(is_timeout, is_paused, monkeypatch):
    # With the shipped second the order of events would be the machine's.
    monkeypatch.setattr(supervisor, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_ROOT_CAUSE_SECONDS", 3600.0)
    told, culprit = PlayedRank(0), PlayedRank(1, dies_of=[signal.SIGKILL])
    culprit.stopped = is_paused
    has_nothing_to_tell = is_timeout or is_paused
    on_change = None if has_nothing_to_tell else then_ends(told, 1, culprit, -signal.SIGABRT)
    with watching(told, culprit, on_change=on_change) as watch:
        told.fail(report("verdict", is_consequence=True, missed_rank=1, is_timeout=is_timeout))
        if has_nothing_to_tell:
            told.end(1)
        outcome = watch.finish()
    assert outcome.root_cause is outcome.ranks[0 if has_nothing_to_tell else 1]
    assert culprit.received == ([signal.SIGTERM, signal.SIGKILL] if has_nothing_to_tell else [])


def test_who_is_missed_is_stopped_only_when_all_others_have_ended(monkeypatch):
    monkeypatch.setattr(supervisor, "_AFTER_SILENCE_SECONDS", 3600.0)
    missed, first, second = PlayedRank(0), PlayedRank(1), PlayedRank(2)
    told_before_second_ended = []

    def on_change(rank):
        if rank is first and first.has_ended:
            told_before_second_ended.extend(missed.received)
            second.fail(report("it did not come", is_consequence=True, missed_rank=0, is_timeout=True))
            second.end(1)

    with watching(missed, first, second, on_change=on_change) as watch:
        first.fail(report("it did not come", is_consequence=True, missed_rank=0, is_timeout=True))
        first.end(1)
        watch.finish()
    assert told_before_second_ended == []
    assert [missed.received, first.received, second.received] == [[signal.SIGTERM], [], []]


def test_a_culprit_that_has_ended_well_has_nothing_to_tell(monkeypatch):
    """It has left the others alone by os._exit(0): whoever still runs is not given time to name another cause."""
    monkeypatch.setattr(supervisor, "_ROOT_CAUSE_SECONDS", 3600.0)
    culprit, told, waiting = PlayedRank(0), PlayedRank(1), PlayedRank(2, dies_of=[signal.SIGTERM])

    def on_change(rank):
        if rank is culprit:
            told.fail(report("verdict", is_consequence=True, missed_rank=0))
            told.end(1)

    with watching(culprit, told, waiting, on_change=on_change) as watch:
        culprit.end(0)
        outcome = watch.finish()
    assert outcome.root_cause is outcome.ranks[1]
    assert waiting.received == [signal.SIGTERM]

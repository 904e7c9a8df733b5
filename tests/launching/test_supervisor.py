"""The supervisor's loop with ranks that are not processes: what real ones cannot be made to do."""

import contextlib
import os
import signal
import time

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
            yield watch, signals


def report(text="ValueError: boom", **options):
    return ErrorReport(text, text, **({"is_consequence": False} | options))


def test_all_end_by_themselves():
    ranks = [PlayedRank(0), PlayedRank(1)]
    with watching(*ranks) as (watch, _):
        for rank in ranks:
            rank.end(0)
        outcome = watch.finish()
    assert outcome.exit_code == 0
    assert [rank.received for rank in ranks] == [[], []]


def test_failure_ends_the_others_in_order():
    polite, stubborn, failing = PlayedRank(0), PlayedRank(1, dies_of=[signal.SIGKILL]), PlayedRank(2)
    with watching(polite, stubborn, failing) as (watch, _):
        failing.end(3)
        outcome = watch.finish()
    assert outcome.root_cause.rank == 2
    assert outcome.exit_code == 3
    assert polite.received == [signal.SIGTERM]
    assert stubborn.received == [signal.SIGTERM, signal.SIGKILL]


def test_rank_that_cannot_be_killed_is_reported_and_left(monkeypatch):
    monkeypatch.setattr("gradsync.launching.supervisor._UNKILLABLE_SECONDS", 0.05)
    hanging, failing = PlayedRank(0, dies_of=[]), PlayedRank(1)
    with watching(hanging, failing) as (watch, _):
        failing.end(1)
        outcome = watch.finish()
    assert hanging.abandoned
    assert hanging.received[:2] == [signal.SIGTERM, signal.SIGKILL]
    assert outcome.root_cause.rank == 1
    assert "could not be killed" in outcome.ranks[0].describe()
    assert not outcome.may_be_tried_again


@pytest.fixture
def _no_time_to_settle(monkeypatch):
    """Has the other ranks stopped at once after a failure whose cause is not awaited, and never after another one."""
    monkeypatch.setattr("gradsync.launching.supervisor._SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("gradsync.launching.supervisor._ROOT_CAUSE_SECONDS", 3600.0)


def then_ends(first, first_code, second, second_code):
    """Once `first` has told its failure, it ends; once it has ended, `second` does."""

    def act(rank):
        if rank is first and not first.has_ended:
            first.end(first_code)
        elif rank is first:
            second.end(second_code)

    return act


@pytest.mark.usefixtures("_no_time_to_settle")
def test_result_that_cannot_be_sent_leaves_the_others_their_time():
    working, unsendable = PlayedRank(0), PlayedRank(1)
    with watching(working, unsendable, on_change=then_ends(unsendable, 1, working, 0)) as (watch, _):
        unsendable.fail(report(is_unsendable=True))
        outcome = watch.finish()
    assert working.received == []
    assert outcome.ranks[0].exit_code == 0
    assert outcome.root_cause.rank == 1


def test_failure_outranks_a_result_that_cannot_be_sent():
    unsendable, failing = PlayedRank(0), PlayedRank(1)
    with watching(unsendable, failing) as (watch, _):
        unsendable.fail(report("first", is_unsendable=True))
        failing.fail(report("second"))
        outcome = watch.finish()
    assert outcome.root_cause.rank == 1


@pytest.mark.usefixtures("_no_time_to_settle")
def test_consequence_never_hides_the_original():
    told_first, original = PlayedRank(0), PlayedRank(1)
    with watching(told_first, original, on_change=then_ends(told_first, 1, original, -signal.SIGSEGV)) as (watch, _):
        told_first.fail(report("RankFailed: rank 1 died", is_consequence=True))
        outcome = watch.finish()
    assert original.received == []
    assert outcome.root_cause.rank == 1
    assert outcome.exit_code == 128 + signal.SIGSEGV


def test_sigkill_is_told_apart_from_one_of_the_kernels_for_want_of_memory(monkeypatch):
    class Killer:
        def has_killed(self):
            return True

    monkeypatch.setattr("gradsync.launching.supervisor.OomWatch", Killer)
    hungry, other = PlayedRank(0), PlayedRank(1, dies_of=[signal.SIGKILL])
    with watching(hungry, other) as (watch, _):
        hungry.outcome.peak_bytes = 3 << 30
        hungry.end(-signal.SIGKILL)
        outcome = watch.finish()
    assert "was killed by SIGKILL: the kernel's out-of-memory killer ended it; it had used 3 GB" in (
        outcome.root_cause.describe()
    )
    assert not outcome.ranks[1].memory_kill  # we killed it


def test_it_looks_at_the_memory_while_nothing_happens(monkeypatch):
    rank = PlayedRank(0)

    class Watch:
        def look(self):
            rank.end(0)

    monkeypatch.setattr("gradsync.launching.supervisor.OomWatch", Watch)
    monkeypatch.setattr("gradsync.launching.supervisor._LOOK_SECONDS", 0.01)
    with watching(rank) as (watch, _):
        assert watch.finish().exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_from_another_thread_ends_the_job(number):
    rank = PlayedRank(0, dies_of=[number])
    with watching(rank) as (watch, signals):
        signals.put(number)
        outcome = watch.finish()
    assert outcome.signal_number == number
    assert rank.received == [number]


def test_ranks_are_ended_when_the_launcher_itself_fails():
    rank = PlayedRank(0)
    with pytest.raises(ZeroDivisionError), watching(rank):
        raise ZeroDivisionError
    assert rank.received == [signal.SIGKILL]


@pytest.mark.parametrize(("is_timeout", "is_paused"), [(True, False), (False, True), (False, False)])
@pytest.mark.usefixtures("_no_time_to_settle")
def test_cause_is_awaited_only_from_a_rank_that_may_tell_it(is_timeout, is_paused):
    told, culprit = PlayedRank(0), PlayedRank(1, dies_of=[signal.SIGKILL])
    culprit.stopped = is_paused
    has_nothing_to_tell = is_timeout or is_paused
    on_change = None if has_nothing_to_tell else then_ends(told, 1, culprit, -signal.SIGABRT)
    with watching(told, culprit, on_change=on_change) as (watch, _):
        told.fail(report("verdict", is_consequence=True, missed_rank=1, is_timeout=is_timeout))
        if has_nothing_to_tell:
            told.end(1)
        outcome = watch.finish()
    assert outcome.root_cause is outcome.ranks[0 if has_nothing_to_tell else 1]
    assert culprit.received == ([signal.SIGTERM, signal.SIGKILL] if has_nothing_to_tell else [])


def test_who_is_missed_is_stopped_as_soon_as_all_others_have_ended(monkeypatch):
    monkeypatch.setattr("gradsync.launching.supervisor._AFTER_SILENCE_SECONDS", 60.0)
    missed, first, second = PlayedRank(0), PlayedRank(1), PlayedRank(2)
    told_before_second_ended = []

    def on_change(rank):
        if rank is first and first.has_ended:
            told_before_second_ended.extend(missed.received)
            second.fail(report("it did not come", is_consequence=True, missed_rank=0, is_timeout=True))
            second.end(1)

    began = time.monotonic()
    with watching(missed, first, second, on_change=on_change) as (watch, _):
        first.fail(report("it did not come", is_consequence=True, missed_rank=0, is_timeout=True))
        first.end(1)
        watch.finish()
    assert time.monotonic() - began < 30.0
    assert told_before_second_ended == []
    assert [missed.received, first.received, second.received] == [[signal.SIGTERM], [], []]


@pytest.mark.usefixtures("_no_time_to_settle")
def test_a_culprit_that_has_ended_well_has_nothing_to_tell():
    """It has left the others alone by os._exit(0): whoever still runs is not given time to name another cause."""
    culprit, told, waiting = PlayedRank(0), PlayedRank(1), PlayedRank(2, dies_of=[signal.SIGTERM])

    def on_change(rank):
        if rank is culprit:
            told.fail(report("verdict", is_consequence=True, missed_rank=0))
            told.end(1)

    with watching(culprit, told, waiting, on_change=on_change) as (watch, _):
        culprit.end(0)
        outcome = watch.finish()
    assert outcome.root_cause is outcome.ranks[1]
    assert waiting.received == [signal.SIGTERM]

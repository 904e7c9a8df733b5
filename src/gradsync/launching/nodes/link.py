"""What the launchers tell each other during one start of the ranks: that it fails, and in the end how it ended.

Two threads wait for the others, so that the launcher's own loop never does: what they hear comes into its inbox of
signals. A launcher that dies, or whose machine is cut off, is told by the rendezvous.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from gradsync.errors import CommunicatorClosed, GradsyncError, RankFailed, describe
from gradsync.launching.nodes.meeting import Meeting
from gradsync.launching.nodes.node_report import FirstWord, NodeReport, cause_of, loss_report, signal_report
from gradsync.launching.notices import Notices
from gradsync.launching.signal_inbox import FAILED_ELSEWHERE, NEWS_ELSEWHERE, SUFFERED_ELSEWHERE, SignalInbox

_AS_LONG_AS_IT_TAKES_SECONDS = 1e8  # the heartbeats end a wait for a launcher that is gone
_THREAD_SECONDS = 1.0
_REPORT_SECONDS = 60.0  # after a failure: more than ranks take that have to be killed
_LOOK_EVERY_MILLISECONDS = 500
_NODE_0_LOST = "the rendezvous that it hosts is gone, or this machine is cut off"


@dataclass(frozen=True)
class Verdict:
    """How a start of the ranks ended on all machines.

    Attributes:
        cause: the report on the machine that was the cause; None where all ended well.
        is_lost: whether a launcher is gone, so that no other can be asked.
        may_retry: whether the ranks may be started again.
    """

    cause: NodeReport | None
    is_lost: bool
    may_retry: bool


class NodeLink:
    """This launcher's connection to the others during one start; a context, which ends it.

    Args:
        meeting: the launchers that have met.
        signals: the inbox of this launcher, entered.
        notices: where a Ctrl-C is answered with a line.
    """

    def __init__(self, meeting: Meeting, signals: SignalInbox, notices: Notices) -> None:
        self._client = meeting.client
        self._nodes = meeting.nodes
        self._node = meeting.own.node
        self._signals = signals
        self._notices = notices
        self._first_node: int | None = None  # that has said that it fails
        self._first_report: NodeReport | None = None  # that it gave at once
        self._loss: NodeReport | None = None
        self._reports: list[NodeReport] = []
        self._gathered = threading.Event()
        self._is_over = False
        self._is_incomplete = False  # not all have told how their ranks ended
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> NodeLink:
        self._run(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._client.report_failure(describe(error))
        if self._loss is None:
            self._client.close()
        else:
            self._client.abandon()
        for thread in self._threads:
            thread.join(_THREAD_SECONDS)
        self._is_over = True

    def tell_stopping(self, only_suffers: bool) -> None:
        """Tells the others that the ranks here fail, and end; returns at once.

        Args:
            only_suffers: whether that is because of a rank on another machine, as far as is known.
        """
        self._run(lambda: self._tell_first(only_suffers))

    def settle(self, report: NodeReport) -> Verdict:
        """Tells how the ranks here have ended, and waits until all others have told it too, or one is lost.

        A signal meanwhile ends the others; a second one ends the wait. After a failure the others have a minute.
        """
        self._run(lambda: self._gather(report))
        interrupted: NodeReport | None = None
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        failed_at: float | None = None
        while not self._gathered.is_set():
            poll.poll(_LOOK_EVERY_MILLISECONDS)
            if self._first_node is not None or report.level is not None:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at >= _REPORT_SECONDS:
                    self._stop_waiting()
            for number in self._signals.read():
                if number == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif number < signal.NSIG and (interrupted is not None or report.is_signalled):
                    self._gathered.set()
                elif number < signal.NSIG:
                    interrupted = self._interrupt(number)
        return self._judge([report, interrupted])

    def _stop_waiting(self) -> None:
        """Goes on without the reports that have not come: a launcher may be stopped, or its terminal stand still."""
        silent = self._nodes[len(self._reports)]
        self._notices.tell(
            f"gradsync: node {silent.node} ({silent.host}, {silent.address}) has not told how its ranks ended within "
            f"{_REPORT_SECONDS:g} s of a failure; not waiting for it any more"
        )
        self._is_incomplete = True
        self._gathered.set()

    def _interrupt(self, number: int) -> NodeReport:
        """Ends the ranks of the others, where those here have ended already."""
        report = signal_report(self._node, number)
        self._notices.tell("gradsync: stopping the ranks of the other nodes (Ctrl-C again leaves at once)")
        self._run(lambda: self._tell_first(False, report))
        return report

    def _judge(self, own: list[NodeReport | None]) -> Verdict:
        known = [*self._reports, *own, self._first_report, self._loss]
        reports = list({id(report): report for report in known if report is not None}.values())
        cause = cause_of(reports, self._first_node)
        may_retry = cause is not None and not self._is_incomplete and all(report.may_retry for report in reports)
        return Verdict(cause, self._loss is not None or self._is_incomplete, may_retry)

    def _listen(self) -> None:
        """Waits until a launcher says that its ranks fail, or is gone."""
        try:
            told = self._client.get("first", timeout_seconds=_AS_LONG_AS_IT_TAKES_SECONDS)
            word = FirstWord.from_bytes(told)
        except CommunicatorClosed:
            return
        except GradsyncError as error:
            if self._client.has_failed():  # else the others are done, and have left
                self._lose(error)
            return
        self._first_node, self._first_report = word.node, word.report
        if word.node != self._node:
            self._wake(SUFFERED_ELSEWHERE if word.only_suffers else FAILED_ELSEWHERE)

    def _tell_first(self, only_suffers: bool, report: NodeReport | None = None) -> None:
        """Says that the ranks here fail, unless a launcher has said so before: one is enough to end all."""
        word = FirstWord(self._node, only_suffers, report)
        with contextlib.suppress(GradsyncError):  # who listens hears of it
            self._client.set("first", word.to_bytes(), replace=False)

    def _gather(self, report: NodeReport) -> None:
        try:
            if report.level is not None:
                self._tell_first(report.only_suffers)
            self._client.set(f"report/{self._node}", report.to_bytes())
            for record in self._nodes:
                told = self._client.get(
                    f"report/{record.node}", from_rank=record.node, timeout_seconds=_AS_LONG_AS_IT_TAKES_SECONDS
                )
                self._reports.append(NodeReport.from_bytes(told))
        except CommunicatorClosed:
            return
        except GradsyncError as error:
            self._lose(error)
        self._gathered.set()
        self._wake(NEWS_ELSEWHERE)

    def _lose(self, error: GradsyncError) -> None:
        """Notes that a launcher is gone: the one that the server names, or node 0, which has it."""
        node = error.rank if isinstance(error, RankFailed) and error.rank is not None else 0
        if self._loss is None:
            if isinstance(error, RankFailed):
                why = str(error).partition(": ")[2]
            else:
                why = f"{_NODE_0_LOST}: {str(error).partition(': ')[2]}"
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - _silent_seconds(why)))
            self._loss = loss_report(node, f"is gone since {since}: {why}")
        self._wake(FAILED_ELSEWHERE)

    def _wake(self, number: int) -> None:
        if not self._is_over:  # then the inbox is about to close
            self._signals.put(number)

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="gradsync nodes", daemon=True)
        self._threads.append(thread)
        thread.start()


def _silent_seconds(why: str) -> float:
    """Returns for how long a lost launcher had been silent, as the rendezvous tells it; 0 where its end was seen."""
    found = re.search(r"not heard of for ([\d.]+) s", why)
    return 0.0 if found is None else float(found[1])

"""A run on several machines, as the launcher of one of them goes through it: meet, start, end together, try again.

During a start the launchers tell each other that it fails, and in the end how it ended. Two threads wait for the
others, so that the launcher's own loop never does: what they hear comes into its inbox of signals. A launcher that
dies, or whose machine is cut off, is told by the rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from types import FrameType, TracebackType
from typing import NamedTuple

from gradsync.arguments import parse_address
from gradsync.errors import CommunicatorClosed, GradsyncError, InvalidArgument, RankFailed, RendezvousError, describe
from gradsync.launching.job import Job
from gradsync.launching.nodes.meeting import (
    SAME_VERSION,
    Meeting,
    NodeOptions,
    Offer,
    StartPorts,
    hosting,
    meet,
    start_ports,
)
from gradsync.launching.outcome import Outcome, distance_from_cause, failure_text, lines_on_others, signal_name
from gradsync.launching.output import Notices
from gradsync.launching.rank_report import from_told
from gradsync.launching.signals import FAILED_ELSEWHERE, NEWS_ELSEWHERE, SUFFERED_ELSEWHERE, SignalInbox
from gradsync.launching.supervisor import MakeOutput, Supervisor
from gradsync.rendezvous.server import RendezvousServer

_LEAVING_SECONDS = 5.0  # for the other launchers to say goodbye, once all have told how their ranks ended
_LEAVING_AFTER_LOSS_SECONDS = 0.5
_REPORT_SECONDS = 1.0  # for a terminal that stands still

_AS_LONG_AS_IT_TAKES_SECONDS = 1e8  # the heartbeats end a wait for a launcher that is gone
_THREAD_SECONDS = 1.0
_REPORT_SECONDS = 60.0  # after a failure: more than ranks take that have to be killed
_NODE_0_LOST = "the rendezvous that it hosts is gone, or this machine is cut off"


_MAX_TEXT_BYTES = 40 * 1024  # in a value of at most 60 KiB

# How near to the cause an end is. A signal to a launcher comes first, and one that is lost: no rank's failure can be
# why. Then come the failures of ranks, as `distance_from_cause` sorts them.
_SIGNALLED, _LOST, _SUFFERING = -2, -1, 2


def run_on_nodes(options: NodeOptions, job: Job, make_output: MakeOutput, notices: Notices) -> int:
    """Runs the ranks of this machine, together with those of the others.

    Args:
        options: this machine among the others.
        job: what to run here, as if there were no other machine.
        make_output: see `Supervisor`.
        notices: where it is told what happens.

    Returns:
        The exit code, the same on all machines.

    Raises:
        InvalidArgument: the options do not fit this machine, or those of the others.
        AuthenticationError, RendezvousError, RendezvousTimeout: the launchers do not meet.
    """
    with _ended_by_signals(), hosting(options, notices) as server:
        return _NodeRun(options, job, make_output, notices, server).run()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets signals end this launcher in good order also while no ranks run, and it waits for the others.

    Otherwise they would end it where it stands, and what it has made, such as the state directory, would stay.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # else it is ignored, or somebody else's
                previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _End(NamedTuple):
    """How a start ended: the verdict, how often there had been one before, and the report."""

    verdict: Verdict
    restart: int
    report: str


class _NodeRun:
    """The starts of one run, one after the other."""

    def __init__(
        self,
        options: NodeOptions,
        job: Job,
        make_output: MakeOutput,
        notices: Notices,
        server: RendezvousServer | None,
    ) -> None:
        self._options = options
        self._job = job
        self._make_output = make_output
        self._notices = notices
        self._server = server

    def run(self) -> int:
        """Starts the ranks as often as need be."""
        offer = Offer(self._job.n_ranks, self._job.max_restarts)
        while True:
            verdict, restart, report = self._start(offer)
            if verdict.cause is None:
                self._leave(verdict)
                return 0
            is_last = not verdict.may_retry or restart >= self._job.max_restarts
            self._tell(report, is_last=is_last)
            if is_last:
                self._leave(verdict)
                return verdict.cause.exit_code
            offer = replace(offer, restart=restart + 1)
            how_often = f"restart {offer.restart} of at most {self._job.max_restarts}"
            when = f", once node {verdict.cause.node} is back" if verdict.is_lost else ""
            self._notices.tell(f"gradsync: starting all ranks again{when} ({how_often})")

    def _leave(self, verdict: Verdict) -> None:
        """Lets the others leave before node 0 does; one that is cut off never says goodbye."""
        if self._server is not None:
            self._server.wait_until_empty(_LEAVING_AFTER_LOSS_SECONDS if verdict.is_lost else _LEAVING_SECONDS)

    def _start(self, offer: Offer) -> _End:
        """Goes through one start."""
        with contextlib.ExitStack() as stack:
            host = None if self._server is None else parse_address(self._server.address)[0]
            ports = None if host is None else stack.enter_context(start_ports(host))
            meeting = self._meet(offer, ports)
            signals = stack.enter_context(SignalInbox())
            link = stack.enter_context(NodeLink(meeting, signals, self._notices))
            job = self._job_of(meeting)
            self._tell_place(meeting, job)
            supervisor = Supervisor(
                *(job, signals),
                make_output=self._make_output,
                notices=self._notices,
                server=stack.enter_context(self._serving(job, ports)),
                on_stopping=link.tell_stopping,
            )
            with supervisor:
                supervisor.start(meeting.restart)
                outcome = supervisor.finish_start()
            verdict = link.settle(report_of(meeting.own.node, outcome))
        return _End(verdict, meeting.restart, _report(verdict, outcome, meeting))

    def _meet(self, offer: Offer, ports: StartPorts | None) -> Meeting:
        address = self._options.rendezvous if self._server is None else self._server.address
        while True:
            try:
                return meet(self._options, address, offer, ports, self._notices)
            except RankFailed as error:  # it had joined, and has not told what it brings
                self._notices.tell(f"gradsync: {self._options.name} waits for others anew: {error}")

    def _job_of(self, meeting: Meeting) -> Job:
        """Returns the job of this machine's ranks in this start."""
        stdin_rank = self._job.stdin_rank
        if stdin_rank is not None and stdin_rank >= meeting.world_size:
            raise InvalidArgument(f"--stdin needs a rank from 0 to {meeting.world_size - 1}, or none, got {stdin_rank}")
        return replace(
            self._job,
            world_size=meeting.world_size,
            rank_start=meeting.rank_start,
            master_addr=meeting.nodes[0].address,
            master_port=meeting.nodes[0].master_port,
            endpoint=meeting.endpoint(self._options.secret),
            node=meeting.place(),
            network=meeting.network(),
        )

    def _tell_place(self, meeting: Meeting, job: Job) -> None:
        own = meeting.own
        ranks = f"rank {job.rank_start}" if job.n_ranks == 1 else f"ranks {job.rank_start} to {job.ranks[-1]}"
        self._notices.tell(
            f"gradsync: node {own.node} of {len(meeting.nodes)} ({own.host}): {ranks} of {job.world_size}, at "
            f"{own.address} ({own.interface or 'no interface known'}); rendezvous at {self._options.rendezvous}"
        )

    @contextlib.contextmanager
    def _serving(self, job: Job, ports: StartPorts | None) -> Iterator[RendezvousServer | None]:
        """Runs the ranks' rendezvous server on node 0, until the ranks of all machines have ended."""
        if ports is None or job.endpoint is None:
            yield None
            return
        with RendezvousServer(job.world_size, secret=job.endpoint.secret, listener=ports.listener) as server:
            yield server

    def _tell(self, report: str, *, is_last: bool) -> None:
        """Tells why the ranks failed; a terminal that stands still keeps nobody from going, or starting again."""
        if is_last:
            self._notices.insist(report)
        else:
            self._notices.tell(report, wait_seconds=_REPORT_SECONDS)


def _report(verdict: Verdict, outcome: Outcome, meeting: Meeting) -> str:
    """Says why a start failed, in the same words on all machines, after what else failed on this one."""
    cause = verdict.cause
    if cause is None:
        return ""
    is_told_below = cause.node == meeting.own.node and not verdict.is_lost
    before = "" if is_told_below else lines_on_others(outcome)
    head = f"gradsync: {meeting.nodes[cause.node].name} {cause.how}"
    return f"{before}{head}{':' if cause.text else ''}\n{cause.text}".rstrip("\n")


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
        self._has_gathered = False
        self._waking = threading.Lock()
        self._is_over = False  # then the inbox is about to close
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
        with self._waking:
            self._is_over = True

    def tell_stopping(self, only_suffers: bool) -> None:
        """Tells the others that the ranks here fail, and end; returns at once.

        Args:
            only_suffers: whether that is because of a rank on another machine, as far as is known.
        """
        word = NodeReport(self._node, _SUFFERING if only_suffers else 0)
        self._run(lambda: self._tell_first(word))

    def settle(self, report: NodeReport) -> Verdict:
        """Tells how the ranks here have ended, and waits until all others have told it too, or one is lost.

        A signal meanwhile ends the others; a second one ends the wait. After a failure the others have a minute.
        """
        self._run(lambda: self._gather(report))
        interrupted: NodeReport | None = None
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        deadline: float | None = None
        while not self._has_gathered:
            if deadline is None and (self._first_node is not None or report.level is not None):
                deadline = time.monotonic() + _REPORT_SECONDS
            poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000.0)
            if deadline is not None and time.monotonic() >= deadline and not self._has_gathered:
                self._stop_waiting()
            for number in self._signals.read():
                if number == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif number < signal.NSIG and (interrupted is not None or report.is_signalled):
                    self._has_gathered = True
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
        self._has_gathered = True

    def _interrupt(self, number: int) -> NodeReport:
        """Ends the ranks of the others, where those here have ended already."""
        report = signal_report(self._node, number)
        self._notices.tell("gradsync: stopping the ranks of the other nodes (Ctrl-C again leaves at once)")
        self._run(lambda: self._tell_first(report))
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
            word = NodeReport.from_bytes(told)
        except CommunicatorClosed:
            return
        except GradsyncError as error:
            if self._client.has_failed():  # else the others are done, and have left
                self._lose(error)
            return
        self._first_node, self._first_report = word.node, word if word.how else None
        if word.node == self._node:
            self._wake(NEWS_ELSEWHERE)
        else:
            self._wake(SUFFERED_ELSEWHERE if word.only_suffers else FAILED_ELSEWHERE)

    def _tell_first(self, word: NodeReport) -> None:
        """Says that the ranks here fail, unless a launcher has said so before: one is enough to end all.

        Args:
            word: with what happened, in words, from a launcher whose ranks have ended already.
        """
        with contextlib.suppress(GradsyncError):  # who listens hears of it
            self._client.set("first", word.to_bytes(), replace=False)

    def _gather(self, report: NodeReport) -> None:
        try:
            if report.level is not None:
                self._tell_first(NodeReport(self._node, report.level))
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
        self._has_gathered = True
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
        with self._waking:
            if not self._is_over:
                self._signals.put(number)

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="gradsync nodes", daemon=True)
        self._threads.append(thread)
        thread.start()


def _silent_seconds(why: str) -> float:
    """Returns for how long a lost launcher had been silent, as the rendezvous tells it; 0 where its end was seen."""
    found = re.search(r"not heard of for ([\d.]+) s", why)
    return 0.0 if found is None else float(found[1])


@dataclass(frozen=True)
class NodeReport:
    """How a start of the ranks ended on one machine.

    Attributes:
        node: the machine's number.
        level: how near to the cause it is, the least is nearest; None where nothing failed.
        how: what happened to the node, in words that follow its name.
        text: the report on its ranks, whole lines.
        exit_code: for all launchers, where this is the cause.
        may_retry: whether the ranks may be started again.
    """

    node: int
    level: int | None = None
    how: str = ""
    text: str = ""
    exit_code: int = 0
    may_retry: bool = True

    @property
    def is_signalled(self) -> bool:
        """Whether somebody told the launcher to end."""
        return self.level == _SIGNALLED

    @property
    def only_suffers(self) -> bool:
        """Whether its ranks failed, as far as is known, only because of one on another machine."""
        return self.level is not None and self.level >= _SUFFERING

    def to_bytes(self) -> bytes:
        """Returns what `from_bytes` takes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeReport:
        """Returns what another launcher has told.

        Raises:
            RendezvousError: that is no such report.
        """
        try:
            return from_told(cls, data)
        except ValueError as error:
            raise RendezvousError(f"the report of another launcher cannot be read: {error}; {SAME_VERSION}") from None


def report_of(node: int, outcome: Outcome) -> NodeReport:
    """Returns the report on the ranks of this machine."""
    root = outcome.root_cause
    if outcome.signal_number is not None:
        return signal_report(node, outcome.signal_number, failure_text(outcome))
    if root is None:
        return NodeReport(node)
    level = distance_from_cause(root)[0]
    text = _clipped(failure_text(outcome))
    return NodeReport(node, level, "failed", text, outcome.exit_code, outcome.may_be_tried_again)


def signal_report(node: int, number: int, text: str = "") -> NodeReport:
    """Returns the report of a launcher that was told to end."""
    how = f"was stopped by {signal_name(number)}"
    return NodeReport(node, _SIGNALLED, how, _clipped(text), 128 + number, may_retry=False)


def loss_report(node: int, how: str) -> NodeReport:
    """Returns a report on behalf of a launcher that cannot tell it."""
    return NodeReport(node, _LOST, how, exit_code=1)


def cause_of(reports: Iterable[NodeReport], first_node: int | None) -> NodeReport | None:
    """Returns the cause; None where nothing failed.

    Args:
        reports: of all machines, as far as they are known.
        first_node: the one that was the first to say that it has failed, if one did.
    """
    failed = [report for report in reports if report.level is not None]
    return min(failed, key=lambda report: (report.level, report.node != first_node, report.node), default=None)


def _clipped(text: str) -> str:
    """Leaves out the beginning of a long text: the cause comes last."""
    if len(json.dumps(text)) <= _MAX_TEXT_BYTES:
        return text
    while len(json.dumps(text)) > _MAX_TEXT_BYTES:
        text = text[len(text) // 8 + 1 :]
    return f"gradsync: (the beginning of this report is left out)\n{text.partition(chr(10))[2]}"

"""A run on several machines, as the launcher of one of them goes through it: meet, start, end together, try again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import NamedTuple

from gradsync.arguments import parse_address
from gradsync.errors import InvalidArgument, RankFailed
from gradsync.launching.failure_report import lines_on_others
from gradsync.launching.job import Job
from gradsync.launching.nodes.hosting import StartPorts, hosting, start_ports
from gradsync.launching.nodes.link import NodeLink, Verdict
from gradsync.launching.nodes.meeting import Meeting, Offer, meet
from gradsync.launching.nodes.node_options import NodeOptions
from gradsync.launching.nodes.node_report import report_of
from gradsync.launching.notices import Notices
from gradsync.launching.outcome import Outcome
from gradsync.launching.signal_inbox import SignalInbox
from gradsync.launching.supervisor import MakeOutput, Supervisor
from gradsync.rendezvous.server import RendezvousServer

_LEAVING_SECONDS = 5.0  # for the other launchers to say goodbye, once all have told how their ranks ended
_LEAVING_AFTER_LOSS_SECONDS = 0.5
_REPORT_SECONDS = 1.0  # for a terminal that stands still


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
            stack.enter_context(self._serving(job, ports))
            outcome = self._supervise(job, meeting, signals, link)
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
    def _serving(self, job: Job, ports: StartPorts | None) -> Iterator[None]:
        """Runs the ranks' rendezvous server on node 0, until the ranks of all machines have ended."""
        if ports is None or job.endpoint is None:
            yield
            return
        with RendezvousServer(job.world_size, secret=job.endpoint.secret, listener=ports.listener):
            yield

    def _supervise(self, job: Job, meeting: Meeting, signals: SignalInbox, link: NodeLink) -> Outcome:
        supervisor = Supervisor(
            job, signals, make_output=self._make_output, notices=self._notices, on_stopping=link.tell_stopping
        )
        with supervisor:
            supervisor.start(meeting.restart)
            return supervisor.finish_start()

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

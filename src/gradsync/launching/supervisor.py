"""The supervisor: starts the ranks of a job, watches them, and ends all ranks when one fails.

If only the return value of a rank cannot be sent, the supervisor lets the other ranks finish. If the job may go on with
fewer ranks (`Job.min_ranks`), it lets them go on while there are so many, and starts ranks again (`Job.respawns`).

`gradsync run`, `gs.launch`, `gs.launcher` and `gs.spawn` use it. Its loop waits for one of these: a rank ends (its
guard tells); a rank sends its report; a signal to the launcher comes; the server tells of a rank; it is time to send
the next signal to ranks that must end. It does not poll; it only looks once a minute whether memory ran out.

Why a run ends is decided here alone: by the signal to the launcher, if one ended it, else by the failures of the ranks
in the order in which they were found (`Outcome`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from gradsync.environment import check_variables
from gradsync.errors import BackendUnavailable, count
from gradsync.launching.in_rank.guard import WARNING
from gradsync.launching.job import Job, log_added_variables, rank_environment
from gradsync.launching.outcome import FormedWorld, OomWatch, Outcome, RankOutcome, failure_text
from gradsync.launching.output import REPORT_SECONDS, Notices
from gradsync.launching.rank_process import RankProcess, start_record
from gradsync.launching.signals import SignalInbox
from gradsync.machine import HOW_TO_RAISE_THE_LIMIT, reserve_port
from gradsync.rendezvous.secret_files import Endpoint
from gradsync.rendezvous.sockets import bind_listener, format_address, raise_limit

if TYPE_CHECKING:
    from gradsync.launching.output import OutputForwarder
    from gradsync.rendezvous.server import RendezvousServer

# After a failure: how long this launcher keeps its server for the ranks of other launchers. The server tells them at
# once, and the report waits meanwhile.
_LEAVING_SECONDS = 0.3
_TELL_AFTER_SECONDS = 5.0
_LAST_OUTPUT_SECONDS = 2.0  # how long to wait for a blocked terminal after a signal or an exception
_CHECK_SIGNALS_SECONDS = 0.2
_FILES_OF_A_RANK = 9  # pipes for status, report, commands and output; the result; the connection to the server

# After a failure the launcher first waits: the other ranks hear of it, and may end by themselves. If the failure only
# follows from that of another rank, it waits longer, so that this one can still report its own.
_SETTLE_SECONDS = 0.1
_ROOT_CAUSE_SECONDS = 1.0
_AFTER_SILENCE_SECONDS = 0.05  # because all ranks that waited for a silent rank fail at the same moment
_LOOK_SECONDS = 60.0
_UNKILLABLE_SECONDS = 1.8  # a little longer than the guard tries to kill its rank
_HELPERS_SECONDS = 4.9  # how much longer the guard of a killed rank may need for helpers that clean up

_GIVE_UP = 0  # in place of a signal: abandon the ranks that still run

#: Makes what shows the output of one start of the ranks; takes the number of restarts before it.
MakeOutput = Callable[[int], "OutputForwarder"]
_SILENT = Notices(None)


def supervise(job: Job, *, make_output: MakeOutput | None = None, notices: Notices = _SILENT) -> Outcome:
    """Runs a job until all its ranks have ended; restarts all ranks after a failure, as often as the job allows.

    It hosts the rendezvous server of the run, unless another launcher does. Called by the main thread, it handles
    SIGINT, SIGTERM and SIGHUP, which end the job: the first goes on to the ranks, or kills them if they have been asked
    to end already.

    Args:
        make_output: makes what shows the ranks' output; by default the ranks write to this process's own streams.
        notices: prints notices after Ctrl-C and before a restart; by default nobody does.

    Returns:
        How every rank ended. A failed rank raises nothing here.

    Raises:
        BackendUnavailable, InvalidArgument, RendezvousError: see `Supervisor.start`.
    """
    with SignalInbox() as signals:
        restart = 0
        while True:
            with Supervisor(job, signals, make_output=make_output, notices=notices, restart=restart) as supervisor:
                supervisor.start()
                outcome = supervisor.finish()
            if not outcome.may_be_tried_again or restart >= job.max_restarts:
                return outcome
            restart += 1
            notices.print(failure_text(outcome).rstrip("\n"), wait_seconds=REPORT_SECONDS)
            how_often = f"restart {restart} of at most {job.max_restarts}"
            notices.print(f"gradsync: starting all ranks again ({how_often})")


class _Ending:
    """The plan by which the ranks are ended: signals, and the seconds before each. Nothing, until the job must end.

    Attributes:
        due_at: when the next signal is due, in monotonic seconds; None without a plan.
        has_begun: whether the ranks have been asked to end.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, int]] = []
        self.due_at: float | None = None
        self.has_begun = False

    def plan(self, *steps: tuple[float, int]) -> None:
        """Sets the plan. Ranks that survive its last signal, SIGKILL, are given up."""
        self._steps = [*steps, (_UNKILLABLE_SECONDS, _GIVE_UP), (_HELPERS_SECONDS, _GIVE_UP)]
        self.due_at = time.monotonic() + steps[0][0]

    def hasten(self, seconds: float) -> None:
        """Brings the first signal forward, if it is due later than in `seconds`."""
        if self.due_at is not None and not self.has_begun:
            self.due_at = min(self.due_at, time.monotonic() + seconds)

    def next_signal(self) -> int | None:
        """Returns the signal that is due now, or _GIVE_UP; None if none is."""
        if self.due_at is None or time.monotonic() < self.due_at:
            return None
        number = self._steps.pop(0)[1]
        self.due_at = time.monotonic() + self._steps[0][0] if self._steps else None
        return number


class _Lost(NamedTuple):
    """A rank that lives, and that the others have given up: the launcher has to end it; and the reason, in words."""

    rank: int
    why: str


class _News:
    """What the server tells of the ranks, in its own thread, until the supervisor's loop reads it.

    Attributes:
        descriptor: readable while there is something to read.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._news: deque[_Lost | FormedWorld] = deque()

    def put(self, news: _Lost | FormedWorld) -> None:
        self._news.append(news)
        os.eventfd_write(self.descriptor, 1)

    def read(self) -> list[_Lost | FormedWorld]:
        """Returns what has come since the last call, without waiting."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return [self._news.popleft() for _ in range(len(self._news))]


class Supervisor:
    """Runs the ranks of a job once, in two steps: `start` and `finish`. The caller can do other work in between.

    When the context ends, no process of the ranks is left, except a process that the kernel could not kill.

    Args:
        job, make_output, notices: see `supervise`.
        signals: the signals to this process, in a `SignalInbox` whose `with` block has begun.
        restart: the number of times that the ranks have been started before.
        on_change: a function that `finish` calls with a rank when this rank has begun, reported or ended.

    Attributes:
        ranks: the rank processes, in the order of the ranks.
    """

    def __init__(
        self,
        job: Job,
        signals: SignalInbox,
        *,
        make_output: MakeOutput | None = None,
        notices: Notices = _SILENT,
        restart: int = 0,
        on_change: Callable[[RankProcess], None] | None = None,
    ) -> None:
        self._job = job
        self._signals = signals
        self._make_output = make_output
        self._notices = notices
        self._restart = restart
        self._on_change = on_change
        self._stack = contextlib.ExitStack()
        self._output: OutputForwarder | None = None
        self._server: RendezvousServer | None = None  # while this process hosts it
        self.ranks: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        self._named_to_server: set[int] = set()  # process ids that the server knows
        self._news: _News | None = None  # of the server, if it is here
        self._worlds: list[FormedWorld] = []  # that the ranks have formed, if the server is here
        self._n_failures = 0
        self._has_failed = False  # whether the run has failed; it may survive failures
        self._signal_number: int | None = None  # the signal that ends the job, once one has come
        self._has_joined = True  # whether a rank has joined the server, if it is here
        self._ending = _Ending()
        self._gave_up = False
        # If the others go on without a rank that fails:
        self._began = time.monotonic()
        self._respawns_left = job.respawns
        self._letting_go: dict[RankProcess, _Ending] = {}  # ranks that have failed, and may still run
        self._waiting: set[RankProcess] = set()  # ranks that were started again, and are in no world yet
        self._earlier: list[RankOutcome] = []
        self._tails: dict[RankOutcome, Callable[[], list[str]]] = {}
        self._is_state_lost = False  # whether all ranks have failed that were in the last world

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- Starting ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all rank processes; does not wait until their interpreters run.

        Raises:
            BackendUnavailable: the system allows no more processes, threads or open files, or lacks what ranks need.
            InvalidArgument: an environment variable has a value that the ranks would refuse, or the folder for logs
                cannot be made or written to.
            RendezvousError: the job's rendezvous port is taken.
        """
        check_variables()
        job = self._job
        if not os.path.exists("/proc/self/stat"):
            raise BackendUnavailable("starting ranks needs /proc, which is not there: mount -t proc proc /proc")
        raise_limit(_FILES_OF_A_RANK * job.n_ranks)
        try:
            if job.shared is not None:
                endpoint, listener = job.shared
            else:
                # The server's socket is bound now, so that ranks can start before the server does. Ranks of an earlier
                # start cannot join, because they do not know this secret.
                listener = self._stack.enter_context(bind_listener("127.0.0.1", job.rendezvous_port))
                endpoint = Endpoint(format_address(listener), os.urandom(32))
            self._endpoint = endpoint
            self._port = job.master_port or self._stack.enter_context(reserve_port()).getsockname()[1]
            self._memory = OomWatch()
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._signals.descriptor, selectors.EVENT_READ, self._handle_signals)
            if listener is not None:
                self._news = _News()
                self._stack.callback(os.close, self._news.descriptor)
                self._selector.register(self._news.descriptor, selectors.EVENT_READ, self._handle_news)
            if self._make_output is not None:
                self._output = self._make_output(self._restart)
                self._stack.callback(self._output.finish, _LAST_OUTPUT_SECONDS)
            self._null = os.open(os.devnull, os.O_RDONLY)
            self._stack.callback(os.close, self._null)
            record = start_record(job, endpoint.secret, shows_lines=self._output is not None)
            self._record = self._stack.enter_context(record)
            self._stack.callback(self._end_watching)
            for rank in range(job.rank_start, job.rank_start + job.n_ranks):
                self.start_rank(rank)
                if self._handle_signals():
                    break
        except OSError as error:
            raise BackendUnavailable(_refusal(job.rank_start + len(self.ranks), error)) from error
        # The server starts after the ranks, because their interpreters start meanwhile. A connection that comes before
        # the server runs waits in the listener's backlog.
        if listener is not None:
            assert self._news is not None
            self._stack.enter_context(self._serving(endpoint, listener, self._news))
        if self._output is not None:
            self._output.start()
        if self._restart == 0:
            log_added_variables(job)  # now, because the ranks start while this process imports logging

    def start_rank(self, number: int) -> None:
        """Starts the process of one rank, also again after its end; with pipes for its output if the launcher shows it.

        Raises:
            OSError: the system allows no more processes or open files.
        """
        rank, job = RankProcess(number), self._job
        local_rank = number - job.rank_start
        environ = rank_environment(job, local_rank, self._endpoint, self._port, self._restart)
        with contextlib.ExitStack() as theirs:
            streams = [0 if number == job.stdin_rank else self._null, 1, 2]
            if self._output is not None:
                readers = []
                for stream in (1, 2):
                    reader, streams[stream] = os.pipe()
                    readers.append(reader)
                    theirs.callback(os.close, streams[stream])
                # From here on `_output` closes these ends.
                self._tails[rank.outcome] = self._output.add(number, *readers)
            rank.start(job.target, self._record, environ, tuple(streams))
        self.ranks[local_rank : local_rank + 1] = [rank]
        self._running[number] = rank
        for descriptor in (rank.status, rank.report, rank.sentinel):
            if descriptor >= 0:
                self._selector.register(descriptor, selectors.EVENT_READ, rank)

    @contextlib.contextmanager
    def _serving(self, endpoint: Endpoint, listener: socket.socket, news: _News) -> Iterator[None]:
        """Runs the rendezvous server of this start in a thread of this process."""
        from gradsync.rendezvous.server import RendezvousServer  # imported here, because ranks start meanwhile

        job = self._job
        server = RendezvousServer(
            job.world_size,
            secret=endpoint.secret,
            listener=listener,
            min_ranks=job.min_ranks or 1,
            respawns=job.respawns > 0 and not job.has_others,  # it hears nothing of other machines' ranks
            # No methods: the server may live on until it is collected, and would keep all this.
            on_lost=lambda rank, why: news.put(_Lost(rank, why)),
            on_rebuilt=lambda *world: news.put(FormedWorld(*world)),
        )
        server.start()
        self._server = server
        try:
            yield
        finally:
            self._server = None
            server.stop()

    # -- Watching ------------------------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """Waits until the ranks have ended, and shows the rest of their output; returns how the ranks ended."""
        self._wait_for_ends()
        self._wait_for_other_launchers()
        if self._news is not None:
            self._handle_news()  # what has come with the last end
        if self._server is not None:
            self._has_joined = self._server.has_joined
        # Wait for a slow reader of the output, but only until a signal comes.
        while self._output is not None and self._signal_number is None:
            if self._output.finish(_CHECK_SIGNALS_SECONDS):
                break
            self._handle_signals()
        for outcome, tail in self._tails.items():
            outcome.last_lines = tuple(tail())
        job, needed = self._job, None
        if job.min_ranks is not None:  # at least one, because a machine without any has no part in a good end
            needed = max(1, job.min_ranks - (job.world_size - job.n_ranks))
        return Outcome(
            tuple(rank.outcome for rank in self.ranks),
            self._signal_number,
            self._has_joined,
            tuple(self._earlier),
            needed,
            job.min_ranks,
            tuple(self._worlds),
            self._is_state_lost,
        )

    def _wait_for_ends(self) -> None:
        """Waits until all ranks have ended or were given up; ends all ranks when one fails or a signal comes."""
        while self._running and not self._gave_up:
            endings = (self._ending, *self._letting_go.values())
            due_at = min((each.due_at for each in endings if each.due_at is not None), default=None)
            events = self._selector.select(_LOOK_SECONDS if due_at is None else max(0.0, due_at - time.monotonic()))
            if not events and due_at is None:
                self._memory.look()
            for key, _ in events:
                rank = key.data
                if not isinstance(rank, RankProcess):
                    rank()
                elif self._running.get(rank.rank) is rank:
                    self._handle_event(rank, key.fd)
                    self._report_change(rank)
            self._send_due_signal()
        for rank in self._running.values():
            self._record_failure(rank)

    def _wait_for_other_launchers(self) -> None:
        """Keeps the server until the ranks of other launchers have left, or a signal comes; briefly after a failure."""
        if self._server is None or not self._job.has_others:
            return
        has_failed = self._has_failed or self._signal_number is not None
        began, has_told = time.monotonic(), False
        while not self._server.wait_until_empty(_CHECK_SIGNALS_SECONDS):
            waited_seconds = time.monotonic() - began
            if self._handle_signals() or (has_failed and waited_seconds > _LEAVING_SECONDS):
                return
            if not has_failed and not has_told and waited_seconds > _TELL_AFTER_SECONDS:
                has_told = True
                self._notices.print("gradsync: the ranks of this machine have ended; waiting for the other machines")

    def _end_watching(self) -> None:
        # Normally all ranks have ended already. After an exception in the launcher itself, this method ends the ranks.
        if self._running and not self._gave_up:
            self._ending.plan((0.0, signal.SIGKILL))
            self._wait_for_ends()
        for rank in self._running.values():
            rank.abandon()
        self._selector.close()

    def _handle_event(self, rank: RankProcess, descriptor: int) -> None:
        if descriptor == rank.report:
            if not rank.read_report():
                self._selector.unregister(descriptor)
            if rank.outcome.error is not None:  # recorded at once: threads of the rank may keep its process alive
                self._record_failure(rank)
            return
        # Another process may hold the status pipe open, so the end of the guard counts too.
        is_over = not rank.read_status() or descriptor == rank.sentinel
        outcome = rank.outcome
        if outcome.exit_code == -signal.SIGKILL and not rank.sent_kill:
            outcome.memory_kill = outcome.memory_kill or self._memory.has_killed()
        if outcome.exit_code:  # its guard may still be ending the processes that the rank started
            self._record_failure(rank)
        if is_over:
            self._reap(rank)

    def _reap(self, rank: RankProcess) -> None:
        for descriptor in (rank.status, rank.report, rank.sentinel):
            with contextlib.suppress(KeyError, ValueError):  # not registered, or -1
                self._selector.unregister(descriptor)
        del self._running[rank.rank]
        rank.reap()
        if rank.outcome.exit_code != 0:
            self._record_failure(rank)
        self._letting_go.pop(rank, None)
        self._waiting.discard(rank)
        if rank.outcome.is_replaced:
            self._start_again(rank)
        if self._running and (self._running.keys() <= self._silent_ranks() or self._is_over()):
            self._end_after(0.0)

    def _report_change(self, rank: RankProcess) -> None:
        """Reports the start or end of a rank to `on_change`, and to the server for ranks that wait for this rank."""
        outcome = rank.outcome
        if self._server is not None:
            if outcome.pid and outcome.pid not in self._named_to_server:
                self._named_to_server.add(outcome.pid)
                self._server.note_start(rank.rank, outcome.pid)
            # Other failures end all ranks, or the rank starts again.
            if outcome.exit_code == 0 or outcome.is_unsendable:
                self._server.note_end(rank.rank, f"ended with exit code {outcome.exit_code}")
            elif self._job.min_ranks is not None and outcome.order is not None and not outcome.is_replaced:
                self._server.note_end(rank.rank, outcome.describe_end())
        if self._on_change is not None:
            self._on_change(rank)

    def _record_failure(self, rank: RankProcess) -> None:
        """Records a failure, and lets the other ranks go on without the rank, or plans to end them."""
        outcome = rank.outcome
        if outcome.order is not None or self._is_not_needed(rank):
            return
        outcome.order, outcome.was_asked_to_end = self._n_failures, self._ending.has_begun
        outcome.ended_after = time.monotonic() - self._began
        self._n_failures += 1
        if not self._ending.has_begun:
            for other in self._running.values():
                other.outcome.was_paused = other.outcome.was_paused or other.is_paused()
        if self._lets_go(rank):
            return
        self._has_failed = True
        if not outcome.is_unsendable:  # after an unsendable result the other ranks may finish their work
            self._end_after(self._settle_seconds(rank))

    # -- Going on without ranks --------------------------------------------------------------------------------------

    def _lets_go(self, rank: RankProcess) -> bool:
        """Lets the other ranks go on without a rank that has failed, if enough are left; returns whether they do."""
        job, outcome = self._job, rank.outcome
        if job.min_ranks is None or self._ending.due_at is not None or self._ending.has_begun:
            return False
        outcome.is_replaced = self._respawns_left > 0 and not self._is_over()
        self._is_state_lost = self._are_all_lost()
        if self._is_state_lost or not self._are_enough():
            return False
        if self._worlds and rank.rank not in self._worlds[-1].ranks and rank not in self._waiting:
            outcome.went_on_after = self._worlds[-1].seconds  # the others have been faster than this news
        going = job.world_size - sum(each.outcome.order is not None for each in self.ranks)
        if outcome.is_replaced:
            self._respawns_left -= 1
            times = f"{job.respawns - self._respawns_left} of at most {job.respawns}"
            what = f"starting it again ({times})"
        elif job.has_others:
            what = "the others go on"
        else:
            what = f"{going} of {count(job.world_size, 'rank')} {'goes' if going == 1 else 'go'} on"
        error = f": {outcome.error.summary.rstrip(': ')}" if outcome.error is not None else ""
        self._notices.print(f"gradsync: {outcome.describe()}{error}; {what}")
        self._letting_go[rank] = ending = _Ending()
        ending.plan((_SETTLE_SECONDS, signal.SIGTERM), (job.grace_seconds, signal.SIGKILL))
        return True

    def _are_enough(self) -> bool:
        """Returns whether so many ranks are left, or can be started again, that the run goes on."""
        lost = sum(rank.outcome.order is not None and not rank.outcome.is_replaced for rank in self.ranks)
        return self._job.min_ranks is not None and self._job.world_size - lost >= self._job.min_ranks

    def _are_all_lost(self) -> bool:
        """Returns whether all ranks of the world have failed: new ones would begin from nothing, and nobody notice."""
        if not self._worlds or self._job.has_others:  # others may have some
            return False
        return all(rank.outcome.order is not None or rank in self._waiting for rank in self.ranks)

    def _start_again(self, rank: RankProcess) -> None:
        """Starts a rank again, in a new process, whose predecessor has ended."""
        outcome = rank.outcome
        if self._ending.due_at is not None or self._is_over():
            outcome.is_replaced = False
            return
        self._named_to_server.discard(outcome.pid)
        try:
            self.start_rank(rank.rank)
        except OSError as error:
            self._notices.print(f"gradsync: {_refusal(rank.rank, error)}")
            outcome.is_replaced = False
            if not self._are_enough():
                self._has_failed = True
                self._end_after(0.0)
            return
        self._earlier.append(outcome)
        if self._news is not None:
            self._waiting.add(self._running[rank.rank])
            outcome.is_awaited = True

    def _is_over(self) -> bool:
        """Returns whether ranks have ended well, and those that still run do not take part any more, or not yet."""
        others = [rank for rank in self._running.values() if rank not in self._waiting and rank not in self._letting_go]
        return self._has_ended_well() and not others

    def _is_not_needed(self, rank: RankProcess) -> bool:
        """Returns whether a rank was started again for nothing: the others have ended before it could join them."""
        error = rank.outcome.error
        return rank in self._waiting and self._has_ended_well() and (error is None or error.is_consequence)

    def _has_ended_well(self) -> bool:
        return any(rank.outcome.exit_code == 0 for rank in self.ranks)

    def _handle_news(self) -> None:
        """Handles what the server has told: ends ranks that the others have given up, and notes new worlds."""
        assert self._news is not None
        for news in self._news.read():
            if isinstance(news, FormedWorld):
                self._worlds.append(news)
            if self._job.min_ranks is None:  # the failure ends all ranks, also those that have formed a new world
                continue
            if isinstance(news, _Lost):
                rank = self._running.get(news.rank)
                if rank is not None and rank.outcome.order is None:
                    rank.outcome.given_up = f"{news.why}\n"
                    rank.send_signal(signal.SIGKILL)
                continue
            self._waiting = {rank for rank in self._waiting if rank.rank not in news.ranks}
            for outcome in {each.rank: each for each in self._earlier}.values():  # the last one of each rank
                outcome.is_awaited = outcome.is_awaited and outcome.rank not in news.ranks
            left_out = [rank.outcome for rank in self.ranks if rank.rank not in news.ranks]
            for outcome in (*self._earlier, *left_out):
                if outcome.order is not None and outcome.went_on_after is None:
                    outcome.went_on_after = news.seconds

    # -- Ending the ranks --------------------------------------------------------------------------------------------

    def _settle_seconds(self, rank: RankProcess) -> float:
        """Returns how long to wait for other ranks to end by themselves, or to report the cause of this failure."""
        error = rank.outcome.error
        if error is None or not error.is_consequence:
            return _SETTLE_SECONDS
        if error.is_timeout:
            return _AFTER_SILENCE_SECONDS
        culprits = [other for other in self.ranks if other.rank == error.missed_rank]
        has_nothing_to_report = any(other.rank not in self._running or other.is_paused() for other in culprits)
        return _SETTLE_SECONDS if has_nothing_to_report else _ROOT_CAUSE_SECONDS

    def _silent_ranks(self) -> set[int | None]:
        """Returns the silent ranks, for which other ranks have waited too long. A silent rank reports no error."""
        errors = [rank.outcome.error for rank in self.ranks]
        return {error.missed_rank for error in errors if error is not None and error.is_timeout}

    def _end_after(self, settle_seconds: float) -> None:
        """Plans to ask the ranks to end after `settle_seconds`, or earlier if that is planned already."""
        if self._ending.due_at is None:
            self._ending.plan((settle_seconds, signal.SIGTERM), (self._job.grace_seconds, signal.SIGKILL))
        else:
            self._ending.hasten(settle_seconds)

    def _handle_signals(self) -> bool:
        """Handles the signals that have arrived; returns whether one of them ends the job."""
        numbers = self._signals.read()
        for number in numbers:
            self._handle_signal(number)
        return bool({*numbers} - {signal.SIGTSTP, *WARNING})

    def _handle_signal(self, number: int) -> None:
        """Handles a signal to the launcher: forwards, kills or suspends.

        The launcher forwards the first signal to the ranks, or kills the ranks if it has already asked them to end. A
        later Ctrl-C kills the ranks, and other later signals do nothing. Ctrl-Z suspends the ranks and this process. A
        scheduler's warning is forwarded, and ends nothing.
        """
        grace_seconds, kill = self._job.grace_seconds, (0.0, signal.SIGKILL)
        if number in WARNING:
            self._send(number)
        elif number == signal.SIGTSTP:
            self._suspend()
        elif self._signal_number is None:
            self._signal_number = number
            if self._ending.has_begun:
                self._ending.plan(kill)
            elif number == signal.SIGINT:
                half = grace_seconds / 2  # SIGTERM follows, for a script that ignores Ctrl-C
                self._ending.plan((0.0, number), (half, signal.SIGTERM), (half, signal.SIGKILL))
                if number_of_ranks := len([rank for rank in self._running.values() if rank not in self._letting_go]):
                    them = "it" if number_of_ranks == 1 else "them"
                    self._notices.print(
                        f"gradsync: stopping {count(number_of_ranks, 'rank')} (Ctrl-C again kills {them})"
                    )
            else:
                self._ending.plan((0.0, number), (grace_seconds, signal.SIGKILL))
        elif number == signal.SIGINT:
            self._ending.plan(kill)
        self._send_due_signal()

    def _suspend(self) -> None:
        """Suspends the ranks and this process at Ctrl-Z, and continues the ranks when the shell continues this process.

        This process suspends the ranks first: a rank that runs while its launcher is suspended would treat the launcher
        as dead.
        """
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send_due_signal(self) -> None:
        """Sends the next planned signal to the ranks, if its time has come."""
        for rank, ending in self._letting_go.items():
            if number := ending.next_signal():
                rank.send_signal(number)
        number = self._ending.next_signal() if self._running else None
        if number is None:
            return
        if number == _GIVE_UP:
            # Helpers that clean up after an ended rank get longer than a rank that could not be killed.
            is_rank_left = any(rank.outcome.exit_code is None for rank in self._running.values())
            self._gave_up = is_rank_left or self._ending.due_at is None
            return
        were_asked, self._ending.has_begun = self._ending.has_begun, True
        if number == signal.SIGKILL:
            why = ", which did not end when asked" if were_asked else ""
            self._notices.print(f"gradsync: killing {count(len(self._running), 'rank')}{why}")
        self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._running.values():
            rank.send_signal(number)


def _refusal(rank: int, error: OSError) -> str:
    """Returns the error text, with advice, for a rank that the system refuses to start."""
    text = f"rank {rank} cannot be started: {error.strerror}"
    if error.errno == errno.EMFILE:
        files = f"the launcher opens {_FILES_OF_A_RANK} files for each rank"
        return f"{text}; {files}: raise the limit (ulimit -n), or start fewer ranks"
    if error.errno == errno.EAGAIN:
        return f"{text}; {HOW_TO_RAISE_THE_LIMIT}, or start fewer ranks"
    if error.errno in (errno.EPERM, errno.ENOSYS):
        return f"{text}; gradsync needs the system calls memfd_create and pidfd_open: let the container allow them"
    return text

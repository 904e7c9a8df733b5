"""The supervisor: starts the ranks of a job, watches them, and ends all ranks when one fails.

If only the return value of a rank cannot be sent, the supervisor lets the other ranks finish.

`gradsync run`, `gs.launch`, `gs.launcher` and `gs.spawn` use the supervisor. The supervisor's loop waits for one of
these events: a rank ends (its guard reports this); a rank sends its report; a signal to the launcher arrives; it is
time to send the next signal to ranks that must end. The loop does not poll; it only looks once a minute whether memory
ran out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gradsync.environment import check_variables
from gradsync.errors import BackendUnavailable
from gradsync.launching.job import Job, log_added_variables, rank_environment
from gradsync.launching.outcome import OomWatch, Outcome, failure_text
from gradsync.launching.output import REPORT_SECONDS, Notices
from gradsync.launching.rank_process import RankProcess, StartRecord, start_record
from gradsync.launching.signals import SignalInbox
from gradsync.machine import reserve_port
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

# After a failure the launcher first waits: the rendezvous server reports the failure to the other ranks, which may end
# by themselves. If a failure only follows from the failure of another rank, the launcher waits longer, so that the
# other rank can still report its own failure.
_SETTLE_SECONDS = 0.1
_ROOT_CAUSE_SECONDS = 1.0
_AFTER_SILENCE_SECONDS = 0.05  # because all ranks that waited for a silent rank fail at the same moment
_LOOK_SECONDS = 60.0
_UNKILLABLE_SECONDS = 1.8  # a little longer than the guard tries to kill its rank
_HELPERS_SECONDS = 4.9  # how much longer the guard of a killed rank may need for helpers that clean up

# One step of a plan that ends the ranks: the seconds to wait after the step before, and the signal to send then.
_Step = tuple[float, int]
_GIVE_UP = 0  # this step abandons the ranks that still run

#: A function that returns the object that shows the output of one start of the ranks. The function's argument is the
#: number of restarts.
MakeOutput = Callable[[int], "OutputForwarder"]


def supervise(
    job: Job,
    *,
    make_output: MakeOutput | None = None,
    notices: Notices | None = None,
) -> Outcome:
    """Runs a job until all its ranks have ended; restarts all ranks after a failure, as often as the job allows.

    The function hosts the rendezvous server of the run, unless the job has an endpoint without a listener. If the main
    thread calls the function, SIGINT, SIGTERM and SIGHUP end the job. The function forwards the first of these signals
    to the ranks, or kills the ranks if they have already been asked to end. Outcome.signal_number is the number of this
    signal.

    Args:
        job: the job.
        make_output: a function that returns an `OutputForwarder`, which shows the ranks' output. By default the ranks
            write to this process's own streams.
        notices: the object that prints notices after Ctrl-C and before a restart; by default nothing prints them.

    Returns:
        How every rank ended. A failed rank does not raise an exception here.

    Raises:
        BackendUnavailable, InvalidArgument, RendezvousError: see `Supervisor.start`.
    """
    notices = notices or Notices(None)
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


class Supervisor:
    """Runs the ranks of a job once, in two steps: `start` and `finish`. The caller can do other work in between.

    When the context ends, no process of the ranks is left, except a process that the kernel could not kill.

    Args:
        job, make_output, notices: see `supervise`.
        signals: the signals to this process, in a `SignalInbox` whose `with` block has begun. Each signal ends the job.
        restart: the number of times that the ranks have been started before.
        on_change: a function that `finish` calls with a rank when this rank has begun, reported or ended.

    Attributes:
        ranks: the rank processes.
    """

    def __init__(
        self,
        job: Job,
        signals: SignalInbox,
        *,
        make_output: MakeOutput | None = None,
        notices: Notices | None = None,
        restart: int = 0,
        on_change: Callable[[RankProcess], None] | None = None,
    ) -> None:
        self._job = job
        self._signals = signals
        self._make_output = make_output
        self._notices = notices or Notices(None)
        self._restart = restart
        self._on_change = on_change
        self._stack = contextlib.ExitStack()
        self._output: OutputForwarder | None = None
        self._server: RendezvousServer | None = None  # while this process hosts it
        self.ranks: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        self._named_to_server: set[int] = set()  # ranks whose start the server knows
        self._n_failures = 0
        self._signal_number: int | None = None  # the signal that ends the job, once one has come
        self._steps: list[_Step] = []
        self._step_time = 0.0
        self._asked_to_end = False
        self._gave_up = False

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts all rank processes; does not wait until their interpreters run.

        Raises:
            BackendUnavailable: the system allows no more processes, or open files.
            InvalidArgument: an environment variable has a value that the ranks would refuse, or the folder for logs
                cannot be made or written to.
            RendezvousError: the job's rendezvous port is taken.
        """
        check_variables()
        job = self._job
        raise_limit(_FILES_OF_A_RANK * job.n_ranks)
        endpoint, listener = job.endpoint, job.listener
        try:
            # The server's socket is bound now, so that ranks can start before the server does.
            if endpoint is None:
                listener = self._stack.enter_context(bind_listener("127.0.0.1", job.rendezvous_port))
                # Ranks of an earlier start cannot join, because they do not know this secret.
                endpoint = Endpoint(format_address(listener), os.urandom(32))
            port = job.master_port or self._stack.enter_context(reserve_port()).getsockname()[1]
            environs = [rank_environment(job, i, endpoint, port, self._restart) for i in range(job.n_ranks)]
            self._memory = OomWatch()
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._signals.descriptor, selectors.EVENT_READ)
            if self._make_output is not None:
                self._output = self._make_output(self._restart)
                self._stack.callback(self._output.finish, _LAST_OUTPUT_SECONDS)
            self._stack.callback(self._end_watching)
            shows_lines, has_others = self._output is not None, job.world_size > job.n_ranks
            with (
                start_record(job.target, endpoint.secret, shows_lines=shows_lines, has_others=has_others) as record,
                open(os.devnull, "rb") as null,
            ):
                for local_rank, environ in enumerate(environs):
                    rank = RankProcess(job.rank_start + local_rank)
                    self._start_rank(rank, record, environ, 0 if rank.rank == job.stdin_rank else null.fileno())
                    self._watch(rank)
                    if self._handle_signals():
                        break
        except OSError as error:
            raise BackendUnavailable(_refusal(job.rank_start + len(self.ranks), error)) from error
        # The server starts after the ranks, because their interpreters start meanwhile. A connection that comes before
        # the server runs waits in the listener's backlog.
        if listener is not None:
            self._stack.enter_context(self._serving(endpoint, listener))
        if self._output is not None:
            self._output.start()
        if self._restart == 0:
            log_added_variables(job)  # now, because the ranks start while this process imports logging

    def finish(self) -> Outcome:
        """Waits until the ranks have ended, and shows the rest of their output; returns how the ranks ended."""
        self._wait_for_ends()
        self._wait_for_other_launchers()
        # Wait for a slow reader of the output, but only until a signal comes.
        while self._output is not None and self._signal_number is None:
            if self._output.finish(_CHECK_SIGNALS_SECONDS):
                break
            self._handle_signals()
        outcomes = tuple(rank.outcome for rank in self.ranks)
        if self._output is not None:
            for outcome in outcomes:
                outcome.last_lines = tuple(self._output.tail(outcome.rank))
        return Outcome(outcomes, self._signal_number)

    def _wait_for_other_launchers(self) -> None:
        """Keeps the server until the ranks of other launchers have left, or a signal comes; briefly after a failure."""
        if self._server is None or self._job.world_size == self._job.n_ranks:
            return
        has_failed = self._n_failures > 0 or self._signal_number is not None
        began, has_told = time.monotonic(), False
        while not self._server.wait_until_empty(_CHECK_SIGNALS_SECONDS):
            waited_seconds = time.monotonic() - began
            numbers = self._signals.read()
            for number in numbers:
                self._handle_signal(number)
            if {*numbers} - {signal.SIGTSTP} or (has_failed and waited_seconds > _LEAVING_SECONDS):
                return
            if not has_failed and not has_told and waited_seconds > _TELL_AFTER_SECONDS:
                has_told = True
                self._notices.print("gradsync: the ranks of this machine have ended; waiting for the other machines")

    # -- Starting ------------------------------------------------------------------------------------------------

    def _start_rank(self, rank: RankProcess, record: StartRecord, environ: dict[str, str], standard_input: int) -> None:
        """Starts one rank, with pipes for its output if the launcher shows the output."""
        with contextlib.ExitStack() as theirs:
            streams = [standard_input, 1, 2]
            if self._output is not None:
                output_reader, streams[1] = os.pipe()
                theirs.callback(os.close, streams[1])
                error_reader, streams[2] = os.pipe()
                theirs.callback(os.close, streams[2])
                self._output.add(rank.rank, output_reader, error_reader)  # from here on `_output` closes these ends
            rank.start(self._job.target, record, environ, tuple(streams))

    @contextlib.contextmanager
    def _serving(self, endpoint: Endpoint, listener: socket.socket) -> Iterator[None]:
        """Runs the rendezvous server of this start in a thread of this process."""
        from gradsync.rendezvous.server import RendezvousServer  # imported here, because ranks start meanwhile

        server = RendezvousServer(self._job.world_size, secret=endpoint.secret, listener=listener)
        server.start()
        self._server = server
        try:
            yield
        finally:
            self._server = None
            server.stop()

    # -- Watching ------------------------------------------------------------------------------------------------

    def _watch(self, rank: RankProcess) -> None:
        """Registers a started rank with the selector of the loop."""
        self.ranks.append(rank)
        self._running[rank.rank] = rank
        for descriptor in (rank.status, rank.report, rank.sentinel):
            if descriptor >= 0:
                self._selector.register(descriptor, selectors.EVENT_READ, rank)

    def _end_watching(self) -> None:
        # Normally all ranks have ended already. After an exception in the launcher itself, this method ends the ranks.
        if self._running and not self._gave_up:
            self._plan_kill()
            self._wait_for_ends()
        for rank in self._running.values():
            rank.abandon()
        self._selector.close()

    def _handle_signals(self) -> bool:
        """Handles the signals that have arrived; returns whether the job has to end."""
        for number in self._signals.read():
            self._handle_signal(number)
        return self._signal_number is not None

    def _wait_for_ends(self) -> None:
        """Waits until all ranks have ended or were abandoned; ends all ranks when one fails or a signal comes."""
        while self._running and not self._gave_up:
            timeout = max(0.0, self._step_time - time.monotonic()) if self._steps else _LOOK_SECONDS
            events = self._selector.select(timeout)
            if not events and not self._steps:
                self._memory.look()
            for key, _ in events:
                if key.data is None:
                    self._handle_signals()
                elif key.data.rank in self._running:
                    self._handle_event(key.data, key.fd)
                    self._report_change(key.data)
            self._send_due_signal()
        for rank in self._running.values():
            self._record_failure(rank)

    def _handle_event(self, rank: RankProcess, descriptor: int) -> None:
        if descriptor == rank.report:
            if not rank.read_report():
                self._selector.unregister(descriptor)
            if rank.outcome.error is not None:  # recorded at once: threads of the rank may keep its process alive
                self._record_failure(rank)
            return
        # Another process may hold the status pipe open, so the end of the guard counts too.
        is_over = not rank.read_status() or descriptor == rank.sentinel
        if is_over or rank.outcome.exit_code is not None:
            self._handle_end(rank)
        if is_over:
            self._reap(rank)

    def _handle_end(self, rank: RankProcess) -> None:
        """Handles the end of a rank; its guard may still be ending the processes that the rank started."""
        outcome = rank.outcome
        if outcome.exit_code == -signal.SIGKILL and not rank.sent_kill:
            outcome.memory_kill = outcome.memory_kill or self._memory.has_killed()
        if outcome.exit_code != 0:
            self._record_failure(rank)

    def _reap(self, rank: RankProcess) -> None:
        for descriptor in (rank.status, rank.report, rank.sentinel):
            with contextlib.suppress(KeyError, ValueError):  # not registered, or -1
                self._selector.unregister(descriptor)
        del self._running[rank.rank]
        rank.reap()
        if rank.outcome.exit_code != 0:
            self._record_failure(rank)
        if self._running and self._running.keys() <= self._silent_ranks():
            self._end_after(0.0)

    def _report_change(self, rank: RankProcess) -> None:
        """Reports the start or end of a rank to `on_change`, and to the server for ranks that wait for this rank."""
        outcome = rank.outcome
        if self._server is not None:
            if outcome.pid and rank.rank not in self._named_to_server:
                self._named_to_server.add(rank.rank)
                self._server.note_start(rank.rank, outcome.pid)
            if outcome.exit_code == 0 or outcome.is_unsendable:  # other failures end all ranks
                self._server.note_end(rank.rank, f"ended with exit code {outcome.exit_code}")
        if self._on_change is not None:
            self._on_change(rank)

    def _record_failure(self, rank: RankProcess) -> None:
        """Records a failure, and plans to end the other ranks."""
        outcome = rank.outcome
        if outcome.order is not None:
            return
        outcome.order, outcome.was_asked_to_end = self._n_failures, self._asked_to_end
        self._n_failures += 1
        if not self._asked_to_end:
            for other in self._running.values():
                other.outcome.was_paused = other.outcome.was_paused or other.is_paused()
        if not outcome.is_unsendable:  # after an unsendable result the other ranks may finish their work
            self._end_after(self._settle_seconds(rank))

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

    def _handle_signal(self, number: int) -> None:
        """Handles a signal to the launcher: forwards, kills or suspends.

        The launcher forwards the first signal to the ranks, or kills the ranks if it has already asked them to end. A
        later Ctrl-C kills the ranks, and other later signals do nothing. Ctrl-Z suspends the ranks and this process.
        """
        grace_seconds = self._job.grace_seconds
        if number == signal.SIGTSTP:
            self._suspend()
        elif self._signal_number is None:
            self._signal_number = number
            if self._asked_to_end:  # the ranks have been asked to end already
                self._plan_kill()
            elif number == signal.SIGINT:
                half = grace_seconds / 2  # SIGTERM follows, for a script that ignores Ctrl-C
                self._plan((0.0, number), (half, signal.SIGTERM), (half, signal.SIGKILL))
                if self._running:
                    them = "it" if len(self._running) == 1 else "them"
                    self._notices.print(f"gradsync: stopping {_count(len(self._running))} (Ctrl-C again kills {them})")
            else:
                self._plan((0.0, number), (grace_seconds, signal.SIGKILL))
        elif number == signal.SIGINT:
            self._plan_kill()
        self._send_due_signal()

    def _suspend(self) -> None:
        """Suspends the ranks and this process at Ctrl-Z, and continues the ranks when the shell continues this process.

        This process suspends the ranks first: a rank that runs while its launcher is suspended would treat the launcher
        as dead.
        """
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _end_after(self, settle_seconds: float) -> None:
        """Plans to ask the ranks to end after `settle_seconds`, unless an earlier time is planned."""
        if not self._steps:
            self._plan((settle_seconds, signal.SIGTERM), (self._job.grace_seconds, signal.SIGKILL))
        elif not self._asked_to_end:
            self._step_time = min(self._step_time, time.monotonic() + settle_seconds)

    def _plan_kill(self) -> None:
        self._plan((0.0, signal.SIGKILL))

    def _plan(self, *steps: _Step) -> None:
        """Plans the signals that end the ranks. The launcher abandons ranks that survive the last signal, SIGKILL."""
        self._steps = [*steps, (_UNKILLABLE_SECONDS, _GIVE_UP), (_HELPERS_SECONDS, _GIVE_UP)]
        self._step_time = time.monotonic() + steps[0][0]

    def _send_due_signal(self) -> None:
        """Sends the next planned signal to the ranks, if its time has come."""
        if not self._steps or not self._running or time.monotonic() < self._step_time:
            return
        number = self._steps.pop(0)[1]
        if number == _GIVE_UP:
            is_rank_left = any(rank.outcome.exit_code is None for rank in self._running.values())
            if is_rank_left or not self._steps:
                self._gave_up = True
            else:
                self._step_time = time.monotonic() + self._steps[0][0]
            return
        were_asked, self._asked_to_end = self._asked_to_end, True
        if number == signal.SIGKILL:
            why = ", which did not end when asked" if were_asked else ""
            self._notices.print(f"gradsync: killing {_count(len(self._running))}{why}")
        self._send(number)
        self._step_time = time.monotonic() + self._steps[0][0]

    def _send(self, number: int) -> None:
        for rank in self._running.values():
            rank.send_signal(number)


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _refusal(rank: int, error: OSError) -> str:
    """Returns the error text, with advice, for a rank that the system refuses to start."""
    text = f"rank {rank} cannot be started: {error.strerror}"
    if error.errno == errno.EMFILE:
        files = f"the launcher opens {_FILES_OF_A_RANK} files for each rank"
        return f"{text}; {files}: raise the limit (ulimit -n), or start fewer ranks"
    if error.errno == errno.EAGAIN:
        return f"{text}; raise the limit of processes (ulimit -u; in a container, the pids limit), or start fewer ranks"
    return text

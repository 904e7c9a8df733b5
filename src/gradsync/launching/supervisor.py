"""The one engine of launching: starts the ranks of a job, watches them, and stops them all when one fails.

`gradsync run`, `gs.launch`, `gs.launcher` and `gs.spawn` are thin faces over it. It prepares each start of the job
and leaves the waiting to `watch`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from gradsync.environment import check_variables
from gradsync.errors import BackendUnavailable
from gradsync.launching.free_port import reserved_port
from gradsync.launching.hosting import own_endpoint
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome
from gradsync.launching.output import Notices
from gradsync.launching.rank_environment import rank_environment
from gradsync.launching.rank_process import RankProcess, start_record
from gradsync.launching.signals import SignalInbox
from gradsync.launching.watch import Watch
from gradsync.rendezvous.secret_files import Endpoint

if TYPE_CHECKING:
    from gradsync.launching.output import OutputPump
    from gradsync.rendezvous.server import RendezvousServer

_LEAVING_SECONDS = 5.0  # how long a server waits for the ranks that other launchers have started
_LAST_OUTPUT_SECONDS = 2.0  # for output that a blocked terminal does not take, once somebody wants to go
_LOOK_FOR_SIGNALS_SECONDS = 0.2
_FILES_OF_A_RANK = 9  # pipes for status, report, commands and output, its result, and what the server has of it
_RANKS_BEFORE_SERVER = 8  # whose start hides that of the server

#: Makes what shows the output of one start of the ranks; given the job, and how often they have been started again.
MakeOutput = Callable[[Job, int], "OutputPump"]


def supervise(
    job: Job,
    *,
    make_output: MakeOutput | None = None,
    notices: Notices | None = None,
    on_restart: Callable[[Outcome, int], None] | None = None,
) -> Outcome:
    """Runs a job to the end of all its ranks.

    Hosts the rendezvous server of the run, unless the job has a meeting point elsewhere. SIGINT, SIGTERM and SIGHUP to
    this process are forwarded to the ranks and end the job; the outcome tells which it was.

    Args:
        job: what to run.
        make_output: makes what shows the ranks' output; without it they write to this process's own streams.
        notices: where a Ctrl-C is answered with a line.
        on_restart: called before all ranks are started again, with the outcome and how many restarts there were.

    Returns:
        How every rank ended. A failing rank is no exception here.

    Raises:
        BackendUnavailable: the system allows no more processes, or open files.
        RendezvousError: the job's rendezvous port is taken.
    """
    with SignalInbox() as signals, Supervisor(job, signals, make_output=make_output, notices=notices) as supervisor:
        supervisor.start()
        return supervisor.finish(on_restart)


class Supervisor:
    """A job in two steps, for callers who have something else to do: `start`, then `finish`.

    No process is left when the context ends.

    Args:
        job, make_output, notices: see `supervise`.
        signals: an entered inbox; what is put there ends the job.
        on_news: called, by whoever calls `finish`, with a rank that has begun, reported or ended.
        on_stopping: likewise, when the ranks are first told to stop; see `Watch`.

    Attributes:
        ranks: the rank processes of the last start.
    """

    def __init__(
        self,
        job: Job,
        signals: SignalInbox,
        *,
        make_output: MakeOutput | None = None,
        notices: Notices | None = None,
        on_news: Callable[[RankProcess], None] | None = None,
        on_stopping: Callable[[bool], None] | None = None,
    ) -> None:
        self._job = job
        self._signals = signals
        self._make_output = make_output
        self._notices = notices or Notices(None)
        self._news = _News(on_news)
        self._on_stopping = on_stopping
        self._stack = contextlib.ExitStack()
        self._output: OutputPump | None = None
        self.ranks: list[RankProcess] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._output is not None:  # an exception came between
            self._output.close(_LAST_OUTPUT_SECONDS)

    def start(self, restart: int = 0) -> None:
        """Starts all rank processes; returns while they come to life.

        Args:
            restart: how often they have been started before.

        Raises:
            BackendUnavailable: the system allows no more processes, or open files.
            InvalidArgument: a variable is set that the ranks would refuse.
            RendezvousError: the job's rendezvous port is taken.
        """
        check_variables()
        job = self._job
        if job.n_ranks > _RANKS_BEFORE_SERVER:
            from gradsync.rendezvous.sockets import raise_limit  # here: few ranks have room, and start-up counts

            raise_limit(_FILES_OF_A_RANK * job.n_ranks)
        # The server's socket is bound now, so that ranks can start before the server does.
        endpoint, listener = (
            self._stack.enter_context(own_endpoint(job.rendezvous_port))
            if job.endpoint is None
            else (job.endpoint, job.listener)
        )
        port = job.master_port or self._stack.enter_context(reserved_port())
        environs = [rank_environment(job, i, endpoint, port, restart) for i in range(job.n_ranks)]
        watch = Watch(self._signals, job.grace_seconds, self._notices, self._news, self._on_stopping)
        self._watch = self._stack.enter_context(watch)
        self._output = None if self._make_output is None else self._make_output(job, restart)
        # Threads first would be copied into forked ranks.
        ranks_before_server = job.n_ranks if job.start_method == "fork" else min(job.n_ranks, _RANKS_BEFORE_SERVER)
        self.ranks = []
        with _start_record(job, endpoint, shows_lines=self._output is not None) as record:
            for local_rank, environ in enumerate(environs):
                rank = RankProcess(job.rank_start + local_rank, local_rank)
                try:
                    self._start_rank(rank, record, environ)
                except OSError as error:
                    raise BackendUnavailable(_refusal(rank.rank, error)) from error
                self._watch.add(rank)
                self.ranks.append(rank)
                # The first ranks boot meanwhile; who connects early waits in the listener's backlog, but not for ever.
                if len(self.ranks) == ranks_before_server:
                    self._stack.enter_context(self._serving(endpoint, listener))
                if self._watch.is_told_to_end():
                    break
        if self._output is not None:
            self._output.start()

    def finish(self, on_restart: Callable[[Outcome, int], None] | None = None) -> Outcome:
        """Watches the ranks to their end, starting all of them again as often as the job says."""
        restarts = 0
        while True:
            outcome = self.finish_start()
            if not outcome.may_be_tried_again or restarts == self._job.max_restarts:
                return outcome
            restarts += 1
            if on_restart is not None:
                on_restart(outcome, restarts)
            self.start(restarts)

    def finish_start(self) -> Outcome:
        """Watches the ranks of this start to their end; for a caller who starts them again by itself."""
        outcome = self._with_last_output(self._watch.run())
        self._stack.close()
        return outcome

    def _start_rank(self, rank: RankProcess, record: int, environ: dict[str, str]) -> None:
        """Starts one rank, with pipes for its output where it is shown."""
        with contextlib.ExitStack() as theirs:
            streams = [_standard_input(rank.rank == self._job.stdin_rank, theirs), 1, 2]
            if self._output is not None:
                output_reader, streams[1] = os.pipe()
                theirs.callback(os.close, streams[1])
                error_reader, streams[2] = os.pipe()
                theirs.callback(os.close, streams[2])
                self._output.add(rank.rank, output_reader, error_reader)  # which closes them, whatever happens here
            rank.start(self._job.start_method, self._job.target, record, environ, tuple(streams))

    @contextlib.contextmanager
    def _serving(self, endpoint: Endpoint, listener: socket.socket | None) -> Iterator[None]:
        """Runs the rendezvous server in a thread of this process, where it is to host it."""
        if listener is None:
            yield
            return
        from gradsync.rendezvous.server import RendezvousServer  # here: the ranks boot while it loads

        job = self._job
        server = RendezvousServer(job.world_size, secret=endpoint.secret, listener=listener)
        server.start()
        self._news.serve_with(server)
        try:
            yield
        finally:
            self._news.serve_with(None)
            if job.world_size > job.n_ranks:
                server.wait_until_empty(_LEAVING_SECONDS)
            server.stop()

    def _with_last_output(self, outcome: Outcome) -> Outcome:
        """Shows what is left of the ranks' output, and adds its last lines to the outcome."""
        output, self._output = self._output, None
        if output is None:
            return outcome
        # Whoever reads it may be slow, as long as nobody wants to go.
        while outcome.signal_number is None and not output.drain(_LOOK_FOR_SIGNALS_SECONDS):
            if self._watch.is_told_to_end():
                outcome = replace(outcome, signal_number=self._watch.signal_number)
        output.close(_LAST_OUTPUT_SECONDS)
        return replace(
            outcome, ranks=tuple(replace(rank, last_lines=tuple(output.tail(rank.rank))) for rank in outcome.ranks)
        )


def _refusal(rank: int, error: OSError) -> str:
    """Returns what to do where the system starts no process any more."""
    text = f"rank {rank} cannot be started: {error.strerror}"
    if error.errno == errno.EMFILE:
        return f"{text}; each rank takes the launcher {_FILES_OF_A_RANK}: raise the limit (ulimit -n), or start fewer"
    if error.errno == errno.EAGAIN:
        return f"{text}; raise the limit of processes (ulimit -u; in a container, that of pids), or start fewer ranks"
    return text


class _News:
    """Passes news of a rank on: to the server too, for the ranks that wait for it to join, what becomes of its process.

    Apart from the supervisor, which would otherwise be held in a circle, with what is open.
    """

    def __init__(self, on_news: Callable[[RankProcess], None] | None) -> None:
        self._server: RendezvousServer | None = None
        self._started: set[int] = set()  # ranks of whose processes it knows
        self._on_news = on_news

    def serve_with(self, server: RendezvousServer | None) -> None:
        """Sets the server of a start of the ranks, while this process hosts it."""
        self._server, self._started = server, set()

    def __call__(self, rank: RankProcess) -> None:
        if self._server is not None:
            self._tell(self._server, rank)
        if self._on_news is not None:
            self._on_news(rank)

    def _tell(self, server: RendezvousServer, rank: RankProcess) -> None:
        if rank.pid and rank.rank not in self._started:
            self._started.add(rank.rank)
            server.note_start(rank.rank, rank.pid)
        if rank.exit_code == 0:  # else it has failed, and all ranks are told to end
            server.note_end(rank.rank, "ended with exit code 0")


@contextlib.contextmanager
def _start_record(job: Job, endpoint: Endpoint, *, shows_lines: bool) -> Iterator[int]:
    record = start_record(job.target, endpoint.secret, shows_lines=shows_lines)
    try:
        yield record
    finally:
        os.close(record)


def _standard_input(is_chosen: bool, theirs: contextlib.ExitStack) -> int:
    """Gives a rank's standard input: this process's own for the chosen one, nothing to read for the others."""
    if is_chosen:
        return 0
    null = os.open(os.devnull, os.O_RDONLY)
    theirs.callback(os.close, null)
    return null

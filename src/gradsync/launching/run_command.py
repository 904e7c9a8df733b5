"""`gradsync run`: from the options of the command line to a supervised job, its output and its exit code."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync import environment
from gradsync.errors import InvalidArgument
from gradsync.launching.failure_report import failure_text
from gradsync.launching.gpus import choose_gpus, parse_gpus
from gradsync.launching.job import Job
from gradsync.launching.notices import Notices
from gradsync.launching.outcome import Outcome
from gradsync.launching.output.pump import OutputPump
from gradsync.launching.supervisor import supervise
from gradsync.launching.targets import module_target, script_target
from gradsync.settings import allows_shared_gpu
from gradsync.visible_devices import count_gpus, default_process_count

if TYPE_CHECKING:
    from gradsync.launching.nodes.node_options import NodeOptions

_REPORT_SECONDS = 1.0  # for a terminal that stands still to take the report of a failure before a restart


@dataclass(frozen=True)
class RunOptions:
    """The command line of `gradsync run`, as its help explains it."""

    script: str
    arguments: tuple[str, ...]
    as_module: bool
    nprocs: int | None
    gpus: str | None
    backend: str
    max_restarts: int
    state_dir: str | None
    log_dir: str | None
    grace_seconds: float
    stdin_rank: str
    prefix: bool | None
    nnodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    secret_file: str | None = None
    join_timeout_seconds: float = 120.0
    node_address: str | None = None
    dump_dir: str | None = None
    trace_dir: str | None = None
    debug: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks find in their environment because of the options."""
        folders = {environment.DUMP_DIR: self.dump_dir, environment.TRACE: self.trace_dir}
        variables = {name: os.path.abspath(folder) for name, folder in folders.items() if folder is not None}
        return variables | {environment.DEBUG: "1"} if self.debug else variables

    @property
    def has_other_nodes(self) -> bool:
        """Whether launchers on other machines take part."""
        return (self.nnodes or 1) > 1


def run_command(options: RunOptions) -> int:
    """Runs the job and shows what happens to it.

    Returns:
        The exit code of the command.

    Raises:
        InvalidArgument: the options do not fit this machine, each other, or the script.
    """
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # closed by who started us
    notices = Notices(sys.stderr)
    nodes = _node_options(options)
    target = (module_target if options.as_module else script_target)(options.script, options.arguments)
    gpus = None if options.gpus is None else parse_gpus(options.gpus)
    n_ranks = options.nprocs or (default_process_count() if gpus is None else len(gpus))
    if gpus is not None:
        if count_gpus() == 0:
            notices.tell(f"gradsync: warning: no NVIDIA GPU is found here; --gpus {options.gpus} has no effect")
        gpus = tuple(choose_gpus(gpus, n_ranks, os.environ, allow_shared=allows_shared_gpu()))
    prefix = n_ranks > 1 or nodes is not None if options.prefix is None else options.prefix
    stdin_rank = _stdin_rank(options.stdin_rank, n_ranks if nodes is None else None)
    log_dir = None if options.log_dir is None else Path(options.log_dir)

    def make_output(started: Job, restart: int) -> OutputPump:
        attempt = restart if options.max_restarts else None
        elsewhere = set(range(started.world_size)).difference(started.ranks)
        return OutputPump(
            sys.stdout, sys.stderr, prefix=prefix, log_dir=log_dir, attempt=attempt, ranks_elsewhere=elsewhere
        )

    def tell_restart(outcome: Outcome, restarts: int) -> None:
        notices.tell(failure_text(outcome).rstrip("\n"), wait_seconds=_REPORT_SECONDS)
        how_often = f"restart {restarts} of at most {options.max_restarts}"
        notices.tell(f"gradsync: starting all ranks again ({how_often})")

    with _state_dir(options) as state_dir:
        job = Job(
            target,
            n_ranks,
            backend=options.backend,
            gpus=gpus,
            stdin_rank=stdin_rank,
            grace_seconds=options.grace_seconds,
            max_restarts=options.max_restarts,
            state_dir=state_dir,
            variables=options.variables,
        )
        if nodes is not None:
            from gradsync.launching.nodes.node_run import run_on_nodes

            return run_on_nodes(nodes, job, make_output, notices)
        outcome = supervise(job, make_output=make_output, notices=notices, on_restart=tell_restart)
    if outcome.exit_code and options.dump_dir is not None:
        notices.tell(f"gradsync: `gradsync trace {shlex.quote(options.dump_dir)}` shows what the ranks were doing")
    _tell_failure(outcome, notices)
    return outcome.exit_code


def _tell_failure(outcome: Outcome, notices: Notices) -> None:
    """Tells why the job failed, last of all that is printed."""
    text = failure_text(outcome)
    if not text:
        return
    if outcome.signal_number is not None:  # somebody wants to go: a terminal that stands still must not keep us
        notices.tell(text.rstrip("\n"), wait_seconds=_REPORT_SECONDS)
        return
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.flush()
    notices.insist(text.rstrip("\n"))


def _node_options(options: RunOptions) -> NodeOptions | None:
    """Gives what is known of the other machines; None where this one is alone.

    Raises:
        InvalidArgument: an option is missing or wrong, or has no meaning for one machine.
    """
    if options.has_other_nodes:
        from gradsync.launching.nodes.node_options import check_node_options

        return check_node_options(
            options.nnodes or 1,
            options.node_rank,
            options.rendezvous,
            options.secret_file,
            options.join_timeout_seconds,
            options.node_address,
        )
    if options.node_rank:
        raise InvalidArgument(
            f"--node-rank {options.node_rank} needs --nnodes, the number of machines, to be at least "
            f"{options.node_rank + 1}, got {options.nnodes or 'none'}"
        )
    if options.nnodes is None:
        of_nodes = ("node_rank", "rendezvous", "secret_file", "node_address")
        given = [name for name in of_nodes if getattr(options, name) is not None]
        if given:
            raise InvalidArgument(f"--{given[0].replace('_', '-')} needs --nnodes, the number of machines")
    return None


def _stdin_rank(text: str, n_ranks: int | None) -> int | None:
    """Gives the rank that reads standard input; None as number of ranks is not known yet."""
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or (n_ranks is not None and int(text) >= n_ranks):
        range_text = "0 up" if n_ranks is None else f"0 to {n_ranks - 1}"
        raise InvalidArgument(f"--stdin needs a rank from {range_text}, or none, got {text!r}")
    return int(text)


@contextlib.contextmanager
def _state_dir(options: RunOptions) -> Iterator[str | None]:
    """Gives the state directory; one that we made goes when the job has ended."""
    if options.state_dir is not None:
        try:
            os.makedirs(options.state_dir, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--state-dir {options.state_dir!r} cannot be made: {error.strerror}") from None
        yield options.state_dir
    elif options.max_restarts == 0:
        yield None
    else:
        path = tempfile.mkdtemp(prefix="gradsync-state-")
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

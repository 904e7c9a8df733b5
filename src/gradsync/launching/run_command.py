"""`gradsync run`: from the options of the command line to a supervised job, its output and its exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradsync.environment import allows_shared_gpu
from gradsync.errors import InvalidArgument
from gradsync.launching.failure_report import print_failure
from gradsync.launching.gpus import choose_gpus, parse_gpus
from gradsync.launching.job import Job
from gradsync.launching.outcome import Outcome
from gradsync.launching.output.pump import OutputPump
from gradsync.launching.supervisor import supervise
from gradsync.launching.targets import module_target, script_target
from gradsync.visible_devices import default_process_count


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


def run_command(options: RunOptions) -> int:
    """Runs the job and shows what happens to it.

    Returns:
        The exit code of the command.

    Raises:
        InvalidArgument: the options do not fit this machine, each other, or the script.
    """
    target = (module_target if options.as_module else script_target)(options.script, options.arguments)
    gpus = None if options.gpus is None else parse_gpus(options.gpus)
    n_ranks = options.nprocs or (default_process_count() if gpus is None else len(gpus))
    if gpus is not None:
        gpus = tuple(choose_gpus(gpus, n_ranks, os.environ, allow_shared=allows_shared_gpu()))
    prefix = n_ranks > 1 if options.prefix is None else options.prefix
    stdin_rank = _stdin_rank(options.stdin_rank, n_ranks)
    log_dir = None if options.log_dir is None else Path(options.log_dir)

    def make_output(restart: int) -> OutputPump:
        attempt = restart if options.max_restarts else None
        return OutputPump(sys.stdout, sys.stderr, prefix=prefix, log_dir=log_dir, attempt=attempt)

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
        )
        outcome = supervise(job, make_output=make_output, notices=sys.stderr, on_restart=_Restarts(options).tell)
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.flush()
    print_failure(outcome, sys.stderr)
    return outcome.exit_code


@dataclass(frozen=True)
class _Restarts:
    """Tells of a failure after which the ranks are started again."""

    options: RunOptions

    def tell(self, outcome: Outcome, restarts: int) -> None:
        print_failure(outcome, sys.stderr)
        how_often = f"restart {restarts} of at most {self.options.max_restarts}"
        print(f"gradsync: starting all ranks again ({how_often})", file=sys.stderr, flush=True)


def _stdin_rank(text: str, n_ranks: int) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or int(text) >= n_ranks:
        raise InvalidArgument(f"--stdin needs a rank from 0 to {n_ranks - 1}, or none, got {text!r}")
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

"""`gradsync run`: makes a job from the options of the command line, runs the job, and returns the exit code."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder

from gradsync import environment
from gradsync.diagnostics.trace import make_folder
from gradsync.errors import InvalidArgument, name_ranks
from gradsync.launching.hosting import check_nodes, node_endpoint
from gradsync.launching.job import Job, Target, choose_gpus, parse_gpus
from gradsync.launching.outcome import failure_text
from gradsync.launching.output import REPORT_SECONDS, Notices, OutputForwarder
from gradsync.launching.supervisor import supervise
from gradsync.machine import count_gpus, default_process_count

_MANY_RANKS = 8  # a user who gives no number may not expect more ranks than this


def run_command(
    *,
    script: str,
    arguments: tuple[str, ...],
    as_module: bool,
    nprocs: int | None,
    gpus: str | None,
    backend: str,
    max_restarts: int,
    log_dir: str | None,
    grace_seconds: float,
    stdin_rank: str,
    prefix: bool | None,
    nnodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    secret_file: str | None,
    trace_dir: str | None,
    debug: bool,
    own_options: Collection[str] = (),
) -> int:
    """Runs the job, and prints its output and its failures; the arguments are the options of the command.

    Args:
        own_options: the names of the command's options, such as "-n". If -n is missing and the first argument of the
            script is one of these options, a notice warns the user that gradsync passes this option to the script.

    Returns:
        The exit code of the command.

    Raises:
        InvalidArgument: an option does not fit this machine, the script, or the other options.
        GradsyncError: the ranks cannot be started; see `supervise` and `node_endpoint`.
    """
    notices = Notices(sys.stderr)
    nodes = check_nodes(nnodes, node_rank, rendezvous, secret_file, max_restarts)
    misplaced = arguments[0].partition("=")[0] if arguments else ""
    if nprocs is None and misplaced.startswith("-") and misplaced in own_options:
        text = f"{misplaced} comes after {script}, so it goes to the script; put gradsync's options before the script"
        notices.print(f"gradsync: {text}, as in: gradsync run -n 2 {script}")
    target = (module_target if as_module else script_target)(script, arguments)
    if backend == "mpi":
        command = target.mpi_command((nprocs or default_process_count()) * nodes.count)
        where = "run" if nodes.count == 1 else "run on one node only, with the hosts"
        raise InvalidArgument(f"--backend mpi needs MPI's own launcher; {where}: {command}")
    devices = None if gpus is None else parse_gpus(gpus)
    n_ranks = nprocs or (default_process_count() if devices is None else len(devices))
    if nprocs is None and devices is None and n_ranks > _MANY_RANKS:
        notices.print(f"gradsync: starting {n_ranks} ranks, one for each GPU or usable core; -n sets the number")
    if devices is not None:
        if count_gpus() == 0:
            notices.print(f"gradsync: warning: no NVIDIA GPU is found here, so the ranks cannot use --gpus {gpus}")
        devices = tuple(choose_gpus(devices, n_ranks, os.environ))
    world_size, rank_start = nodes.count * n_ranks, nodes.number * n_ranks
    own_ranks = range(rank_start, rank_start + n_ranks)
    ranks_elsewhere = set(range(world_size)).difference(own_ranks)
    shows_prefix = world_size > 1 if prefix is None else prefix
    reading_rank = _stdin_rank(stdin_rank, world_size)
    variables: dict[str, str] = {}
    if trace_dir is not None:
        variables[environment.TRACE] = str(make_folder(trace_dir, "--trace"))
    if debug:
        variables[environment.DEBUG] = "1"

    def make_output(restart: int) -> OutputForwarder:
        return OutputForwarder(
            *(sys.stdout, sys.stderr),
            prefix=shows_prefix,
            log_dir=log_dir,
            restart=restart,
            ranks_elsewhere=ranks_elsewhere,
        )

    with node_endpoint(nodes, notices) as (endpoint, listener):
        if nodes.count > 1:
            place = f"node {nodes.number} of {nodes.count}: {name_ranks(own_ranks)} of {world_size}"
            notices.print(f"gradsync: {place}; rendezvous at {nodes.rendezvous}")
        job = Job(
            target,
            n_ranks,
            world_size=world_size,
            rank_start=rank_start,
            endpoint=endpoint,
            listener=listener,
            backend=backend,
            master_addr=nodes.host,
            gpus=devices,
            stdin_rank=reading_rank,
            grace_seconds=grace_seconds,
            max_restarts=max_restarts,
            variables=variables,
        )
        outcome = supervise(job, make_output=make_output, notices=notices)
    exit_code = outcome.exit_code
    if text := failure_text(outcome).rstrip("\n"):
        # After a signal the user wants the job to end, so a blocked terminal must not delay the end.
        wait_seconds = None if outcome.signal_number is None else REPORT_SECONDS
        notices.print(text, wait_seconds=wait_seconds)
    return exit_code


def _stdin_rank(text: str, world_size: int) -> int | None:
    """Returns the rank that reads standard input; None if no rank does."""
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or int(text) >= world_size:
        raise InvalidArgument(f"--stdin needs a rank from 0 to {world_size - 1}, or 'none', got {text!r}")
    return int(text)


def script_target(path: str, arguments: Sequence[str] = ()) -> Target:
    """Returns the target that runs a script.

    Raises:
        InvalidArgument: the file does not exist or cannot be read, or is the Python interpreter; or the path is a
            directory without a __main__.py.
    """
    is_interpreter = os.path.basename(path).rstrip(".0123456789") == "python" and not os.path.isdir(path)
    if is_interpreter and (not os.path.exists(path) or os.access(path, os.X_OK)):
        raise InvalidArgument(f"leave out {path!r}: gradsync starts Python itself, as in gradsync run -n 2 script.py")
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise InvalidArgument(f"script {path!r} is a directory without a __main__.py")
    elif not os.path.exists(path):
        raise InvalidArgument(f"script {path!r} does not exist (looked in {os.getcwd()})")
    elif not os.access(path, os.R_OK):
        raise InvalidArgument(f"script {path!r} cannot be read")
    record = {"kind": "script", "path": path, "arguments": list(arguments)}
    return Target(record, (path, *arguments))


def module_target(name: str, arguments: Sequence[str] = ()) -> Target:
    """Returns the target that runs a module; the rank searches for the module like `python -m`.

    Raises:
        InvalidArgument: the name has no top-level package, or this package does not exist.
    """
    # The launcher checks only the top-level package: to check "a.b", it would have to import "a". The ranks report
    # errors in deeper names.
    top = name.partition(".")[0]
    if not _module_exists(top):
        raise InvalidArgument(f"module {name!r} does not exist (no {top!r} in {os.getcwd()} or sys.path)")
    record = {"kind": "module", "module": name, "arguments": list(arguments)}
    return Target(record, ("-m", name, *arguments))


def _module_exists(name: str) -> bool:
    if PathFinder.find_spec(name, [os.getcwd()]) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # an empty name, or a module made by hand, such as __main__
        return False

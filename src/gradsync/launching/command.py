"""What `gradsync run` does: makes a job from the options, runs it, and returns the exit code."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from zipimport import ZipImportError, zipimporter

from gradsync.arguments import join_address
from gradsync.environment import DEBUG, TRACE
from gradsync.errors import InvalidArgument, count, name_ranks
from gradsync.launchers import read_environment
from gradsync.launching.job import Job, Target, choose_gpus
from gradsync.launching.nodes import check_nodes, shared_endpoint
from gradsync.launching.outcome import failure_text
from gradsync.launching.output import REPORT_SECONDS, Notices, OutputForwarder
from gradsync.launching.supervisor import supervise
from gradsync.machine import count_gpus, current_folder, default_process_count, usable_cores

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
    min_ranks: int | None,
    respawn: int,
    wrap: str,
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
        GradsyncError: the ranks cannot be started; see `supervise` and `shared_endpoint`.
    """
    notices = Notices(sys.stderr)
    nodes = check_nodes(nnodes, node_rank, rendezvous, secret_file, max_restarts)
    misplaced = arguments[0].partition("=")[0] if arguments else ""
    if nprocs is None and misplaced.startswith("-") and misplaced in own_options:
        text = f"{misplaced} comes after {script}, so it goes to the script; put gradsync's options before the script"
        notices.print(f"gradsync: {text}, as in: gradsync run -n 2 {script}")
    target = (module_target if as_module else script_target)(script, arguments)
    if backend == "mpi":
        command = target.mpi_command((nprocs or default_process_count()) * nodes.nnodes)
        where = "run" if nodes.nnodes == 1 else "run on one node only, with the hosts"
        raise InvalidArgument(f"--backend mpi needs MPI's own launcher; {where}: {command}")
    n_ranks, devices = _choose_ranks(nprocs, gpus, notices)
    if nnodes is None:
        _tell_of_launchers_beside(notices, n_ranks)
    world_size, rank_start = nodes.nnodes * n_ranks, nodes.node_rank * n_ranks
    own_ranks = range(rank_start, rank_start + n_ranks)
    shows_prefix = world_size > 1 if prefix is None else prefix
    if min_ranks is not None and min_ranks > world_size:
        raise InvalidArgument(f"--min-ranks needs to be from 1 to {world_size}, the number of ranks, got {min_ranks}")
    if min_ranks is None and respawn:
        min_ranks = world_size
    reading_rank = _stdin_rank(stdin_rank, world_size)
    variables: dict[str, str] = {}
    if trace_dir is not None:
        from gradsync.diagnostics.trace import make_folder  # imported here to keep the start short

        variables[TRACE] = str(make_folder(trace_dir, "--trace"))
    if debug:
        variables[DEBUG] = "1"

    def make_output(restart: int) -> OutputForwarder:
        return OutputForwarder(
            *(sys.stdout, sys.stderr),
            prefix=shows_prefix,
            log_dir=log_dir,
            restart=restart,
            ranks_elsewhere=set(range(world_size)).difference(own_ranks),
        )

    with contextlib.ExitStack() as stack:
        server = None
        if nodes.nnodes > 1:
            words = "--rendezvous needs an address of the machine with --node-rank 0"
            shared = shared_endpoint(*nodes[2:], is_first=nodes.node_rank == 0, words=words)
            server = stack.enter_context(shared)
            place = f"node {nodes.node_rank} of {nodes.nnodes}: {name_ranks(own_ranks)} of {world_size}"
            notices.print(f"gradsync: {place}; rendezvous at {join_address(nodes.host, nodes.port)}")
        job = Job(
            target,
            n_ranks,
            world_size=world_size,
            rank_start=rank_start,
            shared=server,
            backend=backend,
            master_addr=nodes.host,
            gpus=devices,
            stdin_rank=reading_rank,
            grace_seconds=grace_seconds,
            max_restarts=max_restarts,
            min_ranks=min_ranks,
            respawns=respawn,
            wrap=wrap,
            variables=variables,
        )
        outcome = supervise(job, make_output=make_output, notices=notices)
    if outcome.exit_code == 0 and world_size > 1 and not outcome.has_joined:
        notices.print(
            f"gradsync: no rank called gs.init_process_group() to join the others: unless they met without this "
            f"launcher, each of the {n_ranks} ranks ran {script} by itself"
        )
    if text := failure_text(outcome).rstrip("\n"):
        # After a signal the user wants the job to end, so a blocked terminal must not delay the end.
        notices.print(text, wait_seconds=None if outcome.signal_number is None else REPORT_SECONDS)
    return outcome.exit_code


def _choose_ranks(nprocs: int | None, gpus: str | None, notices: Notices) -> tuple[int, tuple[str, ...] | None]:
    """Returns the number of ranks on this machine, and the GPU of each if `gpus` names them."""
    devices = None if gpus is None else choose_gpus(gpus, nprocs)
    n_ranks = nprocs or (default_process_count() if devices is None else len(devices))
    if devices is not None:
        if count_gpus() == 0:
            notices.print(f"gradsync: warning: no NVIDIA GPU is found here, so the ranks cannot use --gpus {gpus}")
    elif nprocs is None and n_ranks > _MANY_RANKS:
        notices.print(f"gradsync: starting {n_ranks} ranks, one for each GPU or usable core; -n sets the number")
    if n_ranks > (cores := usable_cores()):
        notices.print(f"gradsync: {n_ranks} ranks share {count(cores, 'core')}, so that they often wait for each other")
    return n_ranks, devices


def _stdin_rank(text: str, world_size: int) -> int | None:
    """Returns the rank that reads standard input; None if no rank does."""
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or int(text) >= world_size:
        raise InvalidArgument(f"--stdin needs a rank from 0 to {world_size - 1}, or 'none', got {text!r}")
    return int(text)


def _tell_of_launchers_beside(notices: Notices, n_ranks: int) -> None:
    """Warns if mpiexec, srun or torchrun has started several of these launchers: each starts all ranks of a run."""
    with contextlib.suppress(InvalidArgument):  # some variable is wrong, perhaps of a launcher that is none
        outer = read_environment()
        if outer is not None and outer.world_size > 1 and outer.rank == 0:
            notices.print(
                f"gradsync: warning: this is one of {outer.world_size} launchers (by the variables of {outer.source}), "
                f"and each starts {count(n_ranks, 'rank')}, which will not meet those of the others: for one run pass "
                "--nnodes and --node-rank, or start the script itself instead of gradsync run"
            )


# -- The program -------------------------------------------------------------------------------------------------------


def script_target(path: str, arguments: Sequence[str] = ()) -> Target:
    """Returns the target that runs what `python path` runs: a script, a .pyc file, or a folder or zip archive.

    Raises:
        InvalidArgument: there is no such file or it cannot be read; or it is the Python interpreter, a pipe, or a
            folder without a __main__.py.
    """
    is_folder = os.path.isdir(path)
    is_interpreter = os.path.basename(path).rstrip(".0123456789") == "python" and not is_folder
    if is_interpreter and (not os.path.exists(path) or os.access(path, os.X_OK)):
        raise InvalidArgument(f"leave out {path!r}: gradsync starts Python itself, as in gradsync run -n 2 script.py")
    if not os.path.exists(path):
        raise InvalidArgument(f"script {path!r} does not exist (looked in {current_folder()})")
    if not os.access(path, os.R_OK):
        raise InvalidArgument(f"script {path!r} cannot be read")
    if is_folder and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise InvalidArgument(f"script {path!r} is a directory without a __main__.py")
    if not is_folder and not os.path.isfile(path):
        raise InvalidArgument(f"script {path!r} is no file, and each rank has to read it; save it to a file first")
    kind = "folder" if is_folder or _is_archive(path) else "script"
    return Target({"kind": kind, "path": path, "arguments": list(arguments)}, (path, *arguments))


def _is_archive(path: str) -> bool:
    with contextlib.suppress(ZipImportError):
        return bool(zipimporter(path))
    return False


def module_target(name: str, arguments: Sequence[str] = ()) -> Target:
    """Returns the target that runs a module; the rank searches for the module like `python -m`.

    Raises:
        InvalidArgument: the name has no top-level package, or this package does not exist.
    """
    # The launcher checks only the top-level package: to check "a.b", it would have to import "a". The ranks report
    # errors in deeper names.
    top, folder = name.partition(".")[0], current_folder()
    if not _module_exists(top, folder):
        raise InvalidArgument(f"module {name!r} does not exist (no {top!r} in {folder} or sys.path)")
    return Target({"kind": "module", "module": name, "arguments": list(arguments)}, ("-m", name, *arguments))


def _module_exists(name: str, folder: str) -> bool:
    if PathFinder.find_spec(name, [folder]) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # an empty name, or a module made by hand, such as __main__
        return False

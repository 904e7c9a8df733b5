"""What `gradsync run` does, and the rendezvous server that the launchers of several machines share.

With `--nnodes`, or `gs.launcher(rank_start=)`, each machine has a launcher, which starts the ranks from an offset on.
The launchers do not talk to each other: the first hosts the server, and all ranks dial it. When a rank dies, the server
tells all the others, and each launcher ends its own ranks as soon as one of them fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import NamedTuple
from zipimport import ZipImportError, zipimporter

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS, is_loopback, join_address, parse_address
from gradsync.environment import (
    DEBUG,
    HOW_TO_MAKE_A_SECRET_FILE,
    SECRET_FILE,
    TRACE,
    parse_secret,
    read_environment,
    read_secret_option,
    take_secret,
)
from gradsync.errors import InvalidArgument, RendezvousError, RendezvousTimeout, name_ranks
from gradsync.launching.job import Job, Target, choose_gpus, parse_gpus
from gradsync.launching.outcome import failure_text
from gradsync.launching.output import REPORT_SECONDS, Notices, OutputForwarder
from gradsync.launching.supervisor import supervise
from gradsync.machine import count_gpus, current_folder, default_process_count, usable_cores
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for
from gradsync.rendezvous.sockets import bind_listener, format_address

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
    machines = check_machines(nnodes, node_rank, rendezvous, secret_file, max_restarts)
    misplaced = arguments[0].partition("=")[0] if arguments else ""
    if nprocs is None and misplaced.startswith("-") and misplaced in own_options:
        text = f"{misplaced} comes after {script}, so it goes to the script; put gradsync's options before the script"
        notices.print(f"gradsync: {text}, as in: gradsync run -n 2 {script}")
    target = (module_target if as_module else script_target)(script, arguments)
    if backend == "mpi":
        command = target.mpi_command((nprocs or default_process_count()) * machines.nnodes)
        where = "run" if machines.nnodes == 1 else "run on one node only, with the hosts"
        raise InvalidArgument(f"--backend mpi needs MPI's own launcher; {where}: {command}")
    devices = None if gpus is None else parse_gpus(gpus)
    n_ranks = nprocs or (default_process_count() if devices is None else len(devices))
    if devices is not None:
        if count_gpus() == 0:
            notices.print(f"gradsync: warning: no NVIDIA GPU is found here, so the ranks cannot use --gpus {gpus}")
        devices = tuple(choose_gpus(devices, n_ranks, os.environ))
    elif nprocs is None and n_ranks > _MANY_RANKS:
        notices.print(f"gradsync: starting {n_ranks} ranks, one for each GPU or usable core; -n sets the number")
    if n_ranks > usable_cores():
        notices.print(
            f"gradsync: {n_ranks} ranks share {_count(usable_cores(), 'core')}, so that they often wait for each other"
        )
    if nnodes is None:
        _tell_of_launchers_beside(notices, n_ranks)
    world_size, rank_start = machines.nnodes * n_ranks, machines.node_rank * n_ranks
    own_ranks = range(rank_start, rank_start + n_ranks)
    shows_prefix = world_size > 1 if prefix is None else prefix
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
        endpoint, listener = None, None
        if machines.nnodes > 1:
            is_first, words = machines.node_rank == 0, "--rendezvous needs an address of the machine with --node-rank 0"
            endpoint, listener = stack.enter_context(shared_endpoint(*machines[2:], is_first=is_first, words=words))
            place = f"node {machines.node_rank} of {machines.nnodes}: {name_ranks(own_ranks)} of {world_size}"
            notices.print(f"gradsync: {place}; rendezvous at {join_address(machines.host, machines.port)}")
        job = Job(
            target,
            n_ranks,
            world_size=world_size,
            rank_start=rank_start,
            endpoint=endpoint,
            listener=listener,
            backend=backend,
            master_addr=machines.host,
            gpus=devices,
            stdin_rank=reading_rank,
            grace_seconds=grace_seconds,
            max_restarts=max_restarts,
            wrap=wrap,
            variables=variables,
        )
        outcome = supervise(job, make_output=make_output, notices=notices)
    if outcome.exit_code == 0 and world_size > 1 and not outcome.has_joined:
        notices.print(
            f"gradsync: no rank called gs.init_process_group(): each of the {n_ranks} ranks ran {script} by itself"
        )
    if text := failure_text(outcome).rstrip("\n"):
        # After a signal the user wants the job to end, so a blocked terminal must not delay the end.
        notices.print(text, wait_seconds=None if outcome.signal_number is None else REPORT_SECONDS)
    return outcome.exit_code


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
        outer = read_environment(dict(os.environ))
        if outer is not None and outer.world_size > 1 and outer.rank == 0:
            notices.print(
                f"gradsync: warning: this is one of {outer.world_size} launchers (by the variables of {outer.source}), "
                f"and each starts {_count(n_ranks, 'rank')}, which will not meet those of the others: for one run pass "
                "--nnodes and --node-rank, or start the script itself instead of gradsync run"
            )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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


# -- Several machines --------------------------------------------------------------------------------------------------


class Machines(NamedTuple):
    """The machines of a run: how many, the number of this one, and the server's address and secret; by default one."""

    nnodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    secret: bytes = b""


def check_machines(
    nnodes: int | None, node_rank: int | None, rendezvous: str | None, secret_file: str | None, max_restarts: int
) -> Machines:
    """Returns the machines of a run from the options of the command line.

    Raises:
        InvalidArgument: an option is missing, malformed or out of its range, or allowed only for several machines, or
            for one; or the secret cannot be read.
    """
    if nnodes is None:
        given = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--secret-file": secret_file}
        for option, value in given.items():
            if value is not None:
                raise InvalidArgument(f"{option} needs --nnodes, the number of machines")
        return Machines()
    if node_rank is not None and node_rank >= nnodes:
        raise InvalidArgument(f"--node-rank needs to be from 0 to {nnodes - 1} with --nnodes {nnodes}, got {node_rank}")
    if nnodes == 1:
        return Machines()
    if node_rank is None:
        raise InvalidArgument(f"--nnodes {nnodes} needs --node-rank, this machine's number from 0 to {nnodes - 1}")
    if max_restarts:
        raise InvalidArgument(
            f"--max-restarts works on one machine only, and --nnodes is {nnodes}: the launchers of several machines do "
            "not talk to each other; let the scheduler start all of them again after a failure"
        )
    if rendezvous is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --rendezvous HOST:PORT, the same on every machine: an address of the machine "
            "with --node-rank 0, and a port that is free there"
        )
    try:
        host, port = parse_address(rendezvous)
    except InvalidArgument as error:
        raise InvalidArgument(f"--rendezvous: {error}") from None
    if host in ("0.0.0.0", "::"):
        raise InvalidArgument(
            f"--rendezvous needs an address of the machine with --node-rank 0, by which the others reach it, got {host}"
        )
    secret = take_secret() if secret_file is None else read_secret_option(secret_file)
    if secret is None:
        raise InvalidArgument(
            f"--nnodes {nnodes} needs --secret-file (or {SECRET_FILE}), so that nobody else can join the run: make one "
            f"with: {HOW_TO_MAKE_A_SECRET_FILE}, and copy it to every machine"
        )
    return Machines(nnodes, node_rank, host, port, secret)


@contextlib.contextmanager
def shared_endpoint(
    host: str, port: int, secret: bytes | None, *, is_first: bool, words: str
) -> Iterator[tuple[Endpoint, socket.socket | None]]:
    """Yields the endpoint of the server that several launchers share, and on the first launcher the server's socket.

    Args:
        host, port: where the first launcher hosts the server; port 0 is any free port, which the log then names.
        secret: the secret of the run. None, if all launchers are on this machine: the first makes one, and the others
            find it in a file of mode 0600 in the user's runtime directory.
        is_first: whether this launcher is the first.
        words: the beginning of the advice if the address is wrong.

    Raises:
        RendezvousError: on the first launcher: the address does not belong to this machine, or the port is taken.
        RendezvousTimeout: on another launcher: the first has not come.
    """
    if not is_first:
        yield Endpoint(join_address(host, port), secret or _find_secret(host, port)), None
        return
    advice = f"{words}, and a port that is free there, the same on every machine"
    try:
        listener = bind_listener(host, port, if_taken=advice)
    except RendezvousError as error:
        text = str(error)
        raise RendezvousError(text if advice in text else f"{text}; {advice}") from None
    with listener:
        address, chosen = listener.getsockname()[:2]
        if port == 0:
            _warn(f"gradsync: this launcher hosts the rendezvous: pass port={chosen} to those of the other machines")
        if is_loopback(address) and not is_loopback(host):  # /etc/hosts of Debian and Docker
            _warn(
                f"gradsync: warning: on this machine {host!r} has the address {address}, which no other machine can "
                f"reach; {words}, by which the others reach it"
            )
        with contextlib.nullcontext(secret) if secret else _told_secret(host, chosen) as known:
            yield Endpoint(format_address(listener), known), listener


@contextlib.contextmanager
def _told_secret(host: str, port: int) -> Iterator[bytes]:
    """Yields a new secret, which a file holds meanwhile. The lock on the file tells that its writer still lives."""
    address, secret = join_address(host, port), os.urandom(32)
    path = secret_path(address)
    publish(path, Endpoint(address, secret))
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield secret
        finally:
            os.unlink(path)


def _find_secret(host: str, port: int) -> bytes:
    """Returns the secret that the first launcher has put into a file; waits until it has come."""
    address = join_address(host, port)
    path, deadline = secret_path(address), time.monotonic() + DEFAULT_TIMEOUT_SECONDS
    while wait_for(path, None, deadline, lambda: _warn(f"gradsync: waiting for the launcher at {address}")):
        with contextlib.suppress(OSError), open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return parse_secret(f"secret file {path!r}", file.readline())
        time.sleep(0.01)  # a file that nobody holds is of a launcher that was killed, or the lock is still to come
    raise RendezvousTimeout(
        f"no launcher hosted the rendezvous at {address} within {DEFAULT_TIMEOUT_SECONDS:g} s: start the one with "
        "rank_start 0 on this machine, with the same port",
        missing_ranks=(0,),
    )


def _warn(text: str) -> None:
    import logging  # imported here to keep the start short

    logging.getLogger("gradsync").warning(text)

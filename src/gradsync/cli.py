"""The `gradsync` command: reads the command line and calls the launching layer or the rendezvous server."""

from __future__ import annotations

import signal
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from gradsync import __version__
from gradsync.arguments import DEFAULT_GRACE_SECONDS, DEFAULT_TIMEOUT_SECONDS, LARGEST_PORT
from gradsync.backends import BACKENDS, TABLE
from gradsync.bench.command import bench
from gradsync.environment import BACKEND, COLLECTIVE_TIMEOUT_SECONDS, SECRET_FILE, STATE_DIR
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RendezvousError

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer


class _Failure(click.ClickException):
    """A gradsync error that the command shows on one line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(str(error).split("\n")))
        self.exit_code: int = 2 if isinstance(error, InvalidArgument) else 1  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"gradsync: error: {self.format_message()}", file=file or sys.stderr)


class _Commands(click.Group):
    """The group of commands. It shows errors of gradsync without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GradsyncError as error:
            raise _Failure(error) from None
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "script":
                raise
            example = "For example: gradsync run -n 2 train.py"
            raise click.MissingParameter(example, error.ctx, error.param) from None
        except click.NoSuchOption as error:
            if error.option_name != "--timeout" or error.ctx is None or error.ctx.command is not run:
                raise
            advice = (
                "No such option '--timeout'. To limit how long a collective waits for a rank, set the variable "
                f"{COLLECTIVE_TIMEOUT_SECONDS}, in seconds; --join-timeout limits only the wait for other machines."
            )
            raise click.NoSuchOption("--timeout", advice, ctx=error.ctx) from None
        except KeyboardInterrupt:  # click would exit with 1 if no supervisor handles Ctrl-C
            sys.exit(128 + signal.SIGINT)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradsync")
def main() -> None:
    """Synchronises gradients between processes: launcher, rendezvous server, measurements."""


main.add_command(bench)


@main.command(
    short_help="Runs a script in several rank processes.",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  gradsync run -n 4 train.py --lr 0.1         four ranks of a script
  gradsync run -n 2 --gpus 2,3 -m my.train    two ranks of a module, each with a GPU of its own
  gradsync run -n 4 --max-restarts 3 train.py start again after a failure
  gradsync run -n 4 --stdin 2 train.py        breakpoint() works in rank 2
  gradsync run -n 8 --nnodes 2 --node-rank 0 --rendezvous head:29400 --secret-file gradsync.secret train.py
                                              sixteen ranks on two machines; type the same on the other machine,
                                              with --node-rank 1

\b
Exit codes:
  0      all ranks ended with 0
  2      the command line is wrong, or the script ended with 2
  130    the user pressed Ctrl-C
  128+n  signal n ended gradsync, or killed the rank that failed first
  other  the exit code of the rank that failed first (1 after an exception)

Options for gradsync come before SCRIPT. gradsync passes everything after SCRIPT to the script.
""",
)
@click.option(
    "-n",
    "--nprocs",
    "--nproc-per-node",
    type=click.IntRange(min=1),
    help="Number of ranks on this machine.  [default: one per GPU in --gpus; without --gpus, one per visible GPU; "
    "without a GPU, one per usable core]",
)
@click.option(
    "--gpus",
    metavar="IDS",
    help="GPUs, such as 0,1. Each rank sees one of these GPUs only.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    envvar=BACKEND,
    show_default=True,
    show_envvar=True,
    help="Backend of the collectives: shm on one host, nccl if each rank has a GPU, mpi under mpiexec.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Largest number of times to restart all ranks after a rank has failed.",
)
@click.option(
    "--state-dir",
    metavar="DIR",
    help=f"Directory for the ranks' checkpoints; ranks find it in {STATE_DIR}.  "
    "[default: a temporary directory, with --max-restarts]",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Also write each rank's output to its own file in DIR. The files of an earlier run are removed.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    default=DEFAULT_GRACE_SECONDS,
    show_default=True,
    help="Seconds between asking ranks to end and killing them.",
)
@click.option(
    "--stdin",
    "stdin_rank",
    metavar="RANK",
    default="0",
    show_default=True,
    help="The rank that reads standard input, or none. The other ranks read /dev/null.",
)
@click.option(
    "--prefix/--no-prefix", default=None, help="Show the rank before each line.  [default: with 2 or more ranks]"
)
@click.option(
    "--nnodes", type=click.IntRange(min=1), help="Number of machines. Start one gradsync run on each.  [default: 1]"
)
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    help="This machine's number, from 0. The ranks of machine 0 have the lowest numbers, then the ranks of machine 1, "
    "and so on.",
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="An address of node 0 and a free port on it. Pass the same value on every machine.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help=f"File of mode 0600 with the secret that all machines share, or - for a line of standard input.  "
    f"[default: {SECRET_FILE}]",
)
@click.option(
    "--join-timeout",
    "join_timeout_seconds",
    type=click.FloatRange(min=0),
    default=DEFAULT_TIMEOUT_SECONDS,
    show_default=True,
    help="Seconds to wait for the other machines, at the start and after a failure.",
)
@click.option(
    "--node-address",
    metavar="ADDRESS",
    help="This machine's address for the other machines.  [default: the address by which it reaches --rendezvous]",
)
@click.option(
    "--dump-dir",
    metavar="DIR",
    help="Directory where each rank writes its last collectives when a collective fails or waits too long, at Ctrl-C, "
    "or on SIGUSR2; for gradsync trace.",
)
@click.option(
    "--trace",
    "trace_dir",
    metavar="DIR",
    help="Directory for files that show when each rank packed and reduced its buckets; for gradsync trace.",
)
@click.option(
    "--debug",
    is_flag=True,
    help="Check that all ranks call the same collectives, and detect writes to gradients during their reduction.",
)
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Runs SCRIPT in several rank processes on this machine, or on several machines with --nnodes.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as
    under torchrun, and calls gradsync.init_process_group() without arguments. When a rank fails, gradsync ends the
    other ranks, and prints the failed rank's traceback last. No process that a rank has started outlives the rank.
    Ctrl-C asks all ranks to end; a second Ctrl-C kills them.
    """
    from gradsync.launching.run import run_command

    own_options = {name for option in context.command.params for name in (*option.opts, *option.secondary_opts)}
    sys.exit(run_command(**options, own_options=own_options))


@main.command(
    short_help="Shows from dumps where ranks differ or wait, and makes a Chrome trace.",
    epilog="""\b
Examples:
  gradsync run -n 2 --dump-dir dumps train.py       a failure leaves a dump of each rank in dumps
  gradsync trace dumps                              show where the ranks differ, and which ranks wait for which
  gradsync run -n 2 --trace traced train.py         record when each bucket was packed, waited for, reduced and split
  gradsync trace traced --out trace.json            open trace.json in https://ui.perfetto.dev or chrome://tracing

\b
Exit codes:
  0      no failure was found; a late rank alone is no failure
  1      a rank raised an exception, a collective failed, ranks called different collectives, or ranks wait for each
         other (deadlock)
  2      there are no dumps, or a dump cannot be read
""",
)
@click.argument("dumps", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Also write a Chrome trace to FILE.")
def trace(dumps: tuple[str, ...], out: str | None) -> None:
    """Compares DUMPS of the flight recorder: files, or folders of files, one file for each rank.

    The first lines show which rank raised an exception, and where ranks differ or wait for each other. The next lines
    show how many collectives each rank has begun, and its line of code.
    """
    from gradsync.diagnostics.report import report_dumps

    sys.exit(report_dumps(dumps, out))


@main.command(
    short_help="Shows which backends work on this machine, and how to repair the others.",
    epilog="""\b
Exit codes:
  0   a backend other than local works (with --backend: that backend), and no other line is broken
  1   otherwise
  2   the command line is wrong

\b
The variable GRADSYNC_BACKEND names the backend that must work, if --backend is not given. The command does not change
the machine.
""",
)
@click.option("--backend", type=click.Choice(tuple(TABLE)), help="Backend that must work; no other backend is tried.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--timeout",
    "deadline_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Time limit of each trial in seconds.",
)
@click.option("--try/--no-try", "tries", default=True, show_default=True, help="Run an all-reduce with each backend.")
@click.option("-v", "--verbose", is_flag=True, help="Also show the lines without a problem.")
def doctor(**options: Any) -> None:
    """Examines this machine, runs an all-reduce of two ranks over each backend, and shows how to repair problems."""
    try:
        from gradsync.doctor.command import doctor as examine
    except ImportError as error:
        raise BackendUnavailable(
            f"a library that gradsync needs does not load here ({error}): "
            "pip install --force-reinstall 'numpy>=2.1' msgpack click rich"
        ) from error
    sys.exit(examine(**options))


@main.command(short_help="Runs a rendezvous server by itself.")
@click.option("--world-size", type=click.IntRange(min=1), required=True, help="Number of ranks of the run.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the interface to listen on.")
@click.option("--port", type=click.IntRange(0, LARGEST_PORT), default=0, help="Port; 0 is any free port.  [default: 0]")
@click.option(
    "--secret-file",
    metavar="FILE",
    help="File of mode 0600 with the secret of the run, or - for a line of standard input.  [required]",
)
def serve(world_size: int, host: str, port: int, secret_file: str | None) -> None:
    """Runs a rendezvous server by itself, for ranks that gradsync did not start.

    The command prints the address of the server. Set three variables for each rank: GRADSYNC_ADDRESS to this address,
    GRADSYNC_HOSTED to 1, so that rank 0 starts no server of its own, and GRADSYNC_SECRET_FILE to the path of a file
    with the same secret. Ctrl-C or SIGTERM ends the server.
    """
    from gradsync.environment import HOW_TO_MAKE_A_SECRET_FILE, read_secret_option
    from gradsync.rendezvous.server import RendezvousServer

    if secret_file is None:
        raise InvalidArgument(
            f"serve needs --secret-file, so that no other user can join the run; make one with: "
            f"{HOW_TO_MAKE_A_SECRET_FILE}"
        )
    server = RendezvousServer(world_size, secret=read_secret_option(secret_file), host=host, port=port)
    signals = _stop_on_termination(server)
    click.echo(server.address)
    if sys.stdout.isatty():
        _print_exports(server.address, secret_file)
    try:
        server.serve_forever()
    except RendezvousError:
        if not signals:  # this error is expected if a signal came before the server began to serve
            raise


def _print_exports(address: str, secret_file: str) -> None:
    """Prints the commands that set a rank's variables, on stderr, because stdout has only the address."""
    import os
    import shlex

    from gradsync import environment

    click.echo(f"export {environment.ADDRESS}={shlex.quote(address)}", err=True)
    click.echo(f"export {environment.HOSTED}=1", err=True)
    if secret_file != "-":
        click.echo(f"export {environment.SECRET_FILE}={shlex.quote(os.path.abspath(secret_file))}", err=True)


def _stop_on_termination(server: RendezvousServer) -> list[int]:
    """Makes SIGINT and SIGTERM stop the server; returns a list, to which the handler adds each signal's number."""
    import signal

    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return received

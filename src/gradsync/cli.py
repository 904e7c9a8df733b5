"""The `gradsync` command: declares all commands with their options. Other modules run the commands, except `serve`."""

from __future__ import annotations

import signal
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from gradsync import __version__
from gradsync.arguments import DEFAULT_GRACE_SECONDS, LARGEST_PORT
from gradsync.backends import BACKENDS, TABLE
from gradsync.environment import BACKEND, COLLECTIVE_TIMEOUT_SECONDS, SECRET, SECRET_FILE
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RendezvousError
from gradsync.removed import refuse_removed

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer


class _Failure(click.ClickException):
    """An error of gradsync, which the command shows on one line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(str(error).split("\n")))
        self.exit_code: int = 2 if isinstance(error, InvalidArgument) else 1  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"gradsync: error: {self.format_message()}", file=file or sys.stderr)


def _refuse_removed(where: str, word: str) -> None:
    try:
        refuse_removed(where, word)
    except InvalidArgument as error:
        raise _Failure(error) from None


class _Commands(click.Group):
    """A group of commands that shows gradsync's errors without a traceback, and refuses removed words with advice."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            _refuse_removed("gradsync (command)", args[0])
        return super().resolve_command(ctx, args)

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
            if error.ctx is not None and error.ctx.command is run:
                _refuse_removed("gradsync run", error.option_name)
            if error.option_name != "--timeout" or error.ctx is None or error.ctx.command is not run:
                raise
            advice = (
                "No such option '--timeout'. To limit how long a collective waits for a rank, set the variable "
                f"{COLLECTIVE_TIMEOUT_SECONDS}, in seconds."
            )
            raise click.NoSuchOption("--timeout", advice, ctx=error.ctx) from None
        except KeyboardInterrupt:  # click would exit with 1 if no supervisor handles Ctrl-C
            sys.exit(128 + signal.SIGINT)


class _Integer(click.IntRange):
    """An integer in a range. For text that is no integer, the error of click.IntRange would be hard to understand."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(click.INT.convert(value, param, ctx), param, ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradsync")
def main() -> None:
    """Synchronises gradients between processes: launcher, check of this machine, rendezvous server."""


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
  1      a rank raised an exception, or gradsync could not start the ranks
  2      the command line is wrong, or the script ended with 2
  130    the user pressed Ctrl-C
  128+n  signal n ended gradsync, or killed the rank whose failure ended the run
  other  the exit code of the rank whose failure ended the run

Options for gradsync come before SCRIPT. gradsync passes everything after SCRIPT to the script.
""",
)
@click.option(
    "-n",
    "--nprocs",
    "--nproc-per-node",
    type=_Integer(min=1),
    help="Number of ranks on this machine.  [default: one per GPU in --gpus; without --gpus, one per visible GPU; "
    "without a GPU, one per usable core]",
)
@click.option(
    "--gpus",
    metavar="IDS",
    help="GPUs, such as 0,1. Each rank sees only one of these GPUs.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    envvar=BACKEND,
    show_default=True,
    show_envvar=True,
    help="Backend of the collectives. auto means nccl if each rank has a GPU of its own; otherwise local for one rank, "
    "and shm for several ranks on one machine. mpi needs mpiexec instead of this command.",
)
@click.option(
    "--max-restarts",
    type=_Integer(min=0),
    default=0,
    show_default=True,
    help="Largest number of restarts, on one machine. A restart starts all ranks again after a rank has failed.",
)
@click.option(
    "--wrap",
    metavar="COMMAND",
    default="",
    help='Start the Python of each rank by this command, such as "numactl -N0" or "nsys profile".',
)
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Also write each rank's output to its own file in DIR. gradsync first removes the logs of an earlier run "
    "from DIR.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    default=DEFAULT_GRACE_SECONDS,
    show_default=True,
    help="Seconds that ranks have to end after gradsync has asked them to end. Then gradsync kills the ranks that "
    "still run.",
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
    "--prefix/--no-prefix",
    default=None,
    help="Show the rank before each line.  [default: with 2 or more ranks on this machine, or several machines]",
)
@click.option(
    "--nnodes", type=_Integer(min=1), help="Number of machines. Start one gradsync run on each.  [default: 1]"
)
@click.option(
    "--node-rank",
    type=_Integer(min=0),
    help="This machine's number K, from 0. With -n P, the same on every machine, its ranks are K * P and so on.",
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="Address of the machine with --node-rank 0, and a free port on that machine. Pass the same value on every "
    "machine.",
)
@click.option(
    "--secret-file",
    metavar="FILE",
    help=f"File of mode 0600 with the secret that all machines share, or - for a line of standard input.  "
    f"[default: the secret in {SECRET}, else in the file that {SECRET_FILE} names]",
)
@click.option(
    "--trace",
    "trace_dir",
    metavar="DIR",
    help="Directory for a Chrome trace of each rank, and of all ranks: when a rank packed, waited and reduced. At the "
    "end gradsync prints where a step's time went, and which rank the others waited for most.",
)
@click.option(
    "--debug",
    is_flag=True,
    help="With NCCL: compare every collective and message between the ranks before it is launched. This is slow, and "
    "finds which ranks differ where a job hangs.",
)
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Runs SCRIPT in several rank processes on this machine, or on several machines with --nnodes.

    SCRIPT calls gradsync.init_process_group(), which needs no arguments. Each rank finds RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun. When a rank fails, gradsync
    ends the other ranks, and then reports which rank was the cause, with its traceback. When a rank ends, gradsync ends
    all processes that the rank has started. Ctrl-C asks all ranks to end; a second Ctrl-C kills them.
    """
    from gradsync.launching.command import run_command

    own_options = {name for option in context.command.params for name in (*option.opts, *option.secondary_opts)}
    sys.exit(run_command(**options, own_options=own_options))


@main.command(
    short_help="Shows which backends work on this machine, and how to repair the others.",
    epilog="""\b
Exit codes:
  0   no check reports "broken", and a trial of shm, mpi or nccl succeeds (with --backend: the trial of this backend)
  1   otherwise
  2   the command line is wrong

\b
The variable GRADSYNC_BACKEND names the backend that must work, if --backend is not given. With --no-try, the exit code
depends only on the checks of the machine. The command does not change the machine.
""",
)
@click.option(
    "--backend", type=click.Choice(tuple(TABLE)), help="Backend that must work. The command tries no other backend."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--timeout",
    "deadline_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Time limit of each trial in seconds.",
)
@click.option(
    "--try/--no-try", "tries", default=True, show_default=True, help="Try an all-reduce, or only check the machine."
)
@click.option("-v", "--verbose", is_flag=True, help="Also show the lines without a problem.")
def doctor(**options: Any) -> None:
    """Checks this machine, tries an all-reduce with each backend that may work here, and shows how to repair problems.

    The command tries the backend "local" only if --backend or GRADSYNC_BACKEND names it.
    """
    try:
        from gradsync.doctor.command import doctor as examine
    except ImportError as error:
        raise BackendUnavailable(
            f"a library that gradsync needs does not load here ({error}): "
            "pip install --force-reinstall 'numpy>=2.1' msgpack click rich cloudpickle"
        ) from error
    sys.exit(examine(**options))


@main.command(short_help="Runs only a rendezvous server.")
@click.option("--world-size", type=_Integer(min=1), required=True, help="Number of ranks of the run.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the interface to listen on.")
@click.option("--port", type=_Integer(0, LARGEST_PORT), default=0, help="Port; 0 is any free port.  [default: 0]")
@click.option(
    "--secret-file",
    metavar="FILE",
    help="File of mode 0600 with the secret of the run, or - for a line of standard input.  [required]",
)
def serve(world_size: int, host: str, port: int, secret_file: str | None) -> None:
    """Runs only a rendezvous server, for ranks that gradsync did not start.

    The command prints the address at which the server listens. Set three variables for each rank. GRADSYNC_ADDRESS is
    this address; with --host 0.0.0.0, put an address of this machine in place of 0.0.0.0. GRADSYNC_HOSTED is 1, so that
    rank 0 starts no second server. GRADSYNC_SECRET_FILE is the path of a file with the same secret. Ctrl-C or SIGTERM
    ends the server.
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
    """Makes SIGINT and SIGTERM stop the server; returns a list to which the handler adds each signal's number."""
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return received

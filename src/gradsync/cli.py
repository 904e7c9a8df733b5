"""The `gradsync` command and its options. launching/command.py and doctor.py do what they say; `serve` is here."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from gradsync import __version__
from gradsync.arguments import DEFAULT_GRACE_SECONDS, LARGEST_PORT
from gradsync.backends import BACKENDS, TABLE, unknown_backend
from gradsync.environment import ADDRESS, BACKEND, HOW_TO_MAKE_A_SECRET_FILE, SECRET, SECRET_FILE, read_secret_option
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, RendezvousError
from gradsync.words import hint, refuse_removed

if TYPE_CHECKING:
    from gradsync.rendezvous.server import RendezvousServer


class _Failure(click.ClickException):
    """An error of gradsync, which the command shows on one line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(str(error).split("\n")))
        self.exit_code: int = 2 if isinstance(error, InvalidArgument) else 1  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"gradsync: error: {self.format_message()}", file=file or sys.stderr)


class _Commands(click.Group):
    """Shows gradsync's errors without a traceback, and what to write instead of words that do not exist."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        with _with_advice():
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if any(error.option_name in option.opts for option in run.params):
                    ctx.fail(f"{error.format_message()} Did you mean: gradsync run {shlex.join(given)}")
                raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if self.get_command(ctx, word) is None:
            with _with_advice():
                refuse_removed("gradsync (command)", word)
            is_script = word.endswith(".py") or os.path.exists(word)
            advice = f": did you mean gradsync run {word}?" if is_script else ""
            ctx.fail(f"No such command {word!r}{advice or hint('gradsync (command)', word, self.commands)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _with_advice():
                return super().invoke(ctx)
        except KeyboardInterrupt:  # click would exit with 1 if no supervisor handles Ctrl-C
            sys.exit(128 + signal.SIGINT)


@contextlib.contextmanager
def _with_advice() -> Iterator[None]:
    """Turns errors of gradsync into one line, and adds advice to errors of the command line of `gradsync run`."""
    try:
        yield
    except GradsyncError as error:
        raise _Failure(error) from None
    except click.MissingParameter as error:
        if error.param is None or error.param.name != "script":
            raise
        example = "For example: gradsync run -n 2 train.py"
        raise click.MissingParameter(example, error.ctx, error.param) from None
    except click.NoSuchOption as error:
        if error.ctx is None or error.ctx.command is not run:
            raise
        option = error.option_name.replace("_", "-")  # as torchrun also writes it
        with _with_advice():
            refuse_removed("gradsync run", option)
        is_ours = any(option in each.opts for each in run.params)
        if advice := f": use {option}" if is_ours else hint("gradsync run", option):
            raise click.NoSuchOption(
                error.option_name, f"No such option {error.option_name!r}{advice}.", ctx=error.ctx
            ) from None
        raise


class _Integer(click.IntRange):
    """An integer in a range, whose errors can be read also where the text is no integer."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if param is not None and "-n" in param.opts and re.fullmatch(r"p\d*", str(value)):
            self.fail("use -n in place of -np", param, ctx)
        return super().convert(click.INT.convert(value, param, ctx), param, ctx)


class _Backend(click.Choice[str]):
    """A backend; for one of another library the error says which to take."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(unknown_backend(value, known=self.choices), param, ctx)
        return str(value)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gradsync")
def main() -> None:
    """Starts ranks, checks this machine, or runs a rendezvous server alone."""


@main.command(
    short_help="Runs a script on several ranks.",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  gradsync run -n 4 train.py --lr 0.1         four ranks of a script; what follows SCRIPT goes to it
  gradsync run -n 2 --gpus 2,3 -m my.train    two ranks of a module, each with a GPU of its own
  gradsync run -n 4 --stdin 2 train.py        breakpoint() works in rank 2
  gradsync run -n 8 --nnodes 2 --node-rank 0 --rendezvous head:29400 --secret-file gradsync.secret train.py
""",
)
@click.option(
    "-n",
    "--nprocs",
    "--nproc-per-node",
    type=_Integer(min=1),
    metavar="N",
    help="Ranks on this machine.  [default: one per GPU in --gpus, else per visible GPU, else per core]",
)
@click.option("--gpus", metavar="IDS", help="GPUs, such as 0,1. Each rank sees one of them.")
@click.option(
    "--backend",
    type=_Backend(BACKENDS),
    default="auto",
    envvar=BACKEND,
    show_envvar=True,
    help="auto: nccl if each rank has a GPU, else shm; local for one rank. mpi needs mpiexec.",
)
@click.option(
    "--max-restarts",
    type=_Integer(min=0),
    metavar="N",
    default=0,
    help="Start all ranks again after a failure, N times; one machine only.",
)
@click.option(
    "--min-ranks",
    type=_Integer(min=1),
    metavar="K",
    help="Go on while K ranks are left: gradsync.rebuild().  [default: all]",
)
@click.option(
    "--respawn",
    type=_Integer(min=0),
    metavar="N",
    default=0,
    help="Start a failed rank again, N times in all; the others go on.",
)
@click.option(
    "--wrap",
    metavar="COMMAND",
    default="",
    help='Starts the Python of each rank, such as "numactl -N0" or "nsys profile".',
)
@click.option(
    "--log-dir", metavar="DIR", help="Write each rank's output to DIR, too; older logs there are removed first."
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=DEFAULT_GRACE_SECONDS,
    show_default=True,
    help="How long ranks may take to end when asked to, before they are killed.",
)
@click.option(
    "--stdin",
    "stdin_rank",
    metavar="RANK",
    default="0",
    show_default=True,
    help="The rank that reads standard input, or none.",
)
@click.option(
    "--prefix/--no-prefix", default=None, help="Show the rank before each line.  [default: with several ranks]"
)
@click.option("--nnodes", type=_Integer(min=1), metavar="N", help="Number of machines: one gradsync run on each.")
@click.option(
    "--node-rank",
    type=_Integer(min=0),
    metavar="K",
    help="This machine's number: with -n P its ranks are K * P and so on.",
)
@click.option("--rendezvous", metavar="HOST:PORT", help="Machine 0 and a free port there, the same on every machine.")
@click.option(
    "--secret-file",
    metavar="FILE",
    help=f"File of mode 0600 with the secret of all machines; - is standard input.  [default: {SECRET_FILE}, {SECRET}]",
)
@click.option(
    "--trace", "trace_dir", metavar="DIR", help="Write Chrome traces; at the end, say where a step's time went."
)
@click.option("--debug", is_flag=True, help="With NCCL: compare every call between the ranks before its launch (slow).")
@click.option("-m", "--module", "as_module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Runs SCRIPT, which calls gradsync.init_process_group(), on several ranks, here or on several machines.

    When a rank fails, the others are ended (with --min-ranks they go on), and the cause is shown last, with its
    traceback; its exit code is that of this command, or 128 + n of a signal. Ctrl-C asks all ranks to end, a second one
    kills them.
    """
    from gradsync.launching.command import run_command

    own_options = {name for option in context.command.params for name in (*option.opts, *option.secondary_opts)}
    sys.exit(run_command(**options, own_options=own_options))


@main.command(
    short_help="Says which backends work on this machine, and how to mend the others.",
    epilog="""\b
Exit codes:
  0   nothing is broken, and shm, mpi or nccl works (with --backend or GRADSYNC_BACKEND: this one)
  1   otherwise
  2   the command line is wrong

\b
With --no-try the exit code says only whether something is broken. Nothing on the machine is changed.
""",
)
@click.option("--backend", type=_Backend(tuple(TABLE)), help="The backend that must work; no other one is tried.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--timeout",
    "deadline_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="How many seconds each trial may take.",
)
@click.option(
    "--try/--no-try", "tries", default=True, show_default=True, help="Try an all-reduce, or only look at the machine."
)
@click.option("-v", "--verbose", is_flag=True, help="Show the lines without a problem, too.")
def doctor(**options: Any) -> None:
    """Tries an all-reduce over each backend that may work on this machine, and says how to mend the others.

    "local" is tried only if --backend or GRADSYNC_BACKEND names it.
    """
    try:
        from gradsync.doctor import doctor as examine
    except ImportError as error:
        raise BackendUnavailable(
            f"a library that gradsync needs does not load here ({error}): "
            "pip install --force-reinstall 'numpy>=2.1' msgpack click rich cloudpickle"
        ) from error
    sys.exit(examine(**options))


@main.command(short_help="Runs a rendezvous server alone.")
@click.option("--world-size", type=_Integer(min=1), required=True, help="Number of ranks of the run.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=_Integer(0, LARGEST_PORT), default=0, help="Port; 0 is any free port.  [default: 0]")
@click.option(
    "--secret-file",
    metavar="FILE",
    help="File of mode 0600 with the secret of the run, or - for standard input.  [required]",
)
def serve(world_size: int, host: str, port: int, secret_file: str | None) -> None:
    """Runs a rendezvous server alone, for ranks that gradsync did not start.

    It prints its address. Give each rank this address as GRADSYNC_ADDRESS (for 0.0.0.0 write an address of this
    machine), and a file with the same secret as GRADSYNC_SECRET_FILE. Ctrl-C or SIGTERM ends the server.
    """
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
    click.echo(f"export {ADDRESS}={shlex.quote(address)}", err=True)
    if secret_file != "-":
        click.echo(f"export {SECRET_FILE}={shlex.quote(os.path.abspath(secret_file))}", err=True)


def _stop_on_termination(server: RendezvousServer) -> list[int]:
    """Has SIGINT and SIGTERM stop the server; returns a list to which each that comes is added."""
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return received

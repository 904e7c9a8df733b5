"""The command line of `gradsync bench`; thresholds.py and collectives.py run its two commands.

Every start of `gradsync` imports this file, so it imports only click.
"""

from __future__ import annotations

from typing import Any

import click

from gradsync.backends import BACKENDS
from gradsync.errors import InvalidArgument

#: For each command, the options that version 0.2 has removed, each with the text that says what to do instead.
_PREDICT = (
    "leave this option out to measure thresholds, or run benchmarks/predict_threshold.py of the repository to predict "
    "the best one"
)
_REMOVED_OPTIONS = {
    "thresholds": dict.fromkeys(("--predict", "--backward-ms", "--latency-us", "--bandwidth-gbs"), _PREDICT),
    "collectives": {
        "--warm-up": "the command always makes 5 calls before the timed ones",
        "-w": "the command always makes 5 calls before the timed ones",
        "--blocks": "the command always times 3 blocks of calls; --iters is the number of calls in a block",
        "--check": "the command checks every result",
        "--no-check": "the command checks every result",
        "-p": "the number of ranks is -n, as in every command; the number of timed calls is --iters",
        "--compare": "run benchmarks/beside_peers.py of the repository",
    },
}


class _Command(click.Command):
    """A command; if a user passes an option that was removed, the error shows what to do instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            instead = _REMOVED_OPTIONS[self.name or ""].get(error.option_name)
            if instead is None:
                raise
            raise InvalidArgument(f"gradsync bench {self.name} {error.option_name} was removed: {instead}") from None


class _Commands(click.Group):
    """A group of commands; if a user runs a command that was removed, the error shows what to run instead."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "rendezvous":
            raise InvalidArgument(
                "gradsync bench rendezvous was removed: run benchmarks/rendezvous_scale.py of the repository"
            )
        return super().resolve_command(ctx, args)


# The options of both commands.
_backend = click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="Communication backend; for mpi, mpiexec starts the ranks.",
)
_json = click.option(
    "--json", "json_path", metavar="FILE", help="Also writes the results, the machine and the versions to FILE."
)
_plot = click.option(
    "--plot", "plot_path", metavar="FILE", help="Also draws the results as a PNG; needs gradsync[plot]."
)


@click.group(cls=_Commands)
def bench() -> None:
    """Times collectives and bucket thresholds on this machine."""


@bench.command(
    cls=_Command,
    short_help="Finds the bucket threshold that suits a model.",
    epilog="""\b
Examples:
  gradsync bench thresholds --model resnet50              two ranks, thresholds from 0.25 to 100 MB
  gradsync bench thresholds --model shapes.json -n 4      your own gradients: callback.dump_shapes("shapes.json")
  mpiexec -n 4 gradsync bench thresholds --model bert     mpiexec has started the ranks; srun and torchrun work too

\b
Thresholds are in MB; 1 MB is 1024**2 bytes.
""",
)
@click.option(
    "--model", required=True, metavar="MODEL", help="Model: resnet50, gpt2, bert, or a file of shapes (.json)."
)
@click.option(
    "-n",
    "--nprocs",
    type=click.IntRange(min=1),
    help="Number of ranks.  [default: one per visible GPU; 2 without a GPU; 1 with local]",
)
@_backend
@click.option(
    "--thresholds", metavar="MB,MB,...", help="Thresholds to measure.  [default: 0.25,0.5,1,2,5,10,25,50,100]"
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of timed steps of each threshold.",
)
@click.option(
    "--time-limit",
    "limit_seconds",
    type=click.FloatRange(min=0),
    default=45.0,
    show_default=True,
    help="Time limit in seconds; the command times at least 3 steps.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also shows quartiles.")
@_json
@_plot
def thresholds(**options: Any) -> None:
    """Measures which threshold_bytes synchronises a model's gradients fastest, and how reliable this result is.

    The command starts ranks on this machine, unless a launcher (mpiexec, srun, torchrun) has started it. Each round
    measures the time of one step with each threshold, on the slowest rank. The table shows the median over the rounds.
    """
    from gradsync.bench.thresholds import bench_thresholds

    bench_thresholds(**options)


@bench.command(
    cls=_Command,
    short_help="Times collectives, and checks their results.",
    epilog="""\b
Examples:
  gradsync bench collectives                                    all_reduce, two ranks, 1 KB to 16 MB
  gradsync bench collectives -c all -n 4 -b 64K -e 64M -f 8
  gradsync bench collectives -c all_reduce,broadcast --plot out.png --json out.json
  srun -n 16 gradsync bench collectives -e 256M                 ranks that a launcher has started

\b
The table shows for each size the time of one call, and size / time in GB/s, out of place and in place. The size is the
number of bytes of the source or of the target, whichever is larger. 1 KB is 1024 bytes and 1 MB is 1024**2 bytes, but
1 GB/s is 1e9 bytes per second. With -v, the table also shows the bus bandwidth of NVIDIA's nccl-tests, which is GB/s
times a factor: 2 (n - 1) / n for all_reduce; (n - 1) / n for all_gather, reduce_scatter, all_to_all, gather and
scatter; 1 for broadcast, reduce and exchange. If a collective runs only out of place, or only in place, the other
columns show "-". The exit code is 1 if elements of a result differ from NumPy's.
""",
)
@click.option(
    "-c",
    "--collectives",
    default="all_reduce",
    show_default=True,
    metavar="NAMES",
    help="Collectives to time: all, or a list.",
)
@click.option(
    "-n",
    "--nprocs",
    type=click.IntRange(min=1),
    help="Number of ranks.  [default: one per GPU with nccl; 2 on the CPU; 1 with local]",
)
@_backend
@click.option("-b", "--begin", default="1K", show_default=True, metavar="SIZE", help="Smallest size.")
@click.option("-e", "--end", default="16M", show_default=True, metavar="SIZE", help="Largest size.")
@click.option("-f", "--factor", type=float, default=4.0, show_default=True, help="Factor from one size to the next.")
@click.option(
    "--iters",
    "iterations",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of timed calls in each of 3 blocks of calls.",
)
@click.option(
    "-o", "--op", default="sum", show_default=True, help="Operator of reductions: sum, mean, prod, min or max."
)
@click.option(
    "-d", "--dtype", default="float", show_default=True, help="Dtype: float, double, half, bfloat16, int32, ..."
)
@click.option("-v", "--verbose", is_flag=True, help="Also show counts, bus bandwidths and quartiles.")
@_json
@_plot
def collectives(**options: Any) -> None:
    """Times collectives over a range of sizes, checks every result, and shows times and bandwidths.

    The command starts ranks on this machine, unless a launcher (mpiexec, srun, torchrun) has started it.
    """
    from gradsync.bench.collectives import bench_collectives

    bench_collectives(**options)

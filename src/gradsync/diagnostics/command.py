"""The command line of `gradsync trace`. Every start of `gradsync` reads this file: it loads nothing but click."""

from __future__ import annotations

import click


@click.command(
    short_help="Says from dumps where ranks differ or wait, and draws a trace.",
    epilog="""\b
Examples:
  gradsync run -n 2 --dump-dir dumps train.py       a failure leaves a dump of each rank in dumps
  gradsync trace dumps                              what the ranks did differently, and who waits for whom
  gradsync run -n 2 --trace traced train.py         when each bucket was packed, waited for, reduced and split
  gradsync trace traced --out trace.json            open trace.json in https://ui.perfetto.dev or chrome://tracing

\b
Exit codes:
  0      no rank differs from another
  1      some rank differs, or ranks wait for each other in a circle
  2      there are no dumps, or one cannot be read
""",
)
@click.argument("dumps", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Also writes a Chrome trace to FILE.")
@click.pass_context
def trace(context: click.Context, dumps: tuple[str, ...], out: str | None) -> None:
    """Compares DUMPS of the flight recorder: files, or folders of them, one file a rank.

    Says first what ranks did differently, then how far each has come and where it stands.
    """
    import json
    from pathlib import Path

    from gradsync.diagnostics.chrome_trace import chrome_trace
    from gradsync.diagnostics.compare import circle
    from gradsync.diagnostics.dump_files import read_dumps
    from gradsync.diagnostics.report import divergences, report, waits
    from gradsync.errors import InvalidArgument

    latest, earlier = read_dumps(map(Path, dumps))
    click.echo("\n".join(report(latest, earlier)))
    if out is not None:
        try:
            Path(out).write_text(json.dumps(chrome_trace(latest)))
        except OSError as error:
            raise InvalidArgument(f"--out {out!r} cannot be written: {error.strerror}") from None
        click.echo(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing")
    if divergences(latest) or circle(waits(latest)) is not None:
        context.exit(1)

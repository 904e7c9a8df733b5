"""`gradsync bench rendezvous`, from its options to what it prints and writes. Mistakes are told before it runs."""

from __future__ import annotations

import importlib.util
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradsync.bench.live_text import LiveText
from gradsync.bench.measurement import busy_machine, provenance
from gradsync.bench.outputs import check_outputs, write_json
from gradsync.bench.rendezvous.contenders import GRADSYNC, TCPSTORE
from gradsync.bench.rendezvous.names import can_give_names
from gradsync.bench.rendezvous.picture import plot
from gradsync.bench.rendezvous.report import EXPLANATION, chart, table
from gradsync.bench.rendezvous.rows import Row, as_dictionary, row_of
from gradsync.bench.rendezvous.run import LOAD_PROCESSES, Run, play
from gradsync.errors import GradsyncError, InvalidArgument

_MOST_RANKS = 4096
_OTHER_FILES = 64  # what a process has open beside its connections


@dataclass(frozen=True)
class RendezvousOptions:
    """The options of the command, as its help explains them."""

    ranks: str = "64,256,1024"
    rounds: int = 5
    compares: bool = False
    json_path: str | None = None
    plot_path: str | None = None

    def counts(self) -> list[int]:
        """Returns the numbers of ranks, ascending.

        Raises:
            InvalidArgument: one is no number, or out of range.
        """
        parts = [part.strip() for part in self.ranks.split(",") if part.strip()]
        if not parts or not all(part.isascii() and part.isdigit() and 2 <= int(part) <= _MOST_RANKS for part in parts):
            raise InvalidArgument(f"--ranks needs numbers from 2 to {_MOST_RANKS}, as 64,256; got {self.ranks!r}")
        return sorted({int(part) for part in parts})

    def check(self) -> None:
        """Refuses what cannot run.

        Raises:
            InvalidArgument, BackendUnavailable: the text says why.
        """
        needed = max(self.counts()) + _OTHER_FILES
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= hard < needed:
            raise InvalidArgument(
                f"{max(self.counts())} ranks need {needed} open files, and {hard} are allowed: use fewer --ranks, or "
                f"as root: prlimit --pid $$ --nofile={needed}"
            )
        check_outputs(self.json_path, self.plot_path)


def bench_rendezvous(options: RendezvousOptions) -> None:
    """Measures, prints and writes what the options ask for.

    Raises:
        InvalidArgument, BackendUnavailable: before anything runs.
        GradsyncError: the ranks did not come through.
    """
    options.check()
    made = provenance(["gradsync", *sys.argv[1:]])
    contenders, absent = _contenders(options.compares)
    runs = "one run" if options.rounds == 1 else f"medians of {options.rounds} runs"
    print(f"{', '.join(contenders)}; ranks simulated by {LOAD_PROCESSES} processes; {runs}")
    if busy := busy_machine():
        print(busy)
    if absent:
        print(f"Not compared with TCPStore: {absent}")
    rows = _measure_all(options, contenders)
    print(f"\n{table(rows)}\n\n{EXPLANATION}\n\n{chart(rows)}")
    if options.plot_path is not None:
        plot(rows, "Rendezvous of simulated ranks on one machine; bars are quartiles", options.plot_path)
        print(f"drawn in {options.plot_path}")
    settings = {**asdict(options), "not_compared": absent, "loopback_is_named": can_give_names()}
    write_json(options.json_path, made, {"settings": settings, "rows": [as_dictionary(row) for row in rows]})


def _contenders(compares: bool) -> tuple[list[str], str]:
    """Returns who takes part, and why the others do not."""
    if not compares:
        return [GRADSYNC], ""
    if importlib.util.find_spec("torch") is None:
        return [GRADSYNC], "PyTorch is not installed in this Python: pip install torch"
    return [GRADSYNC, TCPSTORE], ""


def _measure_all(options: RendezvousOptions, contenders: Sequence[str]) -> list[Row]:
    """Lets contenders take turns, every second round backwards; the first round of each size only warms up."""
    live = LiveText(sys.stderr)
    rows: list[Row] = []
    for ranks in options.counts():
        runs: dict[str, list[Run]] = {contender: [] for contender in contenders}
        for round_ in range(1 + options.rounds):
            for contender in contenders[:: -1 if round_ % 2 else 1]:
                progress = f"{ranks:,} ranks, {contender}: round {round_} of {options.rounds}"
                live.show("\n".join(filter(None, [table(rows) if rows else "", progress])))
                runs[contender].append(_played(contender, ranks))
        rows += [row_of(contender, ranks, of_contender[1:]) for contender, of_contender in runs.items()]
    live.clear()
    return rows


def _played(contender: str, ranks: int) -> Run:
    try:
        return play(contender, ranks)
    except RuntimeError as error:
        raise GradsyncError(f"{contender} with {ranks} ranks: {error}") from error

"""Starts the ranks of a measurement, and times one case with them, block by block."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.operation import IN_PLACE, SEPARATE, Prepared
from gradsync.bench.collectives.rows import FormResult, Row
from gradsync.bench.crew import Crew, Patience, Start
from gradsync.bench.measurement import Seconds
from gradsync.bench.rank_starts import find_mpiexec, under_gradsync, under_mpiexec, without_launcher
from gradsync.errors import BackendUnavailable

_RANK = "gradsync.bench.collectives.rank"
_PATIENCE = Patience(start_seconds=60.0, answer_seconds=300.0)
# The first block warms up as it was asked to; what later ones need is to wake.
_WARM_UP_LATER = 1


def start(backend: str, folder: str, ranks: int, patience: Patience = _PATIENCE) -> Crew:
    """Starts the ranks: under mpiexec for "mpi", else under gradsync's launcher.

    Args:
        backend: of all of them.
        folder: private to this run, with a path short enough for a socket in it.
        ranks: how many.
        patience: how long to wait for them.

    Raises:
        BackendUnavailable: there is no mpiexec.
        CrewFailed: they did not start.
    """

    def starts(address: str) -> Sequence[Start]:
        arguments = [_RANK, backend, address]
        if backend != "mpi":
            return under_gradsync(ranks, arguments)
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise BackendUnavailable("gradsync/mpi needs mpiexec, found none: pip install mpich, or load your MPI")
        return under_mpiexec(mpiexec, ranks, arguments)

    return Crew(f"gradsync/{backend}", folder, starts, ranks, environ=without_launcher(), patience=patience)


def measure(case: Case, itemsize: int, crew: Crew, blocks: int) -> Row:
    """Times both forms of a case.

    Args:
        case: what to time.
        itemsize: bytes of its elements.
        crew: the ranks.
        blocks: of each form.

    Raises:
        CrewFailed: a rank failed.
    """
    forms = _prepare(crew, case)
    samples: dict[str, list[float]] = {form: [] for form in forms}
    for block in range(blocks):
        warm_up = case.warm_up if block == 0 else min(_WARM_UP_LATER, case.warm_up)
        for form, found in forms.items():
            if not found.refusal:
                samples[form].append(max(crew.ask("time", form, case.iterations, warm_up)))
    crew.ask("release")
    results = {form: _result(found, samples[form]) for form, found in forms.items()}
    return Row(crew.system, case, itemsize, results)


def _prepare(crew: Crew, case: Case) -> dict[str, Prepared]:
    """Returns what the ranks say of each form, as one: all wrong elements together."""
    forms = {SEPARATE: case.kind.has_separate_target, IN_PLACE: case.kind.has_in_place}
    found = {}
    for form, exists in forms.items():
        if exists:
            by_rank: list[Prepared] = crew.ask("prepare", case, form)
            refusals = [rank.refusal for rank in by_rank if rank.refusal]
            wrong = sum(rank.wrong or 0 for rank in by_rank) if case.checks and not refusals else None
            found[form] = Prepared(wrong, refusals[0] if refusals else "")
        else:
            found[form] = Prepared(refusal=f"{case.collective} has no such form")
    return found


def _result(prepared: Prepared, samples: Sequence[float]) -> FormResult:
    return FormResult(Seconds.of(samples) if samples else None, prepared.wrong, prepared.refusal)

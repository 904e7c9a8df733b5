"""Who measures when: contenders take turns in blocks, so that the machine's moods meet all of them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.operation import IN_PLACE, SEPARATE, Prepared
from gradsync.bench.collectives.rows import FormResult, Row
from gradsync.bench.collectives.systems import Contender, start
from gradsync.bench.crew import Crew, CrewFailed
from gradsync.bench.measurement import Seconds

# The first block warms up as it was asked to; what later ones need is to wake.
_WARM_UP_LATER = 1


@contextlib.contextmanager
def started(contenders: Sequence[Contender], ranks: int, absent: dict[str, str]) -> Iterator[dict[str, Crew]]:
    """Starts the ranks of all contenders; ends them all.

    Args:
        contenders: gradsync first: without the others it goes on alone.
        ranks: of each.
        absent: gets those that did not start, and why.

    Raises:
        CrewFailed: gradsync's did not start, or some did not end in order.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-") as folder, contextlib.ExitStack() as stack:
        crews: dict[str, Crew] = {}
        for contender in contenders:
            try:
                crews[contender.name] = stack.enter_context(start(contender, folder, ranks))
            except CrewFailed as error:
                if not crews:
                    raise
                absent[contender.name] = error.summary
        yield crews


def measure(case: Case, itemsize: int, crews: Mapping[str, Crew], blocks: int) -> list[Row]:
    """Times a case with all contenders.

    Args:
        case: what to time.
        itemsize: bytes of its elements.
        crews: by contender.
        blocks: of each form of each contender.

    Raises:
        CrewFailed: a rank failed.
    """
    prepared = {name: _prepare(crew, case) for name, crew in crews.items()}
    samples: dict[tuple[str, str], list[float]] = {}
    for block in range(blocks):
        order = list(prepared.items())
        for name, forms in order[:: -1 if block % 2 else 1]:
            for form, found in forms.items():
                if not found.refusal:
                    warm_up = case.warm_up if block == 0 else min(_WARM_UP_LATER, case.warm_up)
                    slowest = max(crews[name].ask("time", form, case.iterations, warm_up))
                    samples.setdefault((name, form), []).append(slowest)
    rows = []
    for name, forms in prepared.items():
        crews[name].ask("release")
        results = {form: _result(found, samples.get((name, form))) for form, found in forms.items()}
        rows.append(Row(name, case, itemsize, results))
    return rows


def _prepare(crew: Crew, case: Case) -> dict[str, Prepared]:
    """Returns what the ranks of a contender say of each form, as one: all wrong elements together."""
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


def _result(prepared: Prepared, samples: Sequence[float] | None) -> FormResult:
    return FormResult(Seconds.of(samples) if samples else None, prepared.wrong, prepared.refusal)

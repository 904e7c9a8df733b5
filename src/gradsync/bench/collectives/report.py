"""What a person reads: the table in the columns of nccl-tests, and a chart of the bandwidths side by side."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bench.collectives.kinds import ROOT
from gradsync.bench.collectives.operation import IN_PLACE, SEPARATE
from gradsync.bench.collectives.rows import FormResult, Row
from gradsync.bench.text import bars, megabytes

FORMS = (SEPARATE, IN_PLACE)
#: As nccl-tests names types; NumPy's own names where it has none.
_TYPES = {"float16": "half", "float32": "float", "float64": "double"}
_WIDTHS = (12, 12, 8, 6, 6)
_FORM_WIDTHS = (9, 7, 7, 6)


def heading() -> str:
    """Returns the three lines above the figures, as nccl-tests prints them."""
    form_width = sum(_FORM_WIDTHS) + len(_FORM_WIDTHS)
    over = " " * (sum(_WIDTHS) + len(_WIDTHS))
    names = _line(_WIDTHS, ("size", "count", "type", "redop", "root"))
    units = _line(_WIDTHS, ("(B)", "(elements)", "", "", ""))
    for form in FORMS:
        over += form.center(form_width)
        names += _line(_FORM_WIDTHS, ("time", "algbw", "busbw", "#wrong"))
        units += _line(_FORM_WIDTHS, ("(us)", "(GB/s)", "(GB/s)", ""))
    return "\n".join(f"#{line}".rstrip() for line in (over, names, units))


def line_of(row: Row) -> str:
    """Returns a row under that heading."""
    case = row.case
    root = str(ROOT) if case.kind.rooted else "-1"
    cells = (str(row.size_bytes), str(case.count), _TYPES.get(case.dtype, case.dtype), case.op or "none", root)
    text = _line(_WIDTHS, cells)
    for form in FORMS:
        text += _line(_FORM_WIDTHS, _form_cells(row, form))
    return f" {text}"


def _form_cells(row: Row, form: str) -> tuple[str, ...]:
    result: FormResult = row.forms[form]
    algorithm, bus = row.algorithm_bytes_per_second(form), row.bus_bytes_per_second(form)
    if result.seconds is None or algorithm is None or bus is None:
        return ("-", "-", "-", "-")
    wrong = "N/A" if result.wrong is None else str(result.wrong)
    return (_short(1e6 * result.seconds.median), f"{algorithm / 1e9:.2f}", f"{bus / 1e9:.2f}", wrong)


def _short(microseconds: float) -> str:
    """Returns a time in at most seven characters, as far as it goes."""
    digits = 2 if microseconds < 100 else 1 if microseconds < 1e4 else 0
    return f"{microseconds:.{digits}f}"


def _line(widths: Sequence[int], cells: Sequence[str]) -> str:
    return "".join(f" {cell:>{width}}" for width, cell in zip(widths, cells, strict=True))


def chart(rows: Sequence[Row]) -> str:
    """Returns bars of the bus bandwidth of one collective, by size, from 0; "" for fewer than two."""
    shown = [(row, bus) for row in rows if (bus := row.best_bus_bytes_per_second())]
    if len(shown) < 2:
        return ""
    names = [megabytes(row.size_bytes) for row, _ in shown]
    texts = [f"{bus / 1e9:.3g} GB/s" for _, bus in shown]
    title = f"bus bandwidth of {shown[0][0].case.collective}, the faster form"
    return bars(title, names, [bus for _, bus in shown], texts, [""] * len(shown))


def refusals(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each collective that is not offered, and why; forms that do not exist are left out."""
    found: dict[tuple[str, str, str], None] = {}
    for row in rows:
        for form, result in row.forms.items():
            exists = row.case.kind.has_separate_target if form == SEPARATE else row.case.kind.has_in_place
            if result.refusal and exists:
                found[row.contender, f"{row.case.collective} {form}", result.refusal] = None
    return [f"{contender}: no {what}: {reason}" for contender, what, reason in found]


def average_bus_gigabytes(rows: Sequence[Row]) -> float | None:
    """Returns the mean of all bus bandwidths, in 1e9 bytes/s, as nccl-tests sums a run up; None where there is none."""
    found = [bus / 1e9 for row in rows for form in FORMS if (bus := row.bus_bytes_per_second(form)) is not None]
    return sum(found) / len(found) if found else None

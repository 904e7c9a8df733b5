"""Tables and the picture, from the JSON in benchmarks/results: a line for each row, a column for each contender.

python benchmarks/tables.py  # writes the tables of README.md and docs, and docs/pictures/speed.svg, anew
python benchmarks/tables.py --check  # fails if the tables are not those of the results
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "speed.svg"
Medians = Mapping[str, Mapping[str, float]]  # seconds, by row and contender


def time_text(seconds: float) -> str:
    """Returns a time with three digits: "8.84 us", "32.6 ms", "1.23 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def cells(medians: Medians, heading: str = "") -> list[list[str]]:
    """Returns a line of headings and a line for each row. A contender that no row has is no column."""
    columns = list(dict.fromkeys(contender for row in medians.values() for contender in row))
    lines = [[name, *[time_text(row[c]) if c in row else "" for c in columns]] for name, row in medians.items()]
    return [[heading, *columns], *lines]


def aligned(medians: Medians) -> Iterator[list[str]]:
    """Yields a table for a terminal for each set of contenders."""
    left = dict(medians)
    while left:
        together = set(next(iter(left.values())))
        lines = cells({name: row for name, row in left.items() if set(row) == together})
        left = {name: row for name, row in left.items() if set(row) != together}
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        yield [
            "  ".join([line[0].ljust(widths[0]), *[c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]])
            for line in lines
        ]


# -- The pages --------------------------------------------------------------------------------------------------------


def measured(name: str) -> tuple[Medians, dict[str, Any]]:
    """Returns the rows of a file of results whose names begin like this, without that; and the machine.

    Args:
        name: "FILE/BEGINNING", such as "cpu/all_reduce".
    """
    file, _, beginning = name.partition("/")
    found = json.loads((RESULTS / f"{file}.json").read_text())
    rows: dict[str, dict[str, float]] = {}
    for benchmark in found["benchmarks"]:
        if benchmark["group"].startswith(beginning):
            row = benchmark["group"].removeprefix(beginning).strip(" ,:")
            rows.setdefault(row, {})[benchmark["name"]] = benchmark["stats"]["median"]
    return rows, found["machine_info"]


def table(name: str) -> str:
    """Returns a table in Markdown."""
    rows, _ = measured(name)
    heading, *lines = [f"| {' | '.join(line)} |" for line in cells(rows, name.partition("/")[2])]
    rule = "| --- |" + " ---: |" * (heading.count("|") - 2)
    return "\n".join([heading, rule, *lines, ""])


def fill(page: str) -> str:
    """Returns the text of a page with new tables between its markers; the first names the machine."""
    machine = ""

    def filled(found: re.Match[str]) -> str:
        nonlocal machine
        above, machine = machine, f"\nMeasured on {measured(found[2])[1]['machine']}.\n"
        return f"{found[1]}\n{table(found[2])}{machine if machine != above else ''}{found[3]}"

    return re.sub(r"(<!-- benchmark: (.+?) -->\n).*?(<!-- end -->\n)", filled, page, flags=re.DOTALL)


def draw(path: Path) -> None:
    """Draws a bar for each contender of the steps with new arrays."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "gradsync"  # the same file from the same figures
    rows, machine = measured("cpu/step, new arrays")
    contenders = [name for name in cells(rows)[0][1:] if name != "copy"]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, contender in enumerate(contenders):
        times = [1e3 * row.get(contender, 0.0) for row in rows.values()]
        places = [place + (number - (len(contenders) - 1) / 2) * 0.8 / len(contenders) for place in range(len(rows))]
        bars = axes.barh(places, times, height=0.8 / len(contenders), label=contender)
        axes.bar_label(bars, [f"{time:.3g} ms" if time else "" for time in times], padding=2, fontsize="x-small")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms to average the gradients of a step on two ranks; less is better")
    axes.set_title(f"New arrays in each step; {machine['machine'].partition(', Python')[0]}", fontsize="small")
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(check: str = "") -> None:
    pages = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    stale = [path.name for path, page in pages.items() if fill(page) != page]
    if check:
        sys.exit(f"other figures than in benchmarks/results: {', '.join(stale)}" if stale else 0)
    for path, page in pages.items():
        path.write_text(fill(page))
    draw(PICTURE)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The tables of the pages: the results under benchmarks/results, their layout, and the line below each table.

python benchmarks/page_tables.py  # writes the tables of README.md and of the pages in docs anew
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison_tables import comparison, knobs, lists, thresholds
from timing_tables import over_mpi, start_up, training_speed

RESULTS = Path(__file__).parent / "results"

#: How the results of each benchmark become a table.
LAYOUTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "all_reduce": comparison,
    "collectives": comparison,
    "buckets": lists,
    "buckets.thresholds": thresholds,
    "buckets.knobs": knobs,
    "training_speed": training_speed,
    "start_up": start_up,
    "beside_mpi4py": over_mpi,
}
_MEDIANS = "The table shows medians. The compared programs took turns"
#: The ranks of most measurements. A table whose setting is this one, and whose machine is that of the table above it on
#: the page, names neither.
USUAL = "two ranks"
#: For each table, what was measured and remarks about the table; {command} is the command in the file of results.
METHODS = {
    "all_reduce": (
        USUAL,
        'In the rows "busy cores", one busy process for each core competes with the ranks, and disturbs only some '
        "rounds. If such a time is below the time on idle cores, the difference is noise",
    ),
    "buckets": (
        USUAL,
        "MPI reduces the gradients one by one (each), or all of them as one array (flat). The time of DDP is its "
        "backward pass minus the same pass in `no_sync()`",
    ),
    "training_speed": (
        "",
        f"{_MEDIANS}. All runs train on the same batches to the same accuracy. The last column is the speed-up: the "
        "fastest time with one process, divided by the time with the ranks. "
        "`python benchmarks/training_speed.py` makes the table",
    ),
    "start_up": ("", ""),
}


def table(name: str, machine_above: str = "") -> tuple[str, str]:
    """Returns the committed results as a table, or a line that they are not measured yet; and the measured machine.

    Args:
        name: of the results, and after a dot of one of the tables that are made of them.
        machine_above: the machine of the table above this one on the page.
    """
    path = RESULTS / f"{name.partition('.')[0]}.json"
    if not path.exists():
        return "Not measured yet.\n", machine_above
    results = json.loads(path.read_text())
    setting, remark = METHODS.get(name, (USUAL, ""))
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['usable_cores']} cores, Python {versions['python']}, NumPy {versions['numpy']}"
    remarks = []
    if where != machine_above:
        remarks = [f"The measurement ran{f' with {setting}' if setting else ''} on {where}."]
    elif setting not in ("", USUAL):
        remarks = [f"The measurement ran with {setting}."]
    if remark:
        remarks.append(remark.format(command=results.get("command", "").partition(" --json ")[0]) + ".")
    return "\n".join(LAYOUTS[name](results)) + "\n" + (f"\n{' '.join(remarks)}\n" if remarks else ""), where


def fill_tables(page: str) -> str:
    """Returns the text of a page with new tables between its markers."""
    machine = ""

    def fill(marker: re.Match[str]) -> str:
        nonlocal machine
        content, machine = table(marker[2], machine)
        return f"{marker[1]}\n{content}{marker[3]}"

    return re.sub(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->\n)", fill, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in (RESULTS.parents[1] / "README.md", *sorted((RESULTS.parents[1] / "docs").rglob("*.md"))):
        path.write_text(fill_tables(path.read_text()))

"""Writes into README.md what can be made: example files, captured output, and the table of measured figures.

    python benchmarks/readme.py          # rewrites README.md
    python benchmarks/readme.py --check  # exit code 1 when README.md is not what it would write

Output is captured from real runs, with process ids and the interpreter's own frames taken out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

SCENES = {
    "disagree": """\
import numpy as np
import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    names = ["conv", "dense", "bias"] if comm.rank == 0 else ["conv", "bias", "dense"]
    try:
        with sync.backward():
            for name in names:
                sync(name, np.ones(3))
    except gs.PlanMismatch as error:
        if comm.rank == 0:
            print(error)
""",
    "raise": """\
import numpy as np
import gradsync as gs

with gs.init_process_group() as comm:
    sync = gs.AllreduceCallback("mean")
    for step in range(10):
        with sync.backward():
            sync("weights", np.ones(3))
            if comm.rank == 1 and step == 3:
                raise ValueError("no such batch")
""",
}


def render(text: str) -> str:
    """Returns the README with everything between its markers made anew."""
    text = re.sub(
        r"(<!-- file: (\S+) -->\n```python\n).*?(```\n)",
        lambda m: m[1] + (ROOT / m[2]).read_text() + m[3],
        text,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"(<!-- output: (\S+) -->\n```text\n).*?(```\n)", lambda m: m[1] + play(m[2]) + m[3], text, flags=re.DOTALL
    )
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->\n)",
        lambda m: m[1] + "\n" + table(m[2]) + m[3],
        text,
        flags=re.DOTALL,
    )


def play(scene: str) -> str:
    """Runs a scene on two ranks and returns what it prints, without the lines of ranks that failed as a consequence.

    Which way such a rank learns of the failure first, and so its words, is a matter of microseconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCENES[scene])
        done = subprocess.run(
            [sys.executable, "-m", "gradsync", "run", "-n", "2", "train.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        output = (done.stdout + done.stderr).replace(folder + "/", "")
    output = re.sub(r"^gradsync: rank.* also failed: .*\n", "", output, flags=re.MULTILINE)
    return re.sub(r"pid \d+", "pid 4242", output)


def table(name: str) -> str:
    """Returns the committed results as a table."""
    results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    machine, versions = results["machine"], results["versions"]
    if "rows" in results:
        lines = comparison(results["rows"])
    else:
        lines = ["| measured | median | compared with | ratio |", "| --- | --- | --- | --- |"]
        lines += map(row, results["results"])
    where = f"{machine['cpu']}, {machine['usable_cores']} cores, Python {versions['python']}, NumPy {versions['numpy']}"
    return "\n".join(lines) + f"\n\nTwo ranks on {where}; medians, contenders alternating in one run.\n"


# A column for each system, and what it is called in the rows, for lists of gradients and for single arrays.
SYSTEMS = {
    "gradsync": ("gradsync",),
    "local copy": ("local copy",),
    "DDP on gloo": ("DDP on gloo",),
    "gloo": ("gloo", "gloo, 25 MB buckets"),
    "Open MPI": ("Open MPI", "Open MPI per tensor"),
    "MPICH": ("MPICH", "MPICH per tensor"),
}


def comparison(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table with a line for each workload and a column for each system."""
    medians: dict[str, dict[str, float]] = {}
    for found in rows:
        beside_busy = found["workload"].endswith("busy cores")
        if found["seconds"] and beside_busy == (found["state"] == "busy"):  # the idle half of that one is shown already
            medians.setdefault(found["workload"], {})[found["contender"]] = found["seconds"]["median"]
    lines = [f"| milliseconds | {' | '.join(SYSTEMS)} |", "| --- |" + " --- |" * len(SYSTEMS)]
    for name, of_workload in medians.items():
        cells = [next((of_workload[c] for c in names if c in of_workload), None) for names in SYSTEMS.values()]
        shown = ["" if cell is None else f"{1e3 * cell:.3g}" for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def row(result: dict[str, Any]) -> str:
    """Returns one line of the table."""
    seconds, baseline = result["seconds"]["median"], result["baseline_seconds"]
    against = f"{result['baseline']}, {1e3 * baseline['median']:.3g} ms" if baseline else ""
    ratio = f"{result['ratio']:.2f}" if result["ratio"] else ""
    return f"| {result['what']} | {1e3 * seconds:.3g} ms | {against} | {ratio} |"


def main() -> int:
    """Rewrites or checks the README."""
    old = README.read_text()
    new = render(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

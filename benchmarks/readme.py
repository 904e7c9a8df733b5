"""Writes into the pages what can be made: example files, the output of commands, and tables of measured figures.

    python benchmarks/readme.py          # rewrites README.md, docs/gradients.md and docs/failures.md
    python benchmarks/readme.py --check  # exit code 1 when one of them is not what it would write

Output is captured from real runs. What differs from run to run and from machine to machine (process ids, times, paths)
is put in one form by SAME_EVERYWHERE.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison_tables import comparison, knobs, lists, thresholds
from contract_coverage import coverage
from failure_tables import detection, fault_matrix, kills, restarts

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "gradients.md", ROOT / "docs" / "failures.md")
RESULTS = ROOT / "benchmarks" / "results"

#: Patterns, and what stands in the README in their place.
SAME_EVERYWHERE = [
    (re.escape(f"{ROOT}/"), ""),
    (r"[^\s\"]*/site-packages/gradsync/", "src/gradsync/"),  # installed, and not run from the sources
    (r"[^\s\"]*/lib/python3[^/\s]*/(?=\w+\.py)", "/usr/lib/python3/"),
    (r"((?:/usr/lib/python3|src/gradsync)/\S+\.py):\d+", r"\1:123"),  # not the user's lines
    (r"(?m)^ +[~^]+\n", ""),  # Python 3.10 does not point at the part of a line that failed
    # Which way such a rank learns of the failure first, and so its words, is a matter of microseconds.
    (r"(?m)^gradsync: ranks? .* also failed: .*\n", ""),
    (r"\b(rank (\d+)(?:/\d+)? \(pid )\d+( on [^)\s]+)?", lambda m: m[1] + f"424{m[2]}" + (" on node1" if m[3] else "")),
    (r"\bprocess \d+ \(python[\d.]*\)", "process 4200 (python)"),
    (r"\b(done in|failed after) [\d.]+ \w+", r"\1 0.1 ms"),
    (r"(?<=, )[\d.]+ m?s ago", "6.0 s ago"),
    (r"\brunning for [\d.]+ m?s", "running for 6.0 s"),
    (r"\bsince [\d.]+ s\b", "since 5 s"),
    (r"\bwaited [\d.]+ s\b", "waited 6 s"),
]


def render(text: str) -> str:
    """Returns a page with everything between its markers made anew."""
    text = re.sub(
        r"(<!-- file: (\S+) -->\n```python\n).*?(```\n)",
        lambda m: m[1] + (ROOT / m[2]).read_text() + m[3],
        text,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"(<!-- exit code (\d+) -->\n```console\n\$ ([^\n]+)\n).*?(```\n)",
        lambda m: m[1] + play(m[3], int(m[2])) + m[4],
        text,
        flags=re.DOTALL,
    )
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->\n)",
        lambda m: m[1] + "\n" + table(m[2]) + m[3],
        text,
        flags=re.DOTALL,
    )


def play(command: str, exit_code: int) -> str:
    """Runs a command as the README gives it, and returns what it prints, in the form of SAME_EVERYWHERE.

    Raises:
        RuntimeError: it ended otherwise than the README says.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=ROOT,
            env=os.environ | {"PATH": f"{programs(Path(folder))}:{os.environ['PATH']}", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode != exit_code:
        raise RuntimeError(f"{command} ended with {done.returncode} in place of {exit_code}:\n{done.stdout}")
    output = done.stdout
    for pattern, replacement in SAME_EVERYWHERE:
        output = re.sub(pattern, replacement, output)
    return output


def programs(folder: Path) -> Path:
    """Fills a folder with the programs that the README calls, as this interpreter has them."""
    interpreter = shlex.quote(sys.executable)
    commands = {
        "python": interpreter,
        "gradsync": f"{interpreter} -m gradsync",
        "mpiexec": shlex.quote(str(Path(sysconfig.get_path("scripts")) / "mpiexec")),
    }
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def table(name: str) -> str:
    """Returns the committed results as a table; nothing but a line that says so before they are measured.

    Args:
        name: of the results, and after a dot of one of the tables that are made of them.
    """
    path = RESULTS / f"{name.partition('.')[0]}.json"
    if not path.exists():
        return "Not measured yet.\n"
    results = json.loads(path.read_text())
    lines, how = LAYOUTS[name](results), METHODS.get(name, METHOD)
    machine, versions = results["machine"], results["versions"]
    where = f"{machine['cpu']}, {machine['usable_cores']} cores, Python {versions['python']}, NumPy {versions['numpy']}"
    return "\n".join(lines) + f"\n\n{how[0]} on {where}; {how[1]}.\n"


def timings(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a line for each thing measured, and what it is compared with."""
    lines = ["| measured | median | compared with | ratio |", "| --- | --- | --- | --- |"]
    for found in results["results"]:
        if found["what"].endswith("busy cores"):  # shown beside the peers, in another table
            continue
        seconds, baseline = found["seconds"]["median"], found["baseline_seconds"]
        against = f"{found['baseline']}, {1e3 * baseline['median']:.3g} ms" if baseline else ""
        ratio = f"{found['ratio']:.2f}" if found["ratio"] else ""
        lines.append(f"| {found['what']} | {1e3 * seconds:.3g} ms | {against} | {ratio} |")
    return lines


def start_up(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a line for each launcher and a column for each number of ranks."""
    medians: dict[str, dict[str, float]] = {}
    for found in results["results"]:
        launcher, _, ranks = found["what"].rpartition(", ")
        medians.setdefault(launcher, {})[ranks] = found["seconds"]["median"]
    columns = list(dict.fromkeys(ranks for of_launcher in medians.values() for ranks in of_launcher))
    lines = [f"| seconds | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for launcher, of_launcher in medians.items():
        cells = [f"{of_launcher[ranks]:.2f}" if ranks in of_launcher else "" for ranks in columns]
        lines.append(f"| {launcher} | {' | '.join(cells)} |")
    return lines


def over_mpi(results: dict[str, Any]) -> list[str]:
    """Returns the lines of the table of gradsync over MPI beside mpi4py."""
    lines = ["| milliseconds | gradsync over MPI | mpi4py |", "| --- | --- | --- |"]
    for row in results["results"]:
        ours, theirs = (1e3 * row["seconds"][name] for name in ("gradsync", "mpi4py"))
        lines.append(f"| {row['work']} | {ours:.3g} | {theirs:.3g} |")
    return lines


def partition(results: dict[str, Any]) -> list[str]:
    """Returns the lines of the table of machines that are cut off: the later of both sides counts."""
    by_fault: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for found in results["results"]:
        by_fault.setdefault((found["fault"], found["victim"]), []).append(found)
    lines = ["| fault | of the machine that | told on both sides, median | worst |", "| --- | --- | --- | --- |"]
    for (fault, victim), sides in by_fault.items():
        median, worst = (max(side[name] for side in sides) for name in ("median_seconds", "worst_seconds"))
        lines.append(f"| {fault} | {victim} | {median:.2f} s | {worst:.2f} s |")
    return lines


def rendezvous_scale(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a column for each server and, by number of ranks, a line for each thing."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for of_one in results["results"]:
        found.setdefault(of_one["ranks"], {})[of_one["contender"]] = of_one
    contenders = list(dict.fromkeys(of_one["contender"] for of_one in results["results"]))
    lines = [f"| ranks | | {' | '.join(contenders)} |", "| --- | --- |" + " --- |" * len(contenders)]
    for ranks, by_contender in found.items():
        for what, cell in SCALE_CELLS.items():
            cells = [cell(by_contender[c]) if c in by_contender else "" for c in contenders]
            lines.append(f"| {ranks:,} | {what} | {' | '.join(cells)} |")
    return lines


def _phase(*names: str) -> Callable[[dict[str, Any]], str]:
    return lambda of_one: _wall_and_cpu([of_one["phases"][name] for name in names])


def _wall_and_cpu(times: list[dict[str, Any]]) -> str:
    """Returns milliseconds of wall time, and in brackets of the server's processor time."""
    wall, cpu = (sum(of[key]["median"] for of in times) for key in ("wall_seconds", "server_cpu_seconds"))
    return f"{1e3 * wall:.0f} ms ({1e3 * cpu:.0f} ms)"


def _heartbeats(of_one: dict[str, Any]) -> str:
    beats = of_one["heartbeats"]
    return f"{100 * beats['share_of_a_core']['median']:.1f} % of a core" if beats else "none"


SCALE_CELLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "join": _phase("join"),
    "share an id": _phase("put id", "get id"),
    "barrier": _phase("barrier"),
    "all three": lambda of_one: _wall_and_cpu([of_one["together"]]),
    "memory of the server": lambda of_one: f"+ {of_one['memory_growth_bytes'] / 1e6:.1f} MB",
    "heartbeats": _heartbeats,
}


#: How the results of each benchmark become a table.
LAYOUTS = {
    "first_light": timings,
    "full_speed": comparison,
    "collectives": comparison,
    "buckets": lists,
    "buckets.thresholds": thresholds,
    "buckets.knobs": knobs,
    "start_up": start_up,
    "over_mpi": over_mpi,
    "rendezvous_scale": rendezvous_scale,
    "detection": detection,
    "fault_matrix": fault_matrix,
    "proof_kills": kills,
    "proof_restarts": restarts,
    "partition": partition,
    "contract": coverage,
}
METHOD = "Two ranks", "medians, contenders alternating in one run"
METHODS = {
    "full_speed": (
        METHOD[0],
        f"{METHOD[1]}. Beside busy processes a median may tell of rounds that met none: what is faster there than on "
        "idle cores is noise",
    ),
    "collectives": (
        METHOD[0],
        f"{METHOD[1]}. A size is that of what a rank gives (all_gather, all_to_all), of what it gets "
        "(reduce_scatter), or of the array (broadcast). The samples and the limits are in "
        "`benchmarks/results/collectives.json`",
    ),
    "buckets": (
        METHOD[0],
        f"{METHOD[1]}. Both MPIs: tensor by tensor, and as one flat array. DDP: its backward pass less the same one in "
        "`no_sync()`. The samples and the limits are in `benchmarks/results/buckets.json`",
    ),
    "start_up": ("Measured", "medians, contenders alternating in one run"),
    "over_mpi": ("Two ranks of MPICH", "medians, contenders alternating in one run; made by `make bench-mpi`"),
    "partition": ("Two machines made of network namespaces,", "made by `python benchmarks/partition.py`"),
    "rendezvous_scale": (
        "Simulated ranks",
        f"{METHOD[1]}; wall time, which includes the simulated ranks on the same cores, and in brackets the server's "
        "processor time",
    ),
    "detection": ("Measured", "from the moment of the failure; later than promised in bold"),
    "fault_matrix": (
        "Three ranks",
        "later than promised in bold; made by `python benchmarks/fault_matrix.py`",
    ),
    "proof_kills": ("Run", "made by `make prove`"),
    "proof_restarts": ("Three ranks", "made by `make prove`"),
    "contract": ("Noted by the checks of `tests/contract*.py` as they ran", "made by `python tests/coverage_table.py`"),
}


def main() -> int:
    """Rewrites or checks the pages."""
    old = {page: page.read_text() for page in PAGES}
    new = {page: render(text) for page, text in old.items()}
    if "--check" in sys.argv[1:]:
        return int(old != new)
    for page, text in new.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables of times and costs; tables beside the peers are in comparison_tables.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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


def training_speed(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a line for each network and a column for each way to share the cores."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in results["results"]:
        by_model.setdefault(row["model"], []).append(row)
    columns = [_who_trains(row) for row in next(iter(by_model.values()))]
    lines = [f"| a step of training | {' | '.join(columns)} | ranks against one process |"]
    lines.append("| --- | --- |" + " --- |" * len(columns))
    for model, rows in by_model.items():
        cells = [f"{1e3 * row['step_seconds']['median']:.3g} ms" for row in rows]
        alone, ranks = ([row for row in rows if (row["ranks"] > 1) is several] for several in (False, True))
        best_alone, best = (min(row["step_seconds"]["median"] for row in each) for each in (alone, ranks or alone))
        what = f"{model}, {rows[0]['parameters']:,} parameters"
        lines.append(f"| {what} | {' | '.join(cells)} | {best_alone / best:.2f} times as fast |")
    return lines


def _who_trains(row: dict[str, Any]) -> str:
    threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
    return f"1 process, {threads}" if row["ranks"] == 1 else f"{row['ranks']} ranks, {threads} each"


def rendezvous_scale(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a column for each server and a line for each number of ranks and phase."""
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
    "memory of the server": lambda of_one: f"+ {of_one['memory_growth_bytes'] / 2**20:.1f} MB",
    "heartbeats": _heartbeats,
}

"""Tables of times and costs; tables beside the peers are in comparison_tables.py."""

from __future__ import annotations

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

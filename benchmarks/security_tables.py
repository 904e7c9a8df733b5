"""The tables of docs/security.md: mutated transcripts and hostile connections."""

from __future__ import annotations

from typing import Any


def transcripts(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a line for each kind of mutation."""
    lines = ["| what an attacker sends | transcripts | accepted |", "| --- | --- | --- |"]
    lines += [f"| {row['mutation']} | {row['sent']:,} | {row['accepted']} |" for row in results["results"]]
    sent, accepted = (sum(row[name] for row in results["results"]) for name in ("sent", "accepted"))
    return [*lines, f"| all | {sent:,} | {accepted} |"]


def hostile(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table of an attack: joins, memory, descriptors, strangers, each with its target."""
    found, targets = results["results"], results["targets"]
    before, under = found["undisturbed"], found["under_attack"]
    strangers = found["strangers"]
    begun, ended = (sum(strangers[name].values()) for name in ("begun", "ended"))
    return [
        "| | before the attack | during it | limit |",
        "| --- | --- | --- | --- |",
        f"| hostile connections, refused | | {begun:,}, {ended:,} in {strangers['seconds']:.0f} s | |",
        f"| ranks that joined | {before['count']:,} | {under['count']:,} | |",
        f"| join, median | {_milliseconds(before, 'median')} | {_milliseconds(under, 'median')} | |",
        f"| join, 99th percentile | {_milliseconds(before, 'p99')} | {_milliseconds(under, 'p99')} | "
        f"{1e3 * targets['join_p99_seconds']:.0f} ms |",
        f"| join, worst | {_milliseconds(before, 'worst')} | {_milliseconds(under, 'worst')} | |",
        f"| memory of the server | | + {found['memory_growth_bytes'] / 2**20:.1f} MB | "
        f"+ {targets['memory_growth_bytes'] / 2**20:.0f} MB |",
        f"| descriptors of the server, before and after | {found['descriptors_before']} | "
        f"{found['descriptors_after']} | {found['descriptors_before']} |",
        f"| ranks harmed | | {len(found['faults'])} | 0 |",
    ]


def _milliseconds(joins: dict[str, float], name: str) -> str:
    return f"{1e3 * joins[f'{name}_seconds']:.0f} ms"

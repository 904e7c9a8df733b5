"""Tables for the pages about failures: the time to each report, the extent of the proofs, and leftovers."""

from __future__ import annotations

from typing import Any

# The failures of the short table, and their names there.
AT_A_GLANCE = {
    ("exception, script", "computing", 2): "raises an exception",
    ("SIGKILL", "all_reduce", 2): "is killed",
    ("kernel's out-of-memory killer", "computing", 2): "is out of memory",
    ("SIGSTOP", "all_reduce", 2): "is stopped",
    ("does not come; warning", "computing", 2): "is late in a collective: warning",
    ("SIGKILL to the server", "all_reduce", 2): "loses the rendezvous server",
}


def detection(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table with a line for each failure."""
    lines = [
        "| failure | while | ranks | reported, median | worst | limit | all ended, median | worst | limit "
        "| cause named | resources left |",
        "| --- |" + " --- |" * 10,
    ]
    for found in results["results"]:
        head = f"| {found['failure']} | {found['phase']} | {found['ranks']} |"
        if found["skipped"] is not None:
            lines.append(f"{head} not measured |" + " |" * 7)
            continue
        measured = found["measured"]
        found_out = slower(measured["raised"], measured["reported"])
        lines.append(f"{head} {_cells(found_out)} | {_cells(measured['down'])} | {' | '.join(_verdict(found))} |")
    return lines


def detection_at_a_glance(results: dict[str, Any]) -> list[str]:
    """Returns the lines of a table of the most common failures."""
    lines = [
        "| a rank | while | reported, median | worst | all ended, worst | cause named | resources left |",
        "| --- |" + " --- |" * 6,
    ]
    found = {(one["failure"], one["phase"], one["ranks"]): one for one in results["results"]}
    for failure, name in AT_A_GLANCE.items():
        if failure not in found:  # some rows were measured alone
            continue
        measured, (_, phase, _) = found[failure]["measured"], failure
        told, down = slower(measured["raised"], measured["reported"]), measured["down"]
        cells = [f"{told['median_seconds']:.2f} s", f"{_marked(told)} s"] if told else ["", ""]
        cells += [f"{_marked(down)} s" if down else "", *_verdict(found[failure])]
        lines.append(f"| {name} | {phase} | {' | '.join(cells)} |")
    return lines


def _verdict(found: dict[str, Any]) -> list[str]:
    """Returns the cells with whether the culprit was named, and how many things were left behind."""
    return ["yes" if found["culprit_named"] else "NO", str(len(set(found["left_behind"])))]


def slower(*measurements: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the measurement with the worst round, of those that were made."""
    return max((m for m in measurements if m is not None), key=lambda m: m["worst_seconds"], default=None)


def _cells(measurement: dict[str, Any] | None) -> str:
    """Returns the cells with the median, the worst round and the target."""
    if measurement is None:
        return " | | "
    target = measurement["target_seconds"]
    limit = "" if target is None else f"{target:g} s"
    return f"{measurement['median_seconds']:.2f} s | {_marked(measurement)} s | {limit}".replace("** s", " s**")


def _marked(measurement: dict[str, Any]) -> str:
    """Returns the worst round, in bold if it is later than promised."""
    worst = f"{measurement['worst_seconds']:.2f}"
    return f"**{worst}**" if measurement.get("met") is False else worst


def told(measured: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the later of error and report, or the end of all processes if nothing had to be reported."""
    return slower(measured["raised"], measured["reported"]) or measured["down"]


_VICTIMS = {"grandchild": "child process of a rank"}

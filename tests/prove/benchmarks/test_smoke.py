"""Each benchmark runs once, as short as it can: it ends, writes its figures, and its exit code is what these say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rank_processes import STAND_IN

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
MEASURED = "measured"
STATUSES = {MEASURED, "not installed", "not offered", "not asked for"}
#: Scripts that measure nothing: makers of pages, and the ranks of others; and those of the part fault_matrix.
OTHER_SCRIPTS = {
    "two_checkouts_rank",
    "training_speed_rank",
    "page_tables",
}
OTHER_SCRIPTS |= {"failure_detection", "fault_matrix"}


class Smoke(NamedTuple):
    """A run of a benchmark.

    Attributes:
        script: its name, under benchmarks.
        options: which make it short.
        rows: how many it writes at least.
        variables: for the script and its ranks.
    """

    script: str
    options: tuple[str, ...]
    rows: int
    variables: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it


SMOKES = [
    Smoke("beside_peers", ("buckets", "--quick", "--only", "small", "--contenders", "gradsync", "torch"), 6),
    Smoke("beside_peers", ("collectives", "--quick", "--only", "all_gather"), 6 * 4),
    Smoke("beside_peers", ("all_reduce", "--quick", "--only", "sizes"), 8 * 4),
    Smoke("gpu", ("--tiny",), 8, {"PYTHONPATH": str(STAND_IN)}),
    Smoke("beside_mpi4py", ("--rounds", "1"), 7),
    Smoke("network_partition", ("--rounds", "1"), 10),
    Smoke("rendezvous_scale", ("--quick",), 2),
    Smoke("start_up", ("--quick", "--ranks", "2"), 1),
    Smoke("two_checkouts", ("--old", str(ROOT), "--quick"), 5),
    Smoke("training_speed", ("--quick",), 2),
]


def times_of(row: dict[str, Any], is_time: bool = False) -> Iterator[float]:
    """Returns the numbers of a row that are under a name which ends in "seconds"."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from times_of(value, is_time or name.endswith("seconds"))
        elif isinstance(value, (int, float)) and (is_time or name.endswith("seconds")):
            yield value


def is_broken(written: dict[str, Any]) -> bool:
    """Returns whether the file says that a promise is not kept, as on a busy machine, or that an answer was wrong."""
    rows = written.get("rows", []) + written.get("results", [])
    kept = [row.get("kept") for row in [*rows, *written.get("promises", [])]]
    kept += [target["kept"] for target in written.get("targets", [])]
    lows = [cost["low"] for row in rows for cost in row.get("costs", ()) if cost["of"] == "all three"]
    return (
        any(answer is False for answer in kept)
        or any(low > written["target"] for low in lows)
        or any(row.get("verdict") == "broken" for row in rows)
    )


def check(smoke: Smoke, output: Path) -> None:
    """Runs it, and looks at what it has written."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{smoke.script}.py"), *smoke.options, "--output", str(output)],
        cwd=ROOT, env=os.environ | smoke.variables, capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    told = done.stdout[-2000:] + done.stderr[-2000:]
    if "not measured: " in done.stdout:
        pytest.skip(done.stdout)
    assert output.exists(), told
    written = json.loads(output.read_text())
    rows = written.get("rows") or written["results"]
    assert {"command", "date", "machine", "versions"} <= written.keys()
    assert len(rows) >= smoke.rows, rows
    assert {row.get("status", MEASURED) for row in rows} <= STATUSES
    measured = [row for row in rows if row.get("status", MEASURED) == MEASURED]
    assert "gradsync" in {row.get("contender", "gradsync") for row in measured}
    for row in measured:
        times = list(times_of(row))
        assert times, row
        assert all(time > 0 for time in times) or "bucket views" in row.get("contender", ""), row
        assert not row.get("complaints"), row
        assert not row.get("left_behind"), row
    assert done.returncode == is_broken(written), told


@pytest.mark.timeout(600)
@pytest.mark.parametrize("smoke", SMOKES, ids=lambda smoke: f"{smoke.script}.py {smoke.options[0]}")
def test_smoke(smoke: Smoke, tmp_path: Path) -> None:
    check(smoke, tmp_path / "made.json")


def test_every_benchmark_is_here() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if '"__main__"' in path.read_text()}
    assert scripts - OTHER_SCRIPTS == {smoke.script for smoke in SMOKES}


@pytest.mark.gpu
def test_smoke_on_a_gpu(tmp_path: Path) -> None:
    check(Smoke("gpu", ("--tiny",), 8), tmp_path / "made.json")

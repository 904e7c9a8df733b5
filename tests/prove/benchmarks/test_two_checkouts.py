"""The measurement of one checkout against another: that it runs, and what it says of ratios."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import two_checkouts
from peers.crew import CrewFailed
from two_checkouts import NEW, OLD, Ratio, verdict_of

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ranks share memory on Linux")


def test_a_ratio_is_of_the_quickest_rounds_of_blocks() -> None:
    ratio = Ratio.of([[2.0, 7.0, 50.0], [3.0], [4.0]], [[1.0, 9.0, 1.0], [1.0], [1.0]])
    assert (ratio.median, ratio.low, ratio.high) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("ratio", "control", "verdict"),
    [
        (Ratio(1.0, 0.99, 1.01), Ratio(1.0, 0.99, 1.01), "kept"),
        (Ratio(1.0, 0.99, 1.03), Ratio(1.0, 0.99, 1.01), "open"),
        (Ratio(1.1, 1.05, 1.2), Ratio(1.0, 0.99, 1.01), "broken"),
        (Ratio(1.1, 1.05, 1.2), Ratio(1.0, 0.97, 1.01), "not measured"),
        (Ratio(1.0, 0.99, 1.01), Ratio(1.01, 1.005, 1.015), "not measured"),
    ],
)
def test_a_case_is_judged_by_its_interval_and_by_the_noise(ratio: Ratio, control: Ratio, verdict: str) -> None:
    assert verdict_of(ratio, control, 1.02) == verdict


def test_a_checkout_against_itself(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert two_checkouts.main(["--old", str(ROOT), "--quick", "--only", "all_reduce 4 KB", "--output", str(path)]) in (
        0,
        1,
    )
    results = json.loads(path.read_text())
    assert {"machine", "versions", "commits", "settings"} <= results.keys()
    (row,) = results["rows"]
    assert set(row["step_seconds"]) == {OLD, "old again", NEW}
    assert row["new_to_old"]["low"] <= row["new_to_old"]["median"] <= row["new_to_old"]["high"]


def test_another_gradsync_than_that_of_the_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CrewFailed, match="import"):
        two_checkouts.started(OLD, tmp_path, str(tmp_path))

"""`gradsync bench`: right results, a table, JSON, the sentence that says which threshold to take, and mistakes.

Short, as `pytest benchmarks/` takes its place.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from gradsync.cli import main
from ranks import PLACES

COLLECTIVES = {
    *(
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "exchange",
    )
}


@pytest.mark.parametrize("backend", ["shm", "nccl"])
def test_every_collective_is_timed_and_right(cli, tmp_path, backend):
    """Over NCCL with the fake CuPy, where times mean nothing."""
    out = tmp_path / "out.json"
    command = ["run", "-n", 2, "--no-prefix", "--backend", backend, "-m", "gradsync", "bench", "collectives"]
    environment = dict(PLACES["fake"].environment)
    if backend == "nccl":
        environment["PYTHONPATH"] = PLACES["fake"].folders[0]
    options = ["-c", "all", "-b", "1K", "-e", "4K", "--iters", 2, "--backend", backend, "--json", out]
    done = cli(*command, *options, environment=environment)
    assert done.code == 0, done.err
    assert "All results are right." in done.out
    rows = json.loads(out.read_text())["rows"]
    assert {row["collective"] for row in rows} == COLLECTIVES
    assert len(rows) == 2 * len(COLLECTIVES)
    for row in rows:
        for form in row["forms"].values():
            assert form["wrong"] == 0
            assert form["seconds"]["median"] > 0


def test_thresholds_end_with_the_one_to_take(cli, tmp_path):
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([["w", [100], "float32"], ["b", [], "float64"], ["v", [3, 5], "float32"]]))
    options = ["--model", shapes, "-n", 2, "--backend", "shm", "--steps", 3, "--thresholds", "0.0005,1"]
    done = cli("bench", "thresholds", *options, "--json", tmp_path / "out.json")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert sorted(row["all_reduces"] for row in rows)[0] == 2  # one for each dtype
    assert any(word in done.out for word in ("equally fast", "is fastest", "was fastest", "the same"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("collectives -b 8 -e 64 -f 1", "-f (the factor between sizes)"),
        ("collectives -b 64 -e 8", "-e (the largest size)"),
        ("collectives -b zz", "'zz'"),
        ("collectives -c allreduce", "'allreduce'"),
        ("collectives -d fp8", "'fp8'"),
        ("collectives -o mean -d int32", "mean is not defined for dtype int32"),
        ("collectives --json no/such/out.json", "'no/such'"),
        ("thresholds --model resnet50 --thresholds 1,ten", "'ten'"),
        ("thresholds --model no_such_model", "no_such_model"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(arguments, word):
    done = CliRunner().invoke(main, ["bench", *arguments.split()])
    assert done.exit_code in (1, 2)
    assert word in done.output
    assert "Traceback" not in done.output

"""`gradsync bench thresholds` end to end on tiny gradients, and its mistakes, told before anything runs."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gradsync.cli import main


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text('[["c", [100]], ["b", [10, 30], "float64"], ["a", [200]], ["n", [5], "int32"]]')
    return str(path)


def bench(*arguments, **options):
    command = [sys.executable, "-m", "gradsync", "bench", "thresholds", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout, done.stderr


def test_a_sweep_over_two_ranks(shapes, tmp_path):
    out = tmp_path / "out.json"
    code, text, err = bench(
        *("--model", shapes, "-n", 2, "--backend", "shm", "--steps", 2, "--json", out),
        *("--thresholds", "0.0005,0.01,1"),
    )
    assert (code, err) == (0, "")
    assert text.startswith("shapes.json: 4 gradients, 3.54 KB\n2 ranks over shm; median times of the slowest rank, 2 ")
    assert "quartiles" not in text
    for part in ("Not measured: 1 MB", "<- fastest", "the command measured too few steps: use --steps 20."):
        assert part in text
    result = json.loads(out.read_text())
    assert {"command", "date", "machine", "versions", "settings", "rows"} <= set(result)
    assert result["settings"]["rounds"] == 2
    assert result["settings"]["measured_backend"] == "shm"
    assert [row["all_reduces"] for row in result["rows"]] == [4, 3]
    for row in result["rows"]:
        assert row["seconds"]["samples"] == 2
        assert row["seconds"]["median"] > 0
    assert result["recommended_threshold_bytes"] in [row["threshold_bytes"] for row in result["rows"]]


def test_the_launcher_of_a_job_starts_its_ranks_and_one_of_them_reports(shapes):
    """As mpiexec and srun would: the command is each of the ranks."""
    options = ["--model", shapes, "--steps", "1", "--thresholds", "0.0005,1", "-v"]
    run = [sys.executable, "-m", "gradsync", "run", "-n", "3", "--no-prefix", "-m", "gradsync", "bench", "thresholds"]
    done = subprocess.run([*run, *options], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("3 ranks over shm") == 1
    assert "quartiles" in done.stdout


def test_a_limit_ends_it_early(shapes):
    code, text, err = bench("--model", shapes, "--backend", "local", "--steps", 50, "--time-limit", 0)
    assert (code, err) == (0, "")
    assert "of the slowest rank, because of --time-limit 0 s only 3 of 50 steps with each threshold" in text


def test_a_terminal_sees_the_table_grow(shapes):
    terminal, stderr = os.openpty()
    command = [sys.executable, "-m", "gradsync", "bench", "thresholds", "--model", shapes]
    command += ["--backend", "local", "--steps", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(stderr)
        out, _ = process.communicate(timeout=60)
        live = os.read(terminal, 100_000).decode()
        os.close(terminal)
    assert process.returncode == 0
    assert "round 1 of 2" in live
    assert "round 2 of 2" in live
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--model", "alexnet"), 2, "no model is called 'alexnet'"),
        (("--model", "none.json"), 2, "the shapes file 'none.json' cannot be read"),
        (("--model", "bert", "--thresholds", "ten"), 2, "--thresholds needs numbers of MB"),
        (("--model", "bert", "--backend", "local", "-n", "2"), 2, "backend 'local' runs one rank only, got -n 2"),
        (("--model", "bert", "--backend", "nccl"), 1, "backend 'nccl' cannot run here: no GPU is visible"),
        (("--model", "bert", "--json", "no/such/out.json"), 2, "there is no folder 'no/such'"),
        (("--model", "bert", "--json", "."), 2, "'.' cannot be written"),
        (("--model", "bert", "--plot", "out.png"), 1, "pip install matplotlib"),
    ],
)
def test_mistakes_are_told_before_anything_runs(monkeypatch, tmp_path, arguments, code, text):
    find_spec = importlib.util.find_spec
    without = lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", without)
    monkeypatch.setattr("gradsync.bench.program.launcher", None)
    monkeypatch.setattr("gradsync.bench.program.count_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["bench", "thresholds", *arguments])
    assert (done.exit_code, text in done.output) == (code, True), done.output


def test_a_rank_that_fails_is_told_on_the_last_line(tmp_path):
    path = tmp_path / "huge.json"
    path.write_text('[["a", [1000000, 100000000]]]')
    code, _, err = bench("--model", path, "-n", 2, "--backend", "shm", "--steps", 1)
    assert code == 1
    assert "MemoryError" in err
    last = err.splitlines()[-1]
    assert re.fullmatch(r"gradsync: error: ranks? \d.* failed with .*; .*", last)

"""`gradsync bench thresholds` end to end on tiny gradients, and its mistakes, told before anything runs."""

import importlib.util
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gradsync.bench import threshold_bench
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


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--model", "alexnet"), 2, "no model is called 'alexnet'"),
        (("--model", "none.json"), 2, "the shapes file 'none.json' cannot be read"),
        (("--model", "bert", "--thresholds", "ten"), 2, "--thresholds needs numbers of megabytes"),
        (("--model", "bert", "--backend", "local", "-n", "2"), 2, "backend 'local' is for one rank, got -n 2"),
        (("--model", "bert", "--backend", "nccl"), 1, "backend 'nccl' cannot run here: no GPU is visible"),
        (("--model", "bert", "--json", "no/such/out.json"), 2, "there is no folder 'no/such'"),
        (("--model", "bert", "--json", "."), 2, "'.' cannot be written"),
        (("--model", "bert", "--plot", "out.png"), 1, "pip install 'gradsync[plot]'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(monkeypatch, tmp_path, arguments, code, text):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    monkeypatch.setattr(threshold_bench, "_measure", None)
    monkeypatch.setattr(threshold_bench, "count_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["bench", "thresholds", *arguments])
    assert done.exit_code == code
    assert text in done.output
    assert isinstance(done.exception, SystemExit)


def test_a_rank_that_fails_is_told_with_its_traceback(shapes, monkeypatch, capsys):
    monkeypatch.setattr(threshold_bench, "run_sweep", _fail)
    done = CliRunner().invoke(main, ["bench", "thresholds", "--model", shapes, "-n", "1", "--backend", "shm"])
    assert done.exit_code == 1
    assert "gradsync: error: " in done.output
    assert "ArithmeticError: on purpose" in done.output


def _fail(_sweep):
    raise ArithmeticError("on purpose")

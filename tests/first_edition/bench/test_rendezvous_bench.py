"""`gradsync bench rendezvous` end to end with a few ranks, how runs are summed up, and its mistakes."""

import json
import resource
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gradsync.bench.rendezvous import command
from gradsync.bench.rendezvous.contenders import GRADSYNC, PHASES, TCPSTORE
from gradsync.bench.rendezvous.picture import plot
from gradsync.bench.rendezvous.report import chart, table
from gradsync.bench.rendezvous.rows import as_dictionary, row_of
from gradsync.bench.rendezvous.run import Phase, Run
from gradsync.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the simulated ranks use epoll")


def test_a_few_ranks_join_share_an_id_and_meet(tmp_path):
    out = tmp_path / "out.json"
    options = ["--ranks", "3,6", "--rounds", "1", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "bench", "rendezvous", *options],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "join of all ranks\n3 ranks  #" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [(row["contender"], row["ranks"]) for row in rows] == [(GRADSYNC, 3), (GRADSYNC, 6)]
    assert [row["lost_connections"] for row in rows] == [0, 0]
    for row in rows:
        steps = [row[f"{name}_seconds"]["median"] for name in ("join", "share_an_id", "barrier")]
        assert min(steps) > 0
        assert 0 < row["connect_seconds_of_a_rank"]["median"] <= steps[0]
        assert row["from_start_to_joined_seconds"]["median"] == pytest.approx(
            row["server_start_seconds"]["median"] + steps[0]
        )


def run_of(seconds, connects):
    run = Run({phase: Phase(seconds, seconds / 2, 0.0) for phase in PHASES})
    run.server_start_seconds, run.connect_seconds, run.lost_connections = 0.2, connects, 1
    return run


@pytest.fixture
def rows():
    ours = row_of(GRADSYNC, 1024, [run_of(0.1, [0.01, 0.02, 0.09]), run_of(0.3, [0.04]), run_of(0.2, [0.03])])
    return [ours, row_of(TCPSTORE, 1024, [run_of(0.05, [])])]


def test_runs_are_summed_up_by_their_medians(rows):
    found = as_dictionary(rows[0])
    assert found["join_seconds"]["median"] == pytest.approx(0.2)
    assert found["share_an_id_seconds"]["median"] == pytest.approx(0.4)  # handed in, and fetched
    assert found["server_cpu_seconds"]["median"] == pytest.approx(0.4)
    assert found["connect_seconds_of_a_rank"]["median"] == pytest.approx(0.03)
    assert found["from_start_to_joined_seconds"]["median"] == pytest.approx(0.4)
    assert found["lost_connections"] == 3


def test_the_table_and_the_chart(rows):
    lines = table(rows).splitlines()
    ours = "1,024 gradsync 200 ms 30 ms 200 ms 400 ms 200 ms 400 ms 400 ms 3"
    assert " ".join(lines[1].split()) == ours
    assert lines[2].split()[4] == "-"
    assert [line.count("#") for line in chart(rows).splitlines()[1:]] == [40, 10]


def test_a_picture_is_written(rows, tmp_path):
    pytest.importorskip("matplotlib")
    plot(rows, "Rendezvous", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_pytorch_it_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command._contenders(True) == ([GRADSYNC], "PyTorch is not installed in this Python: pip install torch")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ranks", "many"), "--ranks needs numbers from 2 to 4096"),
        (("--ranks", "1"), "--ranks needs numbers"),
        (("--ranks", ""), "--ranks needs numbers"),
        (("--ranks", "300"), "300 ranks need 364 open files, and 256 are allowed"),
        (("--json", "no/such/out.json"), "there is no folder 'no/such'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(monkeypatch, arguments, text):
    limit = 256 if "300" in arguments else 10_000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    monkeypatch.setattr(command, "play", None)
    done = CliRunner().invoke(main, ["bench", "rendezvous", *arguments])
    assert (done.exit_code, text in done.output) == (2, True), done.output


def test_ranks_that_do_not_come_through_are_an_error(monkeypatch):
    def play(*_arguments):
        raise RuntimeError("it ended with 1")

    monkeypatch.setattr(command, "play", play)
    done = CliRunner().invoke(main, ["bench", "rendezvous", "--ranks", "4"])
    assert done.exit_code == 1
    assert "gradsync: error: gradsync with 4 ranks: it ended with 1" in done.output

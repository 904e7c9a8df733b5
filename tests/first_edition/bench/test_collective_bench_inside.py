"""`gradsync bench collectives` end to end on small arrays, its table, its picture, and its mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.bench.collectives import command, measuring
from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.kinds import KINDS
from gradsync.bench.collectives.operation import IN_PLACE, SEPARATE, NotOffered, Prepared
from gradsync.bench.collectives.picture import plot
from gradsync.bench.collectives.rank import Timer
from gradsync.bench.collectives.report import average_bus_gigabytes, chart, heading, line_of, refusals
from gradsync.bench.collectives.rows import FormResult, Row, as_dictionary, wrong_in_all
from gradsync.bench.measurement import Seconds
from gradsync.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")


def bench(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "bench", "collectives", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def lines_under(text, collective):
    """The cells of each line below the heading of a collective."""
    section = text.partition(f"# {collective}\n")[2].partition("\n\n")[0]
    return [line.split() for line in section.splitlines() if not line.startswith("#")]


def test_every_collective_is_timed_and_right(tmp_path):
    out = tmp_path / "out.json"
    code, text, err = bench("-c", "all", "-b", "1K", "-e", "4K", "-n", 2, "-w", 1, "--blocks", 1, "--json", out)
    assert (code, err) == (0, "")
    assert text.startswith("# gradsync/shm: 2 ranks on this machine")
    for collective, kind in KINDS.items():
        lines = lines_under(text, collective)
        assert [line[0] for line in lines] == ["1024", "4096"]
        assert [line[2] for line in lines] == ["float", "float"]
        assert [line[3] for line in lines] == ["sum" if kind.reduces else "none"] * 2
        separate, in_place = lines[0][5:9], lines[0][9:13]
        assert (separate[3], in_place[3]) == (
            "0" if kind.has_separate_target else "-",
            "0" if kind.has_in_place else "-",
        )
    assert "# Out of bounds values : 0 OK" in text
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * len(KINDS)
    assert all(form["wrong"] == 0 for row in rows for form in row["forms"].values() if form["seconds"])
    assert all(form["seconds"]["samples"] == 1 for row in rows for form in row["forms"].values() if form["seconds"])


def test_on_device_arrays_too_every_collective_is_right(monkeypatch, tmp_path):
    """With the stand-in for CuPy in place of GPUs: what is timed there means nothing, and is not looked at."""
    stand_in = Path(__file__).parents[2] / "stand_in"
    sources = Path(gs.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{sources}{os.pathsep}{stand_in}")
    monkeypatch.setenv("GRADSYNC_STAND_IN_DEVICES", "2")
    with measuring.start("nccl", str(tmp_path), 2) as crew:
        for kind in KINDS.values():
            case = Case(kind.name, 1000, "float32", "sum" if kind.reduces else "", 2, 1, 0, checks=True)
            found = measuring.measure(case, 4, crew, blocks=1)
            assert [form.wrong for form in found.forms.values() if form.seconds] == [0] * (
                kind.has_separate_target + kind.has_in_place
            )


# -- The table ------------------------------------------------------------------------------------------------------


def row(collective="all_reduce", microseconds=100.0, wrong=0, op="sum"):
    case = Case(collective, 262144, "float32", op, 4, 20, 5, checks=True)
    seconds = Seconds(1e-6 * microseconds, 0.9e-6 * microseconds, 1.2e-6 * microseconds, 3)
    forms = {SEPARATE: FormResult(seconds, wrong), IN_PLACE: FormResult(None, None, "not here")}
    return Row("gradsync/shm", case, 4, forms)


def test_the_columns_are_those_of_nccl_tests():
    assert heading().splitlines()[1].split() == (
        ["#", "size", "count", "type", "redop", "root"] + ["time", "algbw", "busbw", "#wrong"] * 2
    )
    line = line_of(row(microseconds=128.0, wrong=3))
    assert line.split() == [
        "1048576",
        "262144",
        "float",
        "sum",
        "-1",
        "128.0",
        "8.19",
        "12.29",
        "3",
        "-",
        "-",
        "-",
        "-",
    ]
    for text in (heading().splitlines()[1], heading().splitlines()[2]):
        assert len(text) <= len(line)
    assert line_of(row("broadcast", op="")).split()[:5] == ["1048576", "262144", "float", "none", "0"]


def test_bandwidths_are_size_over_time_and_the_factor():
    found = as_dictionary(row())["forms"][SEPARATE]
    assert found["algorithm_bytes_per_second"] == pytest.approx(1048576 / 100e-6)
    assert found["bus_bytes_per_second"] == pytest.approx(1.5 * 1048576 / 100e-6)


def test_the_chart_and_the_summary():
    rows = [row(), row(microseconds=400)]
    lines = chart(rows).splitlines()
    assert [line.count("#") for line in lines[1:]] == [40, 10]
    assert lines[1].endswith("15.7 GB/s")
    assert average_bus_gigabytes(rows) == pytest.approx((15.73 + 3.93) / 2, 0.01)
    assert average_bus_gigabytes([]) is None
    assert refusals(rows)[0] == "gradsync/shm: no all_reduce in-place: not here"
    assert chart([Row("x", row().case, 4, {SEPARATE: FormResult(), IN_PLACE: FormResult()})]) == ""


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    plot([row(), row("broadcast", op="")], "2 ranks", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# -- A rank ---------------------------------------------------------------------------------------------------------


class Alone:
    """A system of one rank, whose collectives copy what they are given, and then spoil some of it."""

    rank, versions, backend = 0, {}, "alone"

    def __init__(self, spoilt):
        self.spoilt = spoilt

    def empty(self, elements, dtype):
        return np.zeros(elements, dtype)

    def fill(self, target, values):
        target[...] = values

    def to_host(self, array):
        return array

    def operation(self, case, buffers):
        def run():
            buffers.target[...] = buffers.source
            buffers.target[: self.spoilt] += 1

        return run

    def nothing(self):
        pass

    barrier = wait = close = nothing


@pytest.mark.parametrize("spoilt", [0, 1, 7])
@pytest.mark.parametrize("form", [SEPARATE, IN_PLACE])
def test_a_rank_counts_what_its_system_gets_wrong(spoilt, form):
    case = Case("all_reduce", 1000, "float32", "sum", 1, 3, 1, checks=True)
    timer = Timer(Alone(spoilt))
    assert timer.prepare(case, form) == Prepared(spoilt)
    assert timer.time(form, 3, 1) > 0
    unchecked = Case("all_reduce", 1000, "float32", "sum", 1, 3, 1, checks=False)
    assert timer.prepare(unchecked, form) == Prepared(None)


def test_what_a_system_does_not_offer_is_said():
    class Refusing(Alone):
        def empty(self, elements, dtype):
            raise NotOffered("no such dtype")

    assert Timer(Refusing(0)).prepare(row().case, SEPARATE) == Prepared(None, "no such dtype")


# -- What goes wrong ------------------------------------------------------------------------------------------------


class Crew:
    """Ranks that answer what a test says."""

    system, versions = "gradsync/shm", {}

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def ask(self, method, *arguments):
        self.asked.append((method, *arguments))
        return self.answers[method]

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None


def test_wrong_elements_of_all_ranks_are_added_up_and_the_slowest_rank_counts():
    crew = Crew({"prepare": [Prepared(1), Prepared(2)], "time": [1e-3, 3e-3], "release": [None, None]})
    found = measuring.measure(row().case, 4, crew, blocks=2)
    assert found.forms[SEPARATE].wrong == 3
    assert found.forms[SEPARATE].seconds.median == 3e-3
    assert wrong_in_all([found]) == 6
    assert [call[-1] for call in crew.asked if call[0] == "time"] == [5, 5, 1, 1]


def test_wrong_elements_end_the_command_with_1(monkeypatch):
    crew = Crew({"prepare": [Prepared(1)], "time": [1e-3], "release": [None], "backend": ["shm"]})
    monkeypatch.setattr(command, "start", lambda *_: crew)
    done = CliRunner().invoke(main, ["bench", "collectives", "-e", "1K"])
    assert done.exit_code == 1
    assert "# Out of bounds values : 2 FAILED" in done.output
    assert "2 elements are wrong" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("-c", "allreduce"), 2, "no collective is called 'allreduce'"),
        (("-b", "1x"), 2, "a size needs to read"),
        (("-b", "8K", "-e", "1K"), 2, "-e needs to be at least -b"),
        (("-d", "fp8"), 2, "no dtype is called 'fp8'"),
        (("-o", "avg"), 2, "op must be one of"),
        (("-o", "mean", "-d", "int32"), 1, "mean is not defined for dtype int32"),
        (("--backend", "local", "-p", "2"), 2, "backend 'local' is for one rank, got -p 2"),
        (("--backend", "nccl"), 1, "no GPU is visible"),
        (("--json", "no/such/out.json"), 2, "there is no folder 'no/such'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(monkeypatch, arguments, code, text):
    monkeypatch.setattr(command, "start", None)
    monkeypatch.setattr(command, "count_gpus", lambda: 0)
    done = CliRunner().invoke(main, ["bench", "collectives", *arguments])
    assert (done.exit_code, text in done.output) == (code, True), done.output

"""`gradsync bench collectives` end to end on small arrays, its table, its picture, and its mistakes."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.bench.collectives import (
    KINDS,
    SEPARATE,
    Case,
    FormResult,
    Row,
    as_dictionary,
    panels,
    parse_size,
    sizes_between,
    table,
)
from gradsync.bench.report import Seconds, plot
from gradsync.cli import collectives, main
from gradsync.errors import size_text

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")


def bench(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "bench", "collectives", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=100, env=os.environ | variables,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def lines_under(text, collective):
    """The cells of each line below the heading of a collective."""
    lines = text.partition(f"\n{collective} ")[2] or text.partition(f"\n{collective}\n")[2]
    of_table = itertools.takewhile(str.strip, lines.splitlines()[1:] if lines else [])
    return [re.split(r"  +", line.strip()) for line in of_table if not line.strip().startswith("size")]


def check_every_collective(text, rows):
    for collective, kind in KINDS.items():
        lines = lines_under(text, collective)
        assert [line[0] for line in lines] == ["1 KB", "4 KB"]
        assert [cell == "-" for cell in lines[0][1:]] == [not kind.has_separate_target] * 2 + [
            not kind.has_in_place
        ] * 2
    assert "\n\nAll results are right.\n" in text
    assert len(rows) == 2 * len(KINDS)
    forms = [form for row in rows for form in row["forms"].values()]
    assert all(form["wrong"] == 0 and form["seconds"]["samples"] == 3 for form in forms)


ALL = ("-c", "all", "-b", "1K", "-e", "4K", "--iters", 2)


def test_every_collective_is_timed_and_right(tmp_path):
    out = tmp_path / "out.json"
    code, text, err = bench(*ALL, "--json", out)
    assert (code, err) == (0, "")
    assert text.startswith("gradsync/shm: 2 ranks, ")
    check_every_collective(text, json.loads(out.read_text())["rows"])


def test_on_device_arrays_too_every_collective_is_right(tmp_path):
    """With the stand-in for CuPy in place of GPUs: what is timed there means nothing, and is not looked at."""
    path = os.pathsep.join([str(Path(gs.__file__).parents[1]), str(Path(__file__).parents[1] / "fake_cupy")])
    of_gpus = ["-m", "gradsync", "run", "-n", "2", "--no-prefix", "--backend", "nccl", "-m", "gradsync"]
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, *of_gpus, "bench", "collectives", *map(str, ALL), "--backend", "nccl", "--json", str(out)],
        capture_output=True, text=True, check=False, timeout=100,
        env=os.environ | {"PYTHONPATH": path, "FAKE_CUPY_DEVICES": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gradsync/nccl: 2 ranks, ")
    check_every_collective(done.stdout, json.loads(out.read_text())["rows"])


SPOILT = """
import gradsync.bench.collectives as collectives
right = collectives.make_call
def make_call(comm, case, source, target):
    run = right(comm, case, source, target)
    def spoil():
        run()
        target[: comm.rank + 1] += 1
    return spoil
collectives.make_call = make_call
from gradsync.cli import main
main()
"""


def test_wrong_elements_of_all_ranks_are_counted_and_end_the_command_with_1(tmp_path):
    (tmp_path / "spoilt.py").write_text(SPOILT)
    run = [sys.executable, "-m", "gradsync", "run", "-n", "2", "--no-prefix", str(tmp_path / "spoilt.py")]
    options = ["bench", "collectives", "-b", "1K", "-e", "1K", "--iters", "1"]
    done = subprocess.run([*run, *options], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "gradsync: error: 6 elements are wrong, the first ones in all_reduce of 1 KB" in done.stderr
    assert "\n\n6 elements are wrong\n" in done.stdout


def row(collective="all_reduce", microseconds=100.0, wrong=0, op="sum"):
    case = Case(collective, 262144, "float32", op, 4, 20)
    seconds = Seconds(1e-6 * microseconds, 0.9e-6 * microseconds, 1.2e-6 * microseconds, 3)
    return Row(case, {SEPARATE: FormResult(seconds, wrong)})


def test_the_bandwidths_are_those_of_nccl_tests():
    cells = [list(column.cells) for column in table([row(microseconds=128.0)], verbose=True).columns]
    of_separate = ["1 MB", "262,144", "128.0 us", "8.19", "12.29", "115.2 us to 153.6 us"]
    assert [cell for [cell] in cells] == [*of_separate, "-", "-", "-", "-"]
    found = as_dictionary(row())["forms"][SEPARATE]
    assert found["algorithm_bytes_per_second"] == pytest.approx(1048576 / 100e-6)
    assert found["bus_bytes_per_second"] == pytest.approx(1.5 * 1048576 / 100e-6)


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    plot(panels([row(), row("broadcast", op="")]), "2 ranks", "size", str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_rank_alone_and_an_integer_product():
    code, text, _ = bench("--backend", "local", "-e", "1K", "-o", "prod", "-d", "int32", "--iters", 1, "-v")
    assert code == 0
    [line] = lines_under(text, "all_reduce")
    assert line[:2] == ["1 KB", "256"]


def test_the_default_sizes_end_at_the_default_of_end():
    """The help says "1 KB to 16 MB", so the steps must meet the end."""
    begin, end, factor = (
        next(option.default for option in collectives.params if option.name == name)
        for name in ("begin", "end", "factor")
    )
    assert sizes_between(parse_size(begin), parse_size(end), factor)[-1] == parse_size(end)
    assert f"{size_text(parse_size(begin))} to {size_text(parse_size(end))}\n" in collectives.epilog


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("-b 8 -e 64 -f 1", 2, "-f (the factor between sizes) must be above 1, got 1"),
        ("-b 64 -e 8", 2, "-e (the largest size) must not be below -b, got -e 8 and -b 64 bytes"),
        ("-b zz", 2, "a size must be written as 8, 64K, 1M or 1G, from 1 byte to 1024**5; got 'zz'"),
        ("-b 1K -e 1M -f nan", 2, "-f (the factor between sizes) must be above 1, got nan"),
        ("-b 9999999999G -e 9999999999G", 2, "from 1 byte to 1024**5; got '9999999999G'"),
        ("-c all,bogus", 2, "no collective is called 'all': use `all` alone"),
        ("-b 8 -e 1G -f 1.0000001", 2, "-b, -e and -f make more than 100 sizes: use a larger factor"),
        ("-c allreduce", 2, "no collective is called 'allreduce'"),
        ("-d fp8", 2, "no dtype is called 'fp8'"),
        ("-o avg", 2, "op needs to be one of"),
        ("-o mean -d int32", 1, "mean is not defined for dtype int32"),
        ("--backend local -n 2", 2, "backend 'local' runs one rank only, got -n 2"),
        ("--backend nccl", 1, "no GPU is visible"),
        ("--json no/such/out.json", 2, "there is no folder 'no/such'"),
    ],
)
def test_mistakes_are_told_before_anything_runs(monkeypatch, arguments, code, text):
    monkeypatch.setattr("gradsync.bench.program.launcher", None)
    monkeypatch.setattr("gradsync.bench.program.count_gpus", lambda: 0)
    done = CliRunner().invoke(main, ["bench", "collectives", *arguments.split()])
    assert (done.exit_code, text in done.output) == (code, True), done.output


def test_a_rank_of_a_job_does_not_start_ranks_of_its_own():
    code, _, err = bench("-e", "1K", "-n", 3, RANK="1", WORLD_SIZE="2")
    assert code == 2
    assert "-n asks for 3 ranks, but a launcher's environment variables say that this process is one of 2 ranks" in err


def test_a_result_that_cannot_be_written_is_told_without_a_traceback():
    code, text, err = bench("-e", "1K", "--iters", 1, "--backend", "local", "--json", "/dev/full")
    assert "1 KB" in text
    assert (code, err) == (1, "gradsync: error: '/dev/full' cannot be written: No space left on device\n")


def test_a_rank_that_fails_is_told_on_the_last_line():
    code, _, err = bench("-b", "500G", "-e", "500G", "-n", 2, "--backend", "shm")
    assert code == 1
    assert "MemoryError" in err
    last = err.splitlines()[-1]
    assert re.fullmatch(r"gradsync: error: ranks? \d.* failed with .*; .*", last)


LAUNCHED = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node9"},
    **{"GROUP_RANK": "7", "ROLE_NAME": "trainer", "TORCHELASTIC_RUN_ID": "other", "OMPI_COMM_WORLD_RANK": "3"},
    **{"SLURM_PROCID": "3", "GRADSYNC_RANK": "3", "GRADSYNC_BACKEND": "nccl", "GRADSYNC_SECRET_FILE": "/none"},
}
MINE = {"LOCAL_DATA": "/data", "GROUP_ID": "5", "RANKING": "best", "ROLE_MODEL": "mine", "MASTER_COPY": "1"}


def test_ranks_have_the_variables_of_the_shell_but_for_those_of_its_launcher(tmp_path):
    """Every Python that starts imports sitecustomize, and this one writes down what it finds."""
    names = [*LAUNCHED, *MINE]
    found = tmp_path / "found"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\n"
        f"if os.environ.get('RANK') in ('0', '1'):\n"
        f"    with open({str(found)!r}, 'a') as file:\n"
        f"        print({{name: os.environ[name] for name in {names} if name in os.environ}}, file=file)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(gs.__file__).parents[1])])
    code, _, err = bench("-e", "1K", "-n", 2, "--iters", 1, PYTHONPATH=path, **LAUNCHED, **MINE)
    assert (code, err) == (0, "")
    ranks = [eval(line) for line in found.read_text().splitlines()]
    assert {each["RANK"] for each in ranks} == {"0", "1"}
    for each in ranks:
        assert MINE.items() <= each.items()
        assert each["WORLD_SIZE"] == each["LOCAL_WORLD_SIZE"] == "2"
        assert each["ROLE_NAME"] == "default"
        assert not {"OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & each.keys()
        assert each.get("GRADSYNC_BACKEND") != "nccl"


def test_a_terminal_sees_a_table_grow():
    terminal, stderr = os.openpty()
    command = [sys.executable, "-m", "gradsync", "bench", "collectives", "--backend", "local"]
    command += ["-c", "all_reduce,broadcast", "-b", "1K", "-e", "4K", "--iters", "1"]
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "150"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ) as process:
        os.close(stderr)
        out, _ = process.communicate(timeout=60)
        shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert process.returncode == 0
    assert shown.count("1 KB") > shown.count("4 KB") > 0  # the second row draws the first one again
    assert out.count("1 KB") == out.count("4 KB") == 2

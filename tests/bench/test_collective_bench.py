"""`gradsync bench collectives` end to end on small arrays, its table, its picture, and its mistakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")


def bench(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "bench", "collectives", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=100, env=os.environ | variables,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def lines_under(text, collective):
    """The cells of each line below the heading of a collective."""
    section = text.partition(f"# {collective}\n")[2].partition("\n\n")[0]
    return [line.split() for line in section.splitlines() if not line.startswith("#")]


def test_a_rank_alone_and_an_integer_product_without_a_check():
    code, text, _ = bench(
        "--backend", "local", "-e", "1K", "-o", "prod", "-d", "int32", "--no-check", "-n", 1, "--blocks", 1
    )
    assert code == 0
    [line] = lines_under(text, "all_reduce")
    assert line[2:5] == ["int32", "prod", "-1"]
    assert line[8] == "N/A"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-b 8 -e 64 -f 1", "-f needs to be above 1, got 1"),
        ("-b 64 -e 8", "-e needs to be at least -b, got 8 and 64 bytes"),
        ("-b zz", "a size needs to read 8, 64K, 1M or 1G, and be at least a byte; got 'zz'"),
        ("-b 8 -e 1G -f 1.0000001", "-b, -e and -f make more than 100 sizes: use a larger factor"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, text):
    done = CliRunner().invoke(main, ["bench", "collectives", *arguments.split()])
    assert (done.exit_code, text in done.output) == (2, True), done.output


def test_a_rank_that_fails_is_told_on_the_last_line():
    code, _, err = bench("-b", "500G", "-e", "500G", "-n", 2, "--backend", "shm")
    assert code == 1
    assert err.splitlines()[-1].startswith("gradsync: error: gradsync/shm: asked for prepare: a rank failed: ")
    assert "MemoryError" in err.splitlines()[-1]


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
    code, _, err = bench("-e", "1K", "-n", 1, "--blocks", 1, PYTHONPATH=path, **LAUNCHED, **MINE)
    assert (code, err) == (0, "")
    ranks = [eval(line) for line in found.read_text().splitlines()]
    assert {each["RANK"] for each in ranks} == {"0", "1"}
    for each in ranks:
        assert MINE.items() <= each.items()
        assert each["WORLD_SIZE"] == each["LOCAL_WORLD_SIZE"] == "2"
        assert each["ROLE_NAME"] == "default"
        assert not {"OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & each.keys()
        assert each.get("GRADSYNC_BACKEND") != "nccl"

"""`gradsync bench collectives` end to end on small arrays, its table, its picture, and its mistakes."""

import subprocess
import sys

import pytest

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


def test_a_rank_alone_and_an_integer_product_without_a_check():
    code, text, _ = bench(
        "--backend", "local", "-e", "1K", "-o", "prod", "-d", "int32", "--no-check", "-n", 1, "--blocks", 1
    )
    assert code == 0
    [line] = lines_under(text, "all_reduce")
    assert line[2:5] == ["int32", "prod", "-1"]
    assert line[8] == "N/A"

"""The words of the command line, and `gradsync serve`."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest

import gradsync as gs


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return path


def test_version(cli):
    assert cli("--version") == (0, f"gradsync, version {gs.__version__}\n", "")


def test_mistakes_are_one_line_or_a_hint_and_never_a_traceback(tmp_path, monkeypatch):
    """Each: the arguments, and a word that says what is wrong."""
    from click.testing import CliRunner

    from gradsync.cli import main

    monkeypatch.chdir(tmp_path)
    for arguments, word in [
        (("run", "nowhere.py"), "script 'nowhere.py' does not exist"),
        (("run", "-m", "no_such_module.x"), "module 'no_such_module.x' does not exist"),
        (("run", "-m", ""), "module '' does not exist"),
        (("run", "python", "x.py"), "leave out 'python'"),
        (("run", sys.executable, "x.py"), f"leave out {sys.executable!r}"),
        (("run", "."), "__main__.py"),
        (("serve", "--world-size", "2"), "--secret-file"),
        (("serve", "--world-size", "2", "--secret-file", "nowhere"), "'nowhere' cannot be opened"),
        (("run", "-n", "0", "x.py"), "0 is not in the range"),
        (("run", "-n", "two", "x.py"), "'two' is not a valid integer"),
        (("run", "--backend", "gloo", "x.py"), "in place of gloo, shm"),
        (("run", "-np", "2", "x.py"), "use -n in place of -np"),
        (("run", "--rdzv_backend", "c10d", "x.py"), "no option for it: leave it out"),
        (("run", "--bakend", "shm", "x.py"), "--backend"),
        (("run", "--timeout", "3", "x.py"), "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        (("run", "--timeout=3", "x.py"), "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        (("run", "--max-restart", "3", "x.py"), "--max-restarts"),
        (("serve", "--timeout", "3"), "No such option"),
        (("run",), "Missing argument 'SCRIPT'"),
        (("serve", "--world-size", "0"), "0 is not in the range"),
        (("jump",), "No such command 'jump'"),
        (("docter",), "did you mean doctor?"),
        (("train.py",), "did you mean gradsync run train.py?"),
        (("-n", "2", "train.py"), "Did you mean: gradsync run -n 2 train.py"),
        (("torchrun", "x.py"), "use gradsync run"),
        (("run", "--nproc_per_node", "2", "x.py"), "use --nproc-per-node"),
        (("run", "--rdzv_endpoint=host:1", "x.py"), "use --rendezvous HOST:PORT"),
    ]:
        done = CliRunner().invoke(main, arguments)
        assert (done.exit_code, word in done.output) == (2, True), (arguments, done.output)
        assert "Traceback" not in done.output


def test_the_help_of_run_is_one_screen(cli):
    lines = cli("run", "--help", environment={"COLUMNS": "120"}).out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize(
    ("arguments", "is_noticed"),
    [
        (("SCRIPT", "-n", "2"), True),
        (("-n", "1", "SCRIPT", "-n", "2"), False),
        (("SCRIPT", "--help"), False),
    ],
)
def test_an_option_behind_the_script_is_noticed(cli, script, arguments, is_noticed):
    path = str(script("print('ran')"))
    done = cli("run", "--backend", "local", *[path if word == "SCRIPT" else word for word in arguments])
    assert "ran" in done.out
    assert ("so it goes to the script" in done.err) is is_noticed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_its_address_and_ends_at_a_signal(cli, secret_file, number):
    server = cli.start("serve", "--world-size", 2, "--secret-file", secret_file)
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", server.stdout.readline())
    server.send_signal(number)
    assert server.result() == (0, "", "")


def test_serve_says_what_ranks_need_and_serves_those_that_gradsync_did_not_start(cli, script, secret_file):
    terminal, stdout = os.openpty()
    server = cli.start("serve", "--world-size", 2, "--secret-file", "secret", stdout=stdout, cwd=secret_file.parent)
    os.close(stdout)
    lines = [server.stderr.readline() for _ in range(2)]
    address = os.read(terminal, 100).decode().strip()
    os.close(terminal)
    variables = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
    assert variables["GRADSYNC_ADDRESS"] == address
    assert variables["GRADSYNC_SECRET_FILE"] == str(secret_file)
    rank = script("""
        import gradsync as gs, numpy
        with gs.init_process_group("shm") as comm:
            print(comm.all_reduce(numpy.ones(1)))
    """)
    ranks = [
        cli.start_program(sys.executable, rank, environment={**variables, "WORLD_SIZE": "2", "RANK": str(number)})
        for number in range(2)
    ]
    assert [each.result() for each in ranks] == [(0, "[2.]\n", "")] * 2
    server.send_signal(signal.SIGTERM)
    assert server.result().code == 0

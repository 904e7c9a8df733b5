import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import gradsync
from gradsync.cli import main
from launching import command

START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from gradsync.cli import main; main(prog_name='gradsync')"
)


def gradsync_command(*arguments, **options):
    line = [sys.executable, "-c", START, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return path


def test_version():
    assert gradsync_command("--version") == (0, f"gradsync, version {gradsync.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("run", "nowhere.py"), "script 'nowhere.py' does not exist (looked in "),
        (("run", "-m", "no_such_module.x"), "module 'no_such_module.x' does not exist"),
        (("run", "-m", ""), "module '' does not exist"),
        (("run", "python", "x.py"), "leave out 'python': gradsync starts Python itself"),
        (("run", sys.executable, "x.py"), f"leave out {sys.executable!r}"),
        (("run", "."), "script '.' is a directory without a __main__.py"),
        (("serve", "--world-size", "2"), "serve needs --secret-file"),
        (
            ("serve", "--world-size", "2", "--secret-file", "nowhere"),
            "secret file 'nowhere' cannot be opened",
        ),
    ],
)
def test_mistakes_are_told_on_one_line(tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    code, out, err = command.refused(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"gradsync: error: {text}")
    assert err.count("\n") == 1


def absolute_path_environment():
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("run", "-n", "0", "x.py"), "0 is not in the range x>=1"),
        (("run", "-n", "two", "x.py"), "'two' is not a valid integer."),
        (("run", "-n", "0.1", "x.py"), "'0.1' is not a valid integer."),
        (("run", "--backend", "gloo", "x.py"), "'gloo' is not one of"),
        (("run", "--bakend", "shm", "x.py"), "--bakend"),
        (
            ("run", "--timeout", "3", "x.py"),
            "No such option '--timeout'. To limit how long a collective waits for a rank, set",
        ),
        (("run", "--timeout=3", "x.py"), "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"),
        (("run", "--max-restart", "3", "x.py"), "Did you mean"),
        (("serve", "--timeout", "3"), "No such option"),
        (("run",), "Missing argument 'SCRIPT'. For example: gradsync run -n 2 train.py"),
        (("serve", "--world-size", "0"), "0 is not in the range"),
        (("jump",), "No such command 'jump'"),
    ],
)
def test_wrong_options(arguments, text):
    code, out, err = command.refused(*arguments)
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "is_told"),
    [
        (("train.py", "-n", "2"), True),
        (("train.py", "--nprocs=2"), True),
        (("-n", "1", "train.py", "-n", "2"), False),
        (("train.py", "--lr", "-n"), False),
        (("train.py", "--help"), False),
        (("train.py",), False),
    ],
)
def test_an_option_behind_the_script_is_noticed(monkeypatch, arguments, is_told):
    def ended(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradsync.launching.run.script_target", ended)
    result = CliRunner().invoke(main, ["run", *arguments])
    assert ("comes after train.py, so it goes to the script" in result.output) is is_told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_its_address_and_ends_cleanly(secret_file, number):
    line = [sys.executable, "-c", START, "serve", "--world-size", "2", "--secret-file", str(secret_file)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert re.fullmatch(r"127\.0\.0\.1:\d+\n", process.stdout.readline())
            process.send_signal(number)
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 0
        finally:
            process.kill()


def test_ctrl_c_before_the_ranks_start_ends_with_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradsync.launching.run.script_target", interrupted)
    result = CliRunner().invoke(main, ["run", "x.py"])
    assert (result.exit_code, result.output) == (130, "")


def test_serve_tells_a_person_what_the_ranks_need(secret_file):
    terminal, stdout = os.openpty()
    line = [sys.executable, "-c", START, "serve", "--world-size", "2", "--secret-file", secret_file.name]
    with subprocess.Popen(
        line,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=secret_file.parent,
        env=absolute_path_environment(),
    ) as process:
        try:
            os.close(stdout)
            lines = [process.stderr.readline() for _ in range(3)]
            address = os.read(terminal, 100).decode().strip()
        finally:
            process.kill()
            os.close(terminal)
    assert lines == [
        f"export GRADSYNC_ADDRESS={address}\n",
        "export GRADSYNC_HOSTED=1\n",
        f"export GRADSYNC_SECRET_FILE={secret_file}\n",
    ]


def test_serve_serves_ranks_that_gradsync_did_not_start(secret_file):
    rank = (
        "import gradsync as gs, numpy\n"
        "communicator = gs.init_process_group('shm')\n"
        "print(communicator.all_reduce(numpy.ones(1)))\n"
        "gs.destroy_process_group()"
    )
    line = [sys.executable, "-c", START, "serve", "--world-size", "2", "--secret-file", str(secret_file)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            environ = os.environ | {
                "GRADSYNC_ADDRESS": address,
                "GRADSYNC_HOSTED": "1",
                "GRADSYNC_SECRET_FILE": str(secret_file),
                "WORLD_SIZE": "2",
            }
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", rank],
                    env=environ | {"RANK": str(number)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for number in range(2)
            ]
            outputs = [process.communicate(timeout=60)[0] for process in ranks]
        finally:
            server.kill()
    assert outputs == ["[2.]\n"] * 2

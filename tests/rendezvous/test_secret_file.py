"""A file with the run's secret: only its user's own regular file, closed to others, with a secret in it, is read."""

from __future__ import annotations

import os
import subprocess

import pytest

import gradsync as gs
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.peer import SECRET


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file that is named in the environment of a rank whose server runs already."""
    file = tmp_path / "gradsync.secret"
    file.write_text(SECRET.hex() + "\n")
    file.chmod(0o600)
    monkeypatch.setenv("GRADSYNC_SECRET_FILE", str(file))
    with RendezvousServer(2, secret=SECRET) as server:
        server.note_end(0, "ended with exit code 0")  # rank 1 is told so, and does not wait
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "ADDRESS": server.address, "HOSTED": 1}.items():
            monkeypatch.setenv(f"GRADSYNC_{name}", str(value))
        yield file


def join():
    """Raises RankFailed where the secret was right."""
    gs.init_process_group("shm", timeout_seconds=60)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_this_user_alone_is_read(path, mode):
    path.chmod(mode)
    with pytest.raises(gs.RankFailed):
        join()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o777])
def test_a_file_open_to_others_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(gs.InvalidArgument, match="0600"):
        join()


@pytest.mark.parametrize("what", ["a link", "a FIFO", "a folder", "nothing"])
def test_what_is_no_regular_file_is_refused(path, what):
    kept = path.rename(path.with_name("kept"))
    {
        "a link": lambda: path.symlink_to(kept),
        "a FIFO": lambda: os.mkfifo(path, 0o600),
        "a folder": path.mkdir,
        "nothing": lambda: None,
    }[what]()
    with pytest.raises(gs.InvalidArgument):
        join()


def test_a_file_of_another_user_is_refused(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(gs.InvalidArgument):
        join()


@pytest.mark.parametrize(
    "content", [b"", b"short", b"5a" * 15, b"5" * 33, b"\xff\xfe" * 20, b"5a" * 4000 + b"x", b"x" * 64]
)
def test_what_is_no_secret_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(gs.InvalidArgument) as raised:
        join()
    assert len(content) == 0 or content.decode("latin-1") not in str(raised.value)


def test_another_secret_is_an_authentication_error(path):
    path.write_text("5a" * 32)
    with pytest.raises(gs.AuthenticationError):
        join()


def test_the_advice_works(path, monkeypatch):
    """What the error about a missing file says to run makes one."""
    path.unlink()
    with pytest.raises(gs.InvalidArgument) as raised:
        join()
    command = str(raised.value).partition("make one with: ")[2] or str(raised.value).partition("make one with ")[2]
    subprocess.run(command, shell=True, check=True, cwd=path.parent)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(gs.AuthenticationError):  # it is another one
        join()


def test_a_rank_of_a_server_that_runs_needs_a_secret(path, monkeypatch):
    monkeypatch.delenv("GRADSYNC_SECRET_FILE")
    with pytest.raises(gs.AuthenticationError):
        join()


def test_serve_takes_no_wrong_secret_and_does_not_go_without(cli):
    assert cli("serve", "--world-size", 1, "--secret-file", "-", typed="5a" * 15 + "\n").code == 2
    assert cli("serve", "--world-size", 1).code == 2

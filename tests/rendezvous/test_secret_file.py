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
        server.note_end(0, "ended with exit code 0")  # rank 1 hears that, and does not wait
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "GRADSYNC_ADDRESS": server.address}.items():
            monkeypatch.setenv(name, value)
        yield file


def join():
    """Raises RankFailed where the secret was right."""
    gs.init_process_group("shm", timeout_seconds=60)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_this_user_alone_is_read(path, mode):
    path.chmod(mode)
    with pytest.raises(gs.RankFailed):
        join()


def instead(make):
    def change(path):
        path.rename(path.with_name("kept"))
        make(path)

    return change


WRONG = {
    **{f"open as {mode:o}": lambda path, mode=mode: path.chmod(mode) for mode in (0o640, 0o604, 0o620, 0o602, 0o601)},
    "a link": instead(lambda path: path.symlink_to(path.with_name("kept"))),
    "a FIFO": instead(lambda path: os.mkfifo(path, 0o600)),
    "a folder": instead(lambda path: path.mkdir()),
    "nothing": instead(lambda path: None),
    **{
        f"with {content[:4]!r} {len(content)}": lambda path, content=content: path.write_bytes(content)
        for content in (b"", b"short", b"5a" * 15, b"5" * 33, b"\xff\xfe" * 20, b"5a" * 4000 + b"x", b"x" * 64)
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_secret_of_this_user_alone_is_refused(path, what):
    WRONG[what](path)
    with pytest.raises(gs.InvalidArgument) as raised:
        join()
    for secret in ("x" * 64, "5a" * 15, SECRET.hex()):
        assert secret not in str(raised.value)


def test_a_file_of_another_user_is_refused(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(gs.InvalidArgument):
        join()


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

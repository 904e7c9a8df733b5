import os
import subprocess

import pytest

from gradsync.environment import HOW_TO_MAKE_A_SECRET_FILE, read_secret_file
from gradsync.errors import InvalidArgument

SECRET = "5a" * 32


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    return file


def test_reads_what_only_the_user_can_read(path):
    assert read_secret_file(str(path)) == bytes.fromhex(SECRET)
    path.chmod(0o400)
    assert read_secret_file(str(path)) == bytes.fromhex(SECRET)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_refuses_a_file_open_to_others(path, mode):
    path.chmod(mode)
    with pytest.raises(InvalidArgument, match=f"needs mode 0600, got {mode:04o}; run: chmod 600"):
        read_secret_file(str(path))


def test_refuses_links_directories_fifos_and_missing_files(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, text in (("link", "is a symbolic link"), ("fifo", "regular"), ("nowhere", "make one with")):
        with pytest.raises(InvalidArgument, match=text):
            read_secret_file(str(tmp_path / name))
    with pytest.raises(InvalidArgument, match="regular"):
        read_secret_file(str(tmp_path))


def test_refuses_a_file_of_another_user(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(InvalidArgument, match="needs to belong to user"):
        read_secret_file(str(path))


@pytest.mark.parametrize("content", [b"", b"short", b"\xff\xfe", b"5a" * 4000 + b"x"])
def test_refuses_what_is_no_secret(path, content):
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="needs to contain a secret"):
        read_secret_file(str(path))


def test_the_advice_works(tmp_path):
    subprocess.run(HOW_TO_MAKE_A_SECRET_FILE, shell=True, check=True, cwd=tmp_path)
    assert len(read_secret_file(str(tmp_path / "gradsync.secret"))) == 32

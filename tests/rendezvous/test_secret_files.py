"""The file by which ranks of one machine find their server."""

from __future__ import annotations

import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from gradsync.errors import AuthenticationError, InvalidArgument
from gradsync.rendezvous import secret_files
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for

OLD = Endpoint("127.0.0.1:4000", b"o" * 32)
NEW = Endpoint("127.0.0.1:4001", b"n" * 32)


def soon() -> float:
    return time.monotonic() + 30


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return secret_path("run")


def test_what_is_published_is_found(path: str) -> None:
    publish(path, NEW)
    assert wait_for(path, None, soon()) == NEW
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["gradsync-run.secret"]


def test_what_an_earlier_run_left_is_passed_over(path: str) -> None:
    publish(path, OLD)
    looks = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        publish(path, NEW)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secret_files.time, "sleep", look)
        assert wait_for(path, OLD, soon()) == NEW
    assert len(looks) == 1


def test_nothing_at_the_deadline(path: str) -> None:
    assert wait_for(path, None, time.monotonic() + 0.01) is None
    publish(path, OLD)
    assert wait_for(path, OLD, time.monotonic() + 0.01) is None


def test_waits_for_the_other_rank(path: str) -> None:
    later = threading.Timer(0.05, publish, (path, NEW))
    later.start()
    assert wait_for(path, None, soon()) == NEW
    later.join()


def test_refuses_a_file_that_others_can_read(path: str) -> None:
    publish(path, NEW)
    Path(path).chmod(0o644)
    with pytest.raises(InvalidArgument, match="mode 0600"):
        wait_for(path, None, soon())


def test_a_file_that_goes_away_between_two_looks_is_none(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(path, OLD)
    read = secret_files.read_private_file

    def remove_first(name: str) -> str:
        Path(name).unlink()
        return read(name)

    monkeypatch.setattr(secret_files, "read_private_file", remove_first)
    assert wait_for(path, None, time.monotonic() + 0.01) is None


def test_without_a_runtime_directory_there_is_one_of_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(secret_path("run")).parent
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(AuthenticationError, match="mode 0700"):
        secret_path("run")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(AuthenticationError, match="GRADSYNC_SECRET_FILE"):
        secret_path("run")


def test_the_secret_is_not_shown() -> None:
    assert repr(NEW) == "Endpoint('127.0.0.1:4001')"

"""Files are written whole or not at all; one that hangs is given up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gradsync.diagnostics.dump import write_whole
from hanging_files import hanging_files


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    for text in ("first", "second"):
        write_whole(path, text, 60.0)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "file", "text", 60.0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_hangs_is_given_up(tmp_path: Path) -> None:
    hung, elsewhere = tmp_path / "hung", tmp_path / "elsewhere"
    with hanging_files(hung):
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
                write_whole(hung / "file", "text", 0.05)
        write_whole(elsewhere / "file", "text", 60.0)
    write_whole(hung / "other", "text", 60.0)
    assert (hung / "other").read_text() == "text"


def test_the_file_systems_own_time_limit_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(Path, "write_text", fail)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="Connection timed out"):
            write_whole(tmp_path / "file", "text", 60.0)


def test_where_no_thread_can_be_started_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    write_whole(tmp_path / "file", "text", 60.0)
    assert (tmp_path / "file").read_text() == "text"

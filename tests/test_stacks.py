"""The stack report says where every thread of the user's is, and never fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics import stacks as module
from gradsync.diagnostics.stacks import stack_report


def wait_here(ready: threading.Event, end: threading.Event) -> None:
    ready.set()
    end.wait()  # where it waits


@contextmanager
def waiting_threads(*names: str) -> Iterator[None]:
    end = threading.Event()
    threads = []
    for name in names:
        ready = threading.Event()
        thread = threading.Thread(target=wait_here, args=(ready, end), name=name)
        thread.start()
        assert ready.wait(30)
        threads.append(thread)
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def until_equal(names: int) -> str:
    """Returns a report in which the threads have come to their wait, which no event can tell."""
    while True:
        text = stack_report()
        if f"{names} threads (" in text:
            return text


def test_the_main_thread_comes_first_from_its_innermost_call_on() -> None:
    lines = stack_report().splitlines()
    assert lines[0] == "MainThread, innermost call first:"
    number = sys._getframe().f_lineno - 2
    name = "test_the_main_thread_comes_first_from_its_innermost_call_on"
    assert lines[1] == f"  {__file__}:{number} in {name}"
    assert lines[2] == "    lines = stack_report().splitlines()"


def test_equal_stacks_are_told_once() -> None:
    with waiting_threads("loader 0", "loader 1", "loader 2", "loader 3"):
        text = until_equal(4)
    assert "4 threads (loader 0, loader 1, loader 2, ...), innermost call first:" in text
    assert text.count("in wait_here\n    end.wait()  # where it waits") == 1
    assert text.startswith("MainThread")


def test_service_threads_are_left_out() -> None:
    with waiting_threads("gradsync-liveness"):
        text = stack_report()
    assert "in wait_here" not in text


def test_calls_within_gradsync_are_told_by_the_first() -> None:
    texts: list[str] = []

    class Hashed(str):
        __slots__ = ()

        def __hash__(self) -> int:  # called from within the callback
            texts.append(stack_report())
            return super().__hash__()

    callback = gs.AllreduceCallback("sum", local_communicator())
    callback(Hashed("w"), np.ones(3))
    assert "in __hash__\n" in texts[0]
    assert texts[0].count("gradsync/bucketing/") == 1
    assert "gradsync/bucketing/callback.py:" in texts[0]
    callback.flush()


def deep(calls: int) -> str:
    return stack_report() if calls == 0 else deep(calls - 1)


def test_innermost_frames_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", 2000)
    text = deep(200)
    assert len(text.encode()) <= 2000
    assert text.count("in deep") in (1, 2, 4, 8, 16)
    assert "\n  ..." in text


@pytest.mark.parametrize("max_bytes", [0, 1, 10, 100, 1000])
def test_it_never_grows_beyond_its_limit(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", max_bytes)
    assert len(stack_report().encode()) <= max_bytes


def test_it_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no frames today")

    monkeypatch.setattr(module, "_stacks", fail)
    assert stack_report() == "(the stacks cannot be shown: RuntimeError: no frames today)"


def test_code_without_a_file_is_told_by_its_name() -> None:
    texts: list[str] = []
    exec(compile("tell(report())", "<made up>", "exec"), {"tell": texts.append, "report": stack_report})
    assert "  <made up>:1 in <module>\n" in texts[0]


def test_a_file_system_that_hangs_costs_no_more_than_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SOURCE_SECONDS", 0.05)
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)  # in place of a file on a server that is gone: to open it hangs
    names = {"stack_report": stack_report}
    exec(compile("def train():\n    return stack_report()\n", pipe, "exec"), names)
    for _ in range(2):
        lines = names["train"]().splitlines()
        assert lines[1] == f"  {pipe}:2 in train"
        assert lines[2].startswith(f"  {__file__}:")
    [hung] = [thread for thread in threading.enumerate() if thread.name == "gradsync-source"]
    pipe.write_text("lets it go on")
    hung.join(30)
    assert not hung.is_alive()


def test_what_called_the_users_code_is_left_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from gradsync.diagnostics.stacks import stack_report\nprint(stack_report())\n")
    command = [sys.executable, "-m", "gradsync", "run", "-n", "1", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told == f"MainThread, innermost call first:\n  {script}:2 in <module>\n    print(stack_report())\n"

"""Dumps hold what a look at a failed run needs; they appear when something fails, and where somebody asks for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync import environment
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics import triggers as dumps
from gradsync.diagnostics.dump import FORMAT, read_dumps
from hanging_files import hanging_files
from rank_processes import run_ranks, run_ranks_for_outcomes

pytestmark = pytest.mark.usefixtures("unarmed")


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"format": "another"}', json.dumps({"format": FORMAT, "calls": {}})):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(gs.InvalidArgument, match=r"a\.json"):
            read_dumps([tmp_path / "a.json"])
    (tmp_path / "a.json").unlink()
    with pytest.raises(gs.InvalidArgument, match="there are no dumps"):
        read_dumps([tmp_path])


def test_a_handler_of_the_program_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came = []
    for number in (signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda *_: came.append("mine"))
    monkeypatch.setenv(environment.DUMP_DIR, str(tmp_path))
    dumps.arm()
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGINT)
    assert came == ["mine", "mine"]
    assert list(tmp_path.iterdir()) == []


def test_the_signal_makes_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    monkeypatch.setenv(environment.DUMP_DIR, str(tmp_path))
    dumps.arm()
    signal.raise_signal(signal.SIGUSR2)
    [file] = tmp_path.iterdir()
    assert json.loads(file.read_text())["reason"] == "SIGUSR2 was received"


def test_signals_that_come_while_a_dump_is_made_make_no_other_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(folder: Path, reason: str, *_: object) -> None:
        made.append(reason)
        if len(made) < 5:
            signal.raise_signal(signal.SIGUSR2)

    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    monkeypatch.setenv(environment.DUMP_DIR, str(tmp_path))
    monkeypatch.setattr(dumps, "write_dump", make)
    dumps.arm()
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR2)
    assert len(made) == 2


def test_ctrl_c_makes_a_dump_that_what_fails_because_of_it_does_not_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason() -> str:
        [file] = tmp_path.iterdir()
        return str(json.loads(file.read_text())["reason"])

    monkeypatch.setenv(environment.DUMP_DIR, str(tmp_path))
    dumps.arm()
    with local_communicator() as comm:
        comm.barrier()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        dumps.dump_because("it was interrupted")
        assert reason() == "Ctrl-C was received (SIGINT)"
        signal.raise_signal(signal.SIGUSR2)  # who asks is answered
        assert reason() == "SIGUSR2 was received"
        comm.barrier()
        dumps.dump_because("it went on, and failed")
        assert reason() == "it went on, and failed"


def test_a_second_ctrl_c_does_not_wait_for_the_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def interrupted(folder: Path, reason: str, *_: object) -> None:
        made.append(reason)
        signal.raise_signal(signal.SIGINT)
        made.append("waited")

    monkeypatch.setenv(environment.DUMP_DIR, str(tmp_path))
    monkeypatch.setattr(dumps, "write_dump", interrupted)
    dumps.arm()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert made == ["Ctrl-C was received (SIGINT)"] * 2


def test_ctrl_c_interrupts_though_not_even_a_warning_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setenv(environment.DUMP_DIR, "/")
    monkeypatch.setattr(dumps, "write_dump", fail)
    monkeypatch.setattr(dumps._log, "warning", fail)
    dumps.arm()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_the_variable_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    dumps.arm()
    dumps.dump_because("nobody asked")
    assert signal.getsignal(signal.SIGUSR2) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert dumps._folder is None


def test_a_dump_that_fails_is_no_second_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(dumps, "_folder", tmp_path / "file" / "folder")
    dumps.dump_because("it is asked for")
    assert "the dump of the flight recorder was not written" in caplog.text


def test_a_file_system_that_hangs_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(dumps, "_folder", tmp_path)
    monkeypatch.setattr(dumps, "_URGENT_SECONDS", 1.0)
    times = []
    with hanging_files(tmp_path):
        for _ in range(2):
            began = time.monotonic()
            dumps.dump_because("it is asked for")
            times.append(time.monotonic() - began)
    assert times[0] >= 1.0 > times[1]
    assert len(caplog.records) == 2
    for _ in range(100):
        dumps.dump_because("the file system responds again")
        if not dumps._is_hanging:  # the disk was not slow
            break
    assert not dumps._is_hanging
    assert "responds again" in json.loads(next(tmp_path.glob("gradsync-rank*")).read_text())["reason"]


def test_a_dump_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(dumps, "_folder", tmp_path)
    monkeypatch.setattr(dumps, "_URGENT_SECONDS", 0.05)
    monkeypatch.setattr(dumps, "_PATIENT_SECONDS", 0.05)
    with hanging_files(tmp_path):
        dumps.dump_because("it is asked for")
        assert "the write did not end within 0.05" in caplog.text
        with pytest.raises(gs.InvalidArgument, match="the write did not end within"):
            gs.dump_flight_recorder(tmp_path)
        with pytest.raises(gs.InvalidArgument, match="the write did not end within"), gs.trace(tmp_path / "folder"):
            pass
    assert list(tmp_path.glob("gradsync-rank*"))  # it goes on when the file system does


# -- With ranks ----------------------------------------------------------------------------------------------------


def disagree(comm: gs.Communicator, folder: str) -> None:
    dumps._folder = Path(folder)
    for _ in range(3):
        comm.barrier()
    with pytest.raises(gs.PlanMismatch):
        comm.all_reduce(np.ones(2)) if comm.rank == 1 else comm.broadcast(np.ones(3, np.float32), root=0)


def disagree_beside_a_file_system_that_hangs(comm: gs.Communicator, folder: str) -> list[str]:
    told: list[str] = []
    dumps._log.addFilter(lambda record: told.append(record.getMessage()) or False)  # type: ignore[func-returns-value]
    with hanging_files(Path(folder)) if comm.rank == 0 else contextlib.nullcontext():
        disagree(comm, folder)
    return told


def test_a_file_system_that_hangs_holds_up_no_failure(tmp_path: Path) -> None:
    told = run_ranks(2, disagree_beside_a_file_system_that_hangs, str(tmp_path))
    warned = ["the dump of the flight recorder was not written: " in "".join(of_rank) for of_rank in told]
    assert warned == [True, False]


def lose_a_rank(comm: gs.Communicator, folder: str) -> None:
    dumps._folder = Path(folder)
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:  # in no collective: it hears of the failure all the same
        deadline = time.monotonic() + 20
        while not list(Path(folder).glob("gradsync-rank1-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    with pytest.raises(gs.RankFailed):
        comm.barrier()


def test_the_ranks_that_outlive_another_leave_a_dump_wherever_they_are(tmp_path: Path) -> None:
    run_ranks_for_outcomes(3, lose_a_rank, str(tmp_path))
    found, _ = read_dumps([tmp_path])
    assert [dump.rank for dump in found] == [0, 1]
    assert "rank 2" in found[1].reason


def gradsync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradsync", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

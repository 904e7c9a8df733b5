"""Trials and what follows from them: a wrong result, ranks that die or hang, and the exit code."""

import json
import sys
import threading
import time

import pytest

from gradsync.backends import TABLE
from gradsync.doctor import command as doctor_command
from gradsync.doctor.checks import BROKEN, OK, UNUSABLE, Finding
from gradsync.doctor.command import Report, try_backend, why_not
from gradsync.doctor.facts import Facts, call

WELL = [Finding(OK, "3.12", what="Python")]


def in_place_of_the_bench(monkeypatch, source):
    """Has the doctor run this source in place of `gradsync bench collectives`."""
    code = f"import os, sys, time\n{source}"

    def run(command, seconds):
        return call([sys.executable, "-c", code, *command[3:]], seconds)

    monkeypatch.setattr(doctor_command, "call", run)


@pytest.mark.parametrize(
    ("source", "limit_seconds", "text"),
    [
        ("time.sleep(60)", 1.0, "no answer within 1 s"),
        ("os.fork(); time.sleep(60)", 1.0, "no answer within 1 s"),
        ("sys.exit('gradsync: error: rank 1 failed with exit code 1')", 60.0, "rank 1 failed with exit code 1"),
        ("sys.exit('OSError: no memory\\ngradsync: error: rank 1 failed')", 60.0, "OSError: no memory"),
        ("os.kill(os.getpid(), 11)", 60.0, "exit code -11"),
    ],
)
def test_ranks_that_hang_or_die_are_a_line_in_time(monkeypatch, source, limit_seconds, text):
    in_place_of_the_bench(monkeypatch, source)
    began = time.monotonic()
    trial = try_backend("shm", Facts(), WELL, limit_seconds)
    assert (trial.status, trial.text) == (BROKEN, text)
    assert "gradsync bench collectives --backend shm" in trial.advice
    assert time.monotonic() - began < 30


def test_a_wrong_result_does_not_work(monkeypatch):
    """Under mpiexec, the rank's error is followed by that of the command."""
    errors = "gradsync: error: 7 elements are wrong\ngradsync: error: mpiexec ended with exit code 1"
    in_place_of_the_bench(monkeypatch, f"sys.exit({errors!r})")
    trial = try_backend("shm", Facts(), WELL, 20.0)
    assert (trial.status, trial.text) == (BROKEN, "7 elements are wrong")


@pytest.mark.parametrize(
    ("backend", "findings", "reason"),
    [
        ("shm", WELL, None),
        ("shm", [Finding(UNUSABLE, "aarch64", what="Python")], 'see the line "Python"'),
        ("mpi", [Finding(UNUSABLE, "not installed", what="MPI")], 'see the line "MPI"'),
        ("mpi", [Finding(UNUSABLE, "not installed", what="CuPy")], None),
        ("nccl", WELL, "this machine has no NVIDIA GPU"),
    ],
)
def test_what_cannot_work_is_not_tried(tmp_path, backend, findings, reason):
    assert why_not(backend, Facts(root=tmp_path), findings) == reason


def tried(**works):
    statuses = {True: OK, False: BROKEN, None: UNUSABLE}
    return {backend: Finding(statuses[worked], "") for backend, worked in works.items()}


@pytest.mark.parametrize(
    ("works", "asked_for", "is_well", "verdict"),
    [
        ({"shm": True, "mpi": True, "nccl": None}, None, True, "Ready: shm, mpi can be used here."),
        ({"shm": False, "nccl": None}, None, False, "Not ready: no backend for two or more ranks works here."),
        ({"shm": True, "mpi": False}, "mpi", False, "Not ready: mpi was requested, but does not work here."),
        ({"mpi": True}, "mpi", True, "Ready: mpi works here."),
        ({}, None, True, "Nothing is broken; no backend was tried."),
        ({"nccl": None}, "nccl", False, "Not ready: nccl was requested, but does not work here."),
    ],
)
def test_the_exit_code_follows_from_what_works(works, asked_for, is_well, verdict):
    report = Report(WELL, tried(**works), asked_for, 1.0)
    assert (report.is_well, report.verdict()) == (is_well, verdict)


def test_backends_are_tried_at_the_same_time(monkeypatch, capsys):
    meeting = threading.Barrier(2)

    def wait_for_the_other(backend, *_):
        meeting.wait(30)
        return Finding(OK, "works")

    monkeypatch.setattr(doctor_command, "TABLE", {name: TABLE[name] for name in ("shm", "mpi")})
    monkeypatch.setattr(doctor_command, "collect_facts", lambda _: Facts())
    monkeypatch.setattr(doctor_command, "try_backend", wait_for_the_other)
    doctor_command.doctor(backend=None, as_json=True, deadline_seconds=1.0, tries=True, verbose=False)
    assert json.loads(capsys.readouterr().out)["working"] == ["shm", "mpi"]


@pytest.mark.parametrize(
    ("environ", "tried"),
    [({}, ["shm", "mpi", "nccl"]), ({"GRADSYNC_BACKEND": "local"}, ["local", "shm", "mpi", "nccl"])],
)
def test_local_is_tried_only_if_it_is_asked_for(monkeypatch, capsys, environ, tried):
    monkeypatch.setattr(doctor_command, "collect_facts", lambda _: Facts(environ=environ))
    monkeypatch.setattr(doctor_command, "try_backend", lambda *_: Finding(OK, "works"))
    assert doctor_command.doctor(backend=None, as_json=True, deadline_seconds=1.0, tries=True, verbose=False) == 0
    assert json.loads(capsys.readouterr().out)["working"] == tried


def test_ctrl_c_does_not_wait_for_a_trial_that_hangs(monkeypatch, tmp_path):
    has_begun = tmp_path / "begun"
    in_place_of_the_bench(monkeypatch, f"open({str(has_begun)!r}, 'w').close(); time.sleep(60)")

    def interrupt_the_other(backend, *arguments):
        if backend == "shm":
            return try_backend(backend, *arguments)
        while not has_begun.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_command, "TABLE", {name: TABLE[name] for name in ("mpi", "shm")})
    monkeypatch.setattr(doctor_command, "collect_facts", lambda _: Facts())
    monkeypatch.setattr(doctor_command, "try_backend", interrupt_the_other)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        doctor_command.doctor(backend=None, as_json=True, deadline_seconds=50.0, tries=True, verbose=False)
    assert time.monotonic() - began < 30

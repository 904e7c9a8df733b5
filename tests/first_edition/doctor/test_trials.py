"""Trials and what follows from them: a wrong result, ranks that die or hang, and the exit code."""

import sys
import time

import pytest

from gradsync.bench.crew import Crew, Start
from gradsync.doctor import trials
from gradsync.doctor.finding import ok, unusable
from gradsync.doctor.report import Report
from gradsync.doctor.surroundings import Surroundings
from gradsync.doctor.trials import Trial, try_backend, why_not

ADDRESS_LAST = "import sys, time; from multiprocessing.connection import Client; c = Client(sys.argv[1], 'AF_UNIX'); "
WELL = [ok("Python", "3.12")]


def crew_of(source):
    """Starts ranks of this source in place of real ones."""

    def start(_contender, folder, ranks, patience):
        starts = [Start([sys.executable, "-c", ADDRESS_LAST + source])]
        return Crew(
            "gradsync/shm", folder, lambda address: [with_address(s, address) for s in starts], 1, patience=patience
        )

    return start


def with_address(start, address):
    return Start([*start.command, address])


def hello(rest):
    return f"c.send(('hello', {{'rank': 0, 'pid': __import__('os').getpid(), 'versions': {{}}}})); {rest}"


@pytest.mark.parametrize(
    ("source", "limit_seconds", "text"),
    [
        ("time.sleep(60)", 1.0, "no answer within 1 s"),
        (hello("c.recv(); time.sleep(60)"), 1.0, "no answer within 1 s"),
        (hello("c.recv(); sys.exit('out of luck')"), 60.0, "a rank is gone: out of luck"),
        ("c.send(('failure', 'Traceback\\nOSError: no memory'))", 60.0, "a rank failed: OSError: no memory"),
    ],
)
def test_ranks_that_hang_or_die_are_a_line_in_time(monkeypatch, source, limit_seconds, text):
    monkeypatch.setattr(trials, "start", crew_of(source))
    began = time.monotonic()
    trial = try_backend("shm", Surroundings(), WELL, limit_seconds)
    assert trial.works is False
    assert text in trial.text
    assert "gradsync bench collectives --backend shm" in trial.advice
    assert time.monotonic() - began < 30


def test_a_wrong_result_does_not_work(monkeypatch):
    prepared = "from gradsync.bench.collectives.operation import Prepared; c.recv(); "
    answer = prepared + "c.send(('answer', Prepared(7))); c.poll(60)"
    monkeypatch.setattr(trials, "start", crew_of(hello(answer)))
    trial = try_backend("shm", Surroundings(), WELL, 20.0)
    assert (trial.works, trial.text) == (False, "7 elements of the result are wrong")


def test_what_crashes_in_the_doctor_itself_is_a_line(monkeypatch):
    def start(*_arguments):
        raise MemoryError("none left")

    monkeypatch.setattr(trials, "start", start)
    assert try_backend("shm", Surroundings(), WELL, 1.0).text == "MemoryError: none left"


@pytest.mark.parametrize(
    ("backend", "findings", "reason"),
    [
        ("shm", WELL, None),
        ("shm", [unusable("Python", "aarch64")], "see Python"),
        ("mpi", [unusable("MPI", "not installed")], "see MPI"),
        ("mpi", [unusable("CuPy", "not installed")], None),
        ("nccl", WELL, "no NVIDIA GPU is here"),
    ],
)
def test_what_cannot_work_is_not_tried(tmp_path, backend, findings, reason):
    assert why_not(backend, Surroundings(root=tmp_path), findings) == reason


def tried(**works):
    return [Trial(backend, worked, 2, "") for backend, worked in works.items()]


@pytest.mark.parametrize(
    ("works", "asked_for", "is_well", "verdict"),
    [
        ({"local": True, "shm": True, "nccl": None}, None, True, "Ready: local, shm can be used here."),
        ({"local": True, "shm": False}, None, False, "Not ready: local works here, which is not enough for two ranks."),
        (
            {"local": True, "shm": True, "mpi": False},
            "mpi",
            False,
            "Not ready: mpi was asked for, and does not work here.",
        ),
        ({"mpi": True}, "mpi", True, "Ready: mpi works here."),
        ({}, None, True, "Nothing is broken; no backend was tried."),
        ({"nccl": None}, "nccl", False, "Not ready: nccl was asked for, and does not work here."),
    ],
)
def test_the_exit_code_follows_from_what_works(works, asked_for, is_well, verdict):
    report = Report(WELL, tried(**works), asked_for, 1.0)
    assert (report.is_well, report.verdict()) == (is_well, verdict)

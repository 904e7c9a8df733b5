import os

from gradsync import machine


def test_blas_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    shared = machine.blas_thread_variables(3, {"MKL_NUM_THREADS": "5"})
    assert shared["OMP_NUM_THREADS"] == shared["OPENBLAS_NUM_THREADS"] == "2"
    assert "MKL_NUM_THREADS" not in shared
    assert machine.blas_thread_variables(9, {})["OMP_NUM_THREADS"] == "1"


def test_usable_cores():
    assert machine.usable_cores() == len(os.sched_getaffinity(0))


def test_a_thread_begins_on_its_core_and_may_go_anywhere():
    usable = os.sched_getaffinity(0)
    for number in range(len(usable) + 1):
        machine.begin_on_core(number)
        assert os.sched_getaffinity(0) == usable


def test_a_thread_moves_to_its_core(monkeypatch):
    moves = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: moves.append(mask))
    machine.begin_on_core(4)
    assert moves == [{5}, {3, 5, 9}]

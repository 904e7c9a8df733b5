import os

from gradsync import cores


def test_blas_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    shared = cores.blas_thread_variables(3, {"MKL_NUM_THREADS": "5"})
    assert shared["OMP_NUM_THREADS"] == shared["OPENBLAS_NUM_THREADS"] == "2"
    assert "MKL_NUM_THREADS" not in shared
    assert cores.blas_thread_variables(9, {})["OMP_NUM_THREADS"] == "1"


def test_usable_cores():
    assert cores.usable_cores() == len(os.sched_getaffinity(0))

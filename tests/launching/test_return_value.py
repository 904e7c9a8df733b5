"""What functions return on ranks, where it is large: it comes through a file in memory, as it was."""

import os
import pickle
import weakref

import command
import numpy as np
import pytest
import rank_functions

import gradsync as gs
from gradsync.launching.in_rank import report_pipe
from gradsync.launching.in_rank.rank_result import BOUNDS, Returned
from gradsync.launching.launch import WorkerError
from gradsync.launching.return_value import FiledReturnValue


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if not isinstance(value, np.ndarray):
            assert got[name] == value, name
            continue
        naive = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        flags = [
            (array.flags.c_contiguous, array.flags.f_contiguous, array.flags.writeable) for array in (got[name], naive)
        ]
        assert flags[0] == flags[1], name
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_large_values_come_as_pickle_brings_them(method):
    want = rank_functions.return_arrays()
    context = gs.spawn(rank_functions.return_arrays, nprocs=2, join=False, start_method=method)
    for results in context.return_queues:
        got = results.get()
        assert_same(got, want)
        assert got["again"] is got["C"]
        got["C"][:] = -1.0
        assert (got["Fortran"] == want["Fortran"]).all()
    context.join()


def test_where_no_file_may_be_so_large_the_pipe_does_it():
    (got,) = gs.launch(rank_functions.return_array_where_files_must_be_small, (), 1)
    assert (got == np.arange(500_000.0)).all()


def test_what_pickles_by_value_only_comes_with_its_arrays():
    pytest.importorskip("cloudpickle")
    ((before, function, behind),) = gs.launch(rank_functions.return_arrays_and_lambda, (), 1)
    assert (before * 2 == behind).all()
    assert (before == np.arange(100_000.0)).all()
    assert function() == 5


def test_a_rank_that_dies_while_it_returns_leaves_nothing_and_takes_no_other_result():
    gs.launch(rank_functions.place, (), 1)  # what stays loaded stays open
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(WorkerError) as caught:
        gs.launch(rank_functions.die_while_returning, (), 2)
    assert caught.value.exitcode == -9
    assert all((value == 3.0).all() for value in caught.value.results.values())
    assert 1 not in caught.value.results
    del caught
    assert not command.opened_since(descriptors)


def filed(result):
    """Returns what a rank has filed of a result, as its launcher gets it."""
    file, (reader, writer) = os.memfd_create("result", os.MFD_ALLOW_SEALING), os.pipe()
    os.set_blocking(reader, False)
    Returned(result).send(writer, file)
    ((kind, told),) = report_pipe.FrameReader(reader).read()
    os.close(reader)
    os.close(writer)
    assert kind == report_pipe.FILED_RESULT
    return FiledReturnValue(file, told), file


def test_a_value_that_is_loaded_twice_is_two():
    value, _ = filed(np.zeros(300_000))
    first, second = value.load(), value.load()
    first[:] = 1.0
    assert (second == 0.0).all()
    assert (value.load() == 0.0).all()


def test_memory_and_descriptors_go_with_the_last_array():
    value, file = filed(np.zeros(300_000))
    descriptors = os.listdir("/proc/self/fd")
    array = value.load()
    value.forget()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert (array == 0.0).all()
    assert not command.opened_since(descriptors)  # however many results a program keeps
    mapping = weakref.ref(array.base.obj if isinstance(array.base, memoryview) else array)
    del array
    assert mapping() is None


def test_what_cannot_be_mapped_is_no_value():
    value, _ = filed(np.zeros(300_000))
    value.forget()
    with pytest.raises(OSError, match="Bad file descriptor"):
        value.load()


def test_the_file_cannot_shrink_under_a_reader():
    _, file = filed(np.zeros(300_000))
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"", "0 bytes are no bounds"),
        (b"x" * 17, "17 bytes are no bounds"),
        (BOUNDS.pack(0, 101), "of 100 bytes does not hold bytes 0 to 101"),
        (BOUNDS.pack(0, 2**63), "does not hold"),
        (BOUNDS.pack(0, 50) + BOUNDS.pack(60, 50), "does not hold bytes 60 to 50"),
    ],
)
def test_bounds_beyond_the_file_are_refused(told, why):
    file = os.memfd_create("result", os.MFD_ALLOW_SEALING)
    os.write(file, b"x" * 100)
    with pytest.raises(ValueError, match=why):
        FiledReturnValue(file, bytearray(told))
    os.close(file)

"""What functions return on ranks, where it is large: it comes through a file in memory, as it was."""

import os
import pickle

import command
import numpy as np
import pytest
import rank_functions

import gradsync as gs
from gradsync.launching.launch import WorkerError


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


def test_large_values_come_as_pickle_brings_them():
    want = rank_functions.return_arrays()
    context = gs.spawn(rank_functions.return_arrays, nprocs=2, join=False)
    for results in context.return_queues:
        got = results.get()
        assert_same(got, want)
        assert got["again"] is got["C"]
        got["C"][:] = -1.0
        assert (got["Fortran"] == want["Fortran"]).all()
    context.join()


def test_a_limit_of_files_that_a_function_has_set_itself_is_lifted():
    (got,) = gs.launch(rank_functions.return_array_where_files_must_be_small, (), 1)
    assert (got == np.arange(500_000.0)).all()


def test_a_value_larger_than_any_file_may_be_is_an_error_that_says_so():
    with pytest.raises(WorkerError, match=r"of rank 0 is too large for the memory file .*: File too large") as caught:
        gs.launch(rank_functions.return_array_where_files_must_be_small, 2**20, 1)
    assert "InvalidArgument" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 1 << 16, 1 << 20])
def test_small_values_leave_no_descriptor_open(length):
    gs.launch(rank_functions.place, (), 1)  # what stays loaded stays open
    descriptors = os.listdir("/proc/self/fd")
    assert gs.launch(bytes, length, 2) == [bytes(length)] * 2
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_what_pickles_by_value_only_comes_with_its_arrays():
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

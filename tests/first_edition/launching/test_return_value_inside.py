"""What functions return on ranks, which comes through a file in memory, as it was."""

import os
import weakref

import command
import numpy as np
import pytest

from gradsync.launching.in_rank.result import BOUNDS, RESULT, Returned
from gradsync.launching.rank_report import FrameReader, ReturnValue


def filed(result):
    """Returns what a rank has filed of a result, as its launcher gets it."""
    file, (reader, writer) = os.memfd_create("result", os.MFD_ALLOW_SEALING), os.pipe()
    os.set_blocking(reader, False)
    Returned(result).send(writer, file)
    ((kind, told),) = FrameReader(reader).read()
    os.close(reader)
    os.close(writer)
    assert kind == RESULT
    return ReturnValue(file, told), file


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
        ReturnValue(file, bytearray(told))
    os.close(file)

"""Times packing into a flat buffer and splitting out of it, beside a plain copy of the same list."""

import numpy as np
import pytest

import models
from gradsync.bucketing.lists import get_offsets, param_pack_concat, param_pack_split

SHAPES = models.resnet50()


@pytest.fixture(scope="module")
def arrays():
    return [np.full(shape, index, np.float32) for index, shape in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def destinations(arrays):
    return [np.full_like(array, -1) for array in arrays]


def test_get_offsets(benchmark):
    offsets = benchmark(get_offsets, SHAPES)
    assert offsets[-1] == models.element_count(SHAPES)


@pytest.mark.benchmark(group="97 MiB")
def test_plain_copy(benchmark, arrays, destinations):
    @benchmark
    def copy():
        for source, destination in zip(arrays, destinations, strict=True):
            np.copyto(destination, source)


@pytest.mark.benchmark(group="97 MiB")
def test_param_pack_concat(benchmark, arrays):
    offsets = get_offsets(SHAPES)
    flat = np.zeros(offsets[-1], np.float32)
    packed = benchmark(param_pack_concat, arrays, offsets, out=flat)
    assert packed[-1] == len(arrays) - 1


def test_param_pack_split(benchmark, arrays):
    offsets = get_offsets(SHAPES)
    flat = param_pack_concat(arrays, offsets)
    views = benchmark(param_pack_split, flat, offsets, SHAPES)
    assert [view.shape for view in views] == SHAPES

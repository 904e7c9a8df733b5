"""The stand-in for CuPy under tests/stand_in: arrays, memory and kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stand_in_processes import Gate, Rank, run


def _arrays_compute(r: Rank) -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = r.cupy.asarray(host)
    for computed, expected in [
        (2 * array - 1, 2 * host - 1),
        (array / (array + 1), host / (host + 1)),
        (-array, -host),
        (array[1:, ::2], host[1:, ::2]),
        (array.T.reshape(-1), host.T.reshape(-1)),
        (array.ravel("F"), host.ravel("F")),
        (array.astype(np.int16), host.astype(np.int16)),
        (array.sum(axis=0), host.sum(axis=0)),
        (r.cupy.prod(array[:, 1:], 1), host[:, 1:].prod(1)),
        (array.max(), host.max()),
        (r.cupy.concatenate([array[0], array[:, 0]]), np.concatenate([host[0], host[:, 0]])),
        (r.cupy.broadcast_to(array[0], (2, 4)), np.broadcast_to(host[0], (2, 4))),
        (array == 3, host == 3),
        (r.cupy.multiply(array, array), host * host),
    ]:
        np.testing.assert_array_equal(computed.get(), expected, strict=True)
    array[1] = 7
    array += 1
    assert array[1].get().tolist() == [8] * 4
    assert bool((array[1] == 8).all())
    assert (float(array[0, 1]), int(array[2, 3]), len(array)) == (2.0, 12, 3)
    assert array[1].base is array
    assert (r.cupy.empty(0).data.ptr, bool(r.cupy.zeros((0, 3)))) == (0, False)
    half = r.cupy.ones(3, ml_dtypes.bfloat16)
    assert (half + half).astype(np.float32).get().tolist() == [2, 2, 2]


def test_arrays_compute_as_numpy_does() -> None:
    run(_arrays_compute)


def _host_and_device_apart(r: Rank) -> None:
    array, host = r.cupy.zeros(3, np.float32), np.zeros(3, np.float32)
    for forbidden in [
        lambda: np.asarray(array),
        lambda: np.add(array, array),
        lambda: np.sum(array),
        lambda: host + array,
        lambda: array + host,
        lambda: np.copyto(host, array),
        lambda: array.set([1, 2, 3]),
        lambda: array.set(np.zeros(3)),
        lambda: r.cupy.from_dlpack(host),
    ]:
        with pytest.raises(TypeError):
            forbidden()
    with pytest.raises(ValueError, match="cannot be used for fill"):
        array[...] = host
    with pytest.raises(ValueError, match="cannot be used for copyto"):
        r.cupy.copyto(array, host)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        r.cupy.asarray(np.zeros(3, object))
    with pytest.raises(AttributeError):
        _ = array.flags.writeable
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)
    with pytest.raises(RuntimeError, match="Unsupported device"):
        np.from_dlpack(array)


def test_host_and_device_do_not_mix() -> None:
    run(_host_and_device_apart)


class _Foreign:
    """An array of another library."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._array.__cuda_array_interface__


def _exchange(r: Rank) -> None:
    array = r.cupy.arange(12, dtype=np.float32).reshape(3, 4)
    for source in (array, array[1:], array[:, 1:3], array.astype(ml_dtypes.bfloat16), array[0, 0]):
        view = r.cupy.from_dlpack(source)
        assert (view.data.ptr, view.strides, view.dtype) == (source.data.ptr, source.strides, source.dtype)
    view = r.cupy.asarray(_Foreign(array[:, 1:]))
    assert view.data.ptr == array.data.ptr + 4
    array[0, 1] = 50
    assert float(view[0, 0]) == 50
    assert array.__dlpack_device__() == (2, 0)
    with pytest.raises(ValueError, match="ambiguous"):
        array.__dlpack__(stream=0)
    with pytest.raises(r.cupy.cuda.runtime.CUDARuntimeError, match="invalid argument"):
        r.cupy.cuda.UnownedMemory(np.zeros(4).ctypes.data, 32, None)


def test_foreign_device_memory_is_viewed() -> None:
    run(_exchange)


def _pool(r: Rank) -> None:
    assert np.isnan(r.cupy.empty(1000).get()).all()
    stream = r.cupy.cuda.Stream(non_blocking=True)
    freed = r.full(1)
    address = freed.data.ptr
    r.cupy.cuda.Device().synchronize()
    gate = Gate(stream)
    result = r.full(0)
    with stream:
        result += freed
    del freed  # while the stream has yet to read it
    taken = r.full(2)
    assert taken.data.ptr == address
    r.cupy.cuda.Stream.null.synchronize()
    gate.open()
    assert result.get(stream=stream).tolist() == [2] * 4
    del taken
    with stream:
        assert r.cupy.empty(4, np.float32).data.ptr != address  # memory of another stream
    pool = r.cupy.get_default_memory_pool()
    assert pool.free_bytes() > 0
    pool.free_all_blocks()
    assert pool.free_bytes() == 0
    with pytest.raises(r.cupy.cuda.runtime.CUDARuntimeError):
        r.cupy.cuda.UnownedMemory(address, 4, None)


def test_freed_memory_is_given_away_while_in_use() -> None:
    run(_pool)


def _pinned(r: Rank) -> None:
    stream = r.cupy.cuda.Stream(non_blocking=True)
    array = r.cupy.zeros(4, np.uint8)
    r.cupy.cuda.Device().synchronize()
    pinned = r.cupy.cuda.alloc_pinned_memory(4)
    assert pinned.size() >= 512
    np.frombuffer(pinned, np.uint8, 4)[:] = 1
    gate = Gate(stream)
    array.data.copy_from_host_async(ctypes.c_void_p(pinned.ptr), 4, stream)
    address = pinned.ptr
    del pinned
    again = r.cupy.cuda.alloc_pinned_memory(4)
    assert again.ptr == address
    np.frombuffer(again, np.uint8, 4)[:] = 2
    gate.open()
    assert array.get(stream=stream).tolist() == [2] * 4  # read when the stream got there
    pageable = np.full(4, 3, np.uint8)
    gate = Gate(stream)
    array.data.copy_from_host_async(ctypes.c_void_p(pageable.ctypes.data), 4, stream)
    pageable[:] = 4
    gate.open()
    assert array.get(stream=stream).tolist() == [3] * 4  # read at once


def test_copies_from_pinned_memory_are_asynchronous() -> None:
    run(_pinned)


def _kernels(r: Rank) -> None:
    module = r.cupy.RawModule(code='extern "C" __global__ void pack_chunks() {} void split_chunks() {}')
    arrays = [r.cupy.arange(5, dtype=np.uint8), r.cupy.arange(3, dtype=np.uint8)]
    table = np.array([(arrays[0].data.ptr, 8, 5), (arrays[1].data.ptr, 0, 3)], "u8,u8,u8")
    flat, chunks = r.cupy.zeros(16, np.uint8), r.cupy.asarray(table.view(np.uint8))
    module.get_function("pack_chunks")((2, 1, 1), (256, 1, 1), (chunks, flat))
    assert flat.get().tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0]
    flat += 10
    module.get_function("split_chunks")((2, 1, 1), (256, 1, 1), (chunks.data.ptr, flat.data.ptr))
    assert [array.get().tolist() for array in arrays] == [[10, 11, 12, 13, 14], [10, 11, 12]]
    error = r.cupy.cuda.runtime.CUDARuntimeError
    with pytest.raises(error, match="symbol"):
        module.get_function("other")
    with pytest.raises(error, match="invalid argument"):
        module.get_function("pack_chunks")((0, 1, 1), (256, 1, 1), (chunks, flat))
    on_the_host = r.cupy.asarray(np.array([(table.ctypes.data, 0, 4)], "u8,u8,u8").view(np.uint8))
    module.get_function("pack_chunks")((1, 1, 1), (256, 1, 1), (on_the_host, flat))
    with pytest.raises(error, match="cudaErrorIllegalAddress"):
        flat.get()


def test_the_two_kernels() -> None:
    run(_kernels)

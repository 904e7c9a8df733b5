"""Which GPU a rank takes, which arrays it reaches there, and how NCCL's errors are told; run inside rank processes."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gradsync as gs
from contract import dtype_of, expect
from gradsync.communicators.nccl import library

STAND_IN = Path(__file__).parents[1] / "fake_cupy"


def begin_on_own_gpu(comm: Any, visible: list[str]) -> tuple[str, str]:
    """Every rank has a CUDA_VISIBLE_DEVICES of its own; begins on shared memory, before CUDA looks."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[comm.rank]
    gs.destroy_process_group()
    sys.path.insert(0, str(STAND_IN))
    with gs.init_process_group("nccl") as comm:
        import cupy

        array = cupy.full(3, comm.rank + 1.0)
        comm.all_reduce(array)
        assert array.get()[0] == 3
        return comm.device, cupy.cuda.runtime.deviceGetPCIBusId(int(comm.device[-1]))


def begin_on_gpus_that_are_refused(comm: Any, visible: list[str]) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[comm.rank]
    return begin_anew(comm, ["nccl"] * comm.world_size, {})


def take_devices_in_order(comm: Any) -> str:
    import cupy

    assert cupy.cuda.runtime.getDevice() == int(comm.device.removeprefix("cuda:"))
    comm.barrier()
    return str(comm.device)


def begin_anew(comm: Any, backends: list[str], options: dict[str, Any]) -> str:
    """Returns why the ranks cannot begin with these backends, by rank."""
    gs.destroy_process_group()
    sys.path.insert(0, str(STAND_IN))
    error = expect(gs.GradsyncError, lambda: gs.init_process_group(backends[comm.rank], **options))
    assert not gs.is_initialized()
    return f"{type(error).__name__}: {error}"


def share_a_gpu(comm: Any) -> tuple[str | None, str | None]:
    import cupy

    callback = gs.AllreduceCallback("mean", comm)
    for _ in range(3):
        gradients = [cupy.full(7, comm.rank, np.float32) for _ in range(3)]
        with callback.backward():
            futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
        for future in futures:
            assert (future.result().get() == (comm.world_size - 1) / 2).all()
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"), os.environ.get("NCCL_HOSTID")


class WithInterface:
    """An array of a library that speaks CUDA's array interface only."""

    def __init__(self, memory: Any, *, read_only: bool = False) -> None:
        self.memory = memory
        interface = memory.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "data": (interface["data"][0], read_only)}


class WithDLPack:
    """An array of a library that supports DLPack only."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return tuple(self.memory.__dlpack_device__())  # type: ignore[return-value]


def reach_foreign_arrays(comm: Any) -> None:
    """They are reduced where they are: nothing is copied."""
    import cupy

    callback = gs.AllreduceCallback("sum", comm)
    for kind in (WithInterface, WithDLPack):
        for shape in ((5,), (4, 3)):
            foreign = kind(cupy.full(shape, comm.rank + 1.0))
            assert comm._native_array(foreign, "a test").data.ptr == foreign.memory.data.ptr
            assert comm.all_reduce(foreign) is foreign
            n = comm.world_size
            assert (foreign.memory.get() == n * (n + 1) / 2).all()
            with callback.backward():
                future = callback("w", foreign)
            assert future.result() is foreign
            assert (foreign.memory.get() == n * n * (n + 1) / 2).all()
            gs.bcast_list_([foreign, kind(cupy.full(shape, float(comm.rank)))], communicator=comm)
    on_host = WithDLPack(np.full(3, comm.rank + 1.0))
    comm.all_reduce(on_host)
    assert (on_host.memory == comm.world_size * (comm.world_size + 1) / 2).all()


class ReadOnlyByDLPack(WithDLPack):
    """An array that its library lets nobody write to, and says so as DLPack 1.0 does."""

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.memory.__dlpack__(**options)
        assert options["max_version"] >= (1, 0)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        flags_at = 24  # after the version, the context and the deleter
        ctypes.c_uint64.from_address(pointer_of(capsule, b"dltensor_versioned") + flags_at).value |= 1
        return capsule


class LikeJax(WithDLPack):
    """An array as JAX has it: immutable, which its capsules, of before DLPack 1.0, do not say."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(stream=options.get("stream"))


def read_what_is_read_only(comm: Any) -> None:
    """As host arrays: read, refused where they would be written to, and a gradient's result is a new array."""
    import cupy

    sys.modules["jax"] = jax = types.ModuleType("jax")
    jax.Array = LikeJax  # type: ignore[attr-defined]
    n = comm.world_size
    for make in (partial(WithInterface, read_only=True), ReadOnlyByDLPack, LikeJax):
        array = make(cupy.full((2, 3), comm.rank + 1.0))
        out = cupy.zeros((2, 3))
        callback = gs.AllreduceCallback("sum", comm)
        for refused in (
            partial(comm.all_reduce, array),
            partial(comm.asynchronous.all_reduce, array),
            partial(comm.all_reduce, out, out=array),
            partial(comm.reduce, array, "sum", comm.rank),
        ):
            expect(gs.InvalidArgument, refused, "read-only")
        assert comm.all_reduce(array, out=out) is out
        assert (out.get() == n * (n + 1) / 2).all()
        assert (comm.all_gather(array).get()[:2] == 1).all()
        for other in (None, cupy.full(4, comm.rank + 1.0)):  # alone, and in a bucket with others
            for _ in range(3):
                with callback.backward():
                    futures = [callback("r", array)]
                    if other is not None:
                        callback("w", other)
                assert (futures[0].result().get() == n * (n + 1) / 2).all()
        assert (array.memory.get() == comm.rank + 1).all()


def divide_half_precision_by_many_ranks(comm: Any) -> None:
    """By numbers of ranks that the dtype does not have: 257 is 256 in bfloat16, and 70,000 is infinity in float16."""
    import cupy

    for name, counts in (("bfloat16", (257, 1000)), ("float16", (2049, 70_000))):
        values = np.arange(1, 200).astype(dtype_of(name))
        for count in counts:
            flat = cupy.asarray(values)
            comm._arrays.divide(flat, count)
            assert (flat.get() == (values.astype(np.float32) / np.float32(count)).astype(values.dtype)).all(), (
                name,
                count,
            )


def refuse_another_gpu(comm: Any) -> None:
    import cupy

    with cupy.cuda.Device(1):
        elsewhere = cupy.ones(3)
        foreign = WithDLPack(elsewhere)
    for array in (elsewhere, foreign):
        expect(gs.InvalidArgument, lambda a=array: comm.all_reduce(a), "runs on cuda:0, got an array on cuda:1")
    here = cupy.ones(3)
    expect(gs.InvalidArgument, lambda: comm.all_reduce(here, out=elsewhere), "cuda:1")
    with cupy.cuda.Device(1):  # what the caller's current device is does not matter
        comm.all_reduce(here)
        comm.broadcast(here)
        comm.barrier()
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=1)
        callback("w", here)
        callback.flush()
    with cupy.cuda.Device(0):
        assert (here.get() == 1).all()


def tell_errors_of_nccl(comm: Any) -> None:
    """Codes, names, versions and what to do; CuPy's own error does not know the codes 7 and 8."""
    nccl = comm._backend._nccl
    for code, name, hint in (
        (1, "ncclUnhandledCudaError", "a CUDA call failed"),
        (5, "ncclInvalidUsage", "ranks share a GPU"),
        (6, "ncclRemoteError", "another rank, or the network"),
    ):
        error = told_as(nccl, nccl.binding.NcclError(code))
        assert (error.code, error.name) == (code, name)
        text = str(error)
        assert text.startswith(f"rank 0/1: ncclAllReduce failed with {name} ({code})")
        assert hint in text
        assert "NCCL 2.32.3 from " in text
        assert "CuPy 14.2.0" in text
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.code, again.name) == (text, code, name)
    for code, name in ((7, "ncclInProgress"), (8, "ncclTimeout")):
        error = told_as(nccl, KeyError(code))
        assert (error.code, error.name) == (code, name)
    assert isinstance(told_as(nccl, ZeroDivisionError()), ZeroDivisionError)
    # What NCCL itself refuses comes out of a collective like this, and ends the communicator.
    comm._backend._nccl._ops = dict.fromkeys(gs.ReduceOp, 99)
    error = expect(gs.NcclError, lambda: comm.all_reduce(np.ones(3)), "ncclAllReduce failed with ncclInvalidArgument")
    assert error.code == 4
    expect(gs.CommunicatorClosed, comm.barrier, "ncclInvalidArgument")


def tell_nccls_own_words(comm: Any) -> None:
    """NCCL keeps its last error for the process: also of a communicator that has not come to be."""
    import cupy

    def last_error(communicator: int | None) -> bytes:
        return b"no socket interface found"

    path = Path(__file__)
    library.library_path = lambda: str(path)
    ctypes.CDLL = lambda name: types.SimpleNamespace(ncclGetLastError=last_error)  # type: ignore[assignment,misc]
    joining = cupy.cuda.nccl.NcclCommunicator

    def refuse(*_: Any) -> None:
        raise cupy.cuda.nccl.NcclError(2)

    gs.destroy_process_group()
    cupy.cuda.nccl.NcclCommunicator = refuse
    error = expect(gs.NcclError, lambda: gs.init_process_group("nccl"), "no socket interface found")
    assert "rank 0/1: ncclCommInitRank failed with ncclSystemError (2): no socket interface found; " in str(error)
    cupy.cuda.nccl.NcclCommunicator = joining
    with gs.init_process_group("nccl") as comm:
        comm._backend._nccl._ops = dict.fromkeys(gs.ReduceOp, 99)
        expect(gs.NcclError, lambda: comm.all_reduce(np.ones(3)), "no socket interface found")


def told_as(nccl: Any, error: BaseException) -> Any:
    try:
        with nccl._errors("ncclAllReduce"):
            raise error
    except Exception as told:
        return told


def lack_libnccl(comm: Any) -> str:
    """CuPy is there, libnccl.so.2 is not: cupy.cuda.nccl is then a module without anything in it."""
    import cupy.cuda

    absent: Any = types.ModuleType("cupy.cuda.nccl")
    absent.available = False
    sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = absent
    gs.destroy_process_group()
    return str(expect(gs.BackendUnavailable, lambda: gs.init_process_group("nccl")))

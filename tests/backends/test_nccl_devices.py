"""NCCL and devices: which GPU a rank takes, what is refused before NCCL begins, and which arrays are reached there."""

import ctypes
import io
import os
import sys
import types

import pytest

import gradsync as gs
from backends.on_cuda import HANGS, SIZE, assert_all, full, side_stream, total
from gradsync.communicators.nccl import library
from obstacle import Obstacle


def bus_id(comm):
    import cupy

    return cupy.cuda.runtime.deviceGetPCIBusId(int(comm.device.removeprefix("cuda:")))


# -- Which GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, on=("fake",), environment={"CUDA_VISIBLE_DEVICES": "3,1,2"})
def test_ranks_take_the_visible_gpus_in_order_and_make_them_current(comm):
    import cupy

    assert comm.device == f"cuda:{comm.rank}"
    assert cupy.cuda.runtime.getDevice() == comm.rank
    assert bus_id(comm) == f"0000:0{(3, 1, 2)[comm.rank]}:00.0"
    comm.barrier()


@pytest.mark.ranks(2, on=("fake",))
@pytest.mark.parametrize("visible", [["1", "0"], ["MIG-a", "MIG-b"]])
def test_ranks_may_have_visible_gpus_of_their_own(rank, visible):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    with gs.init_process_group("nccl") as comm:
        assert comm.device == "cuda:0"
        assert bus_id(comm) == f"0000:0{visible[rank] if visible[rank].isdecimal() else 0}:00.0"
        assert_all(comm.all_reduce(full(1)), 2)


@pytest.mark.ranks(2, on=("fake",))
@pytest.mark.parametrize(
    ("visible", "version"),
    [(["0", "0"], "23203"), (["MIG-a", "MIG-a"], "23203"), (["MIG-a", "MIG-b"], "22907")],
    ids=["one GPU", "one slice", "slices that this NCCL does not take"],
)
def test_ranks_that_share_a_gpu_are_refused_by_name(rank, visible, version):
    os.environ.update({"CUDA_VISIBLE_DEVICES": visible[rank], "FAKE_CUPY_NCCL_VERSION": version})
    with pytest.raises((gs.BackendUnavailable, gs.RankFailed), match=r"ranks \[0, 1\] share the GPU 0000:00:00.0"):
        gs.init_process_group("nccl")


SHARING = {"FAKE_CUPY_DEVICES": "1"}


def train(comm):
    callback = gs.AllreduceCallback("mean", comm)
    for _ in range(3):
        with callback.backward():
            futures = [callback(index, full(comm.rank)) for index in range(3)]
        for future in futures:
            assert_all(future.result(), (comm.world_size - 1) / 2)


@pytest.mark.ranks(
    on={"fake": (2,), "gpu": (2, 4)}, fresh=True, environment=SHARING, options={"allow_shared_gpu": True}
)
def test_ranks_may_share_a_gpu_for_tests(comm):
    train(comm)
    assert comm.device == "cuda:0"


@pytest.mark.ranks(
    2,
    on=("fake",),
    fresh=True,
    environment={"FAKE_CUPY_NCCL_VERSION": "22907", **SHARING},
    options={"allow_shared_gpu": True},
)
def test_also_with_an_nccl_that_takes_two_ranks_on_a_gpu_for_duplicates(comm):
    train(comm)


@pytest.mark.ranks(1, on=("fake",), environment={"FAKE_CUPY_DEVICES": "2"})
def test_the_gpu_that_is_asked_for_by_name(rank):
    for device, wanted in {"cuda": 0, None: 0, "cuda:1": 1}.items():
        with gs.init_process_group("nccl", device=device) as comm:
            assert comm.device == f"cuda:{wanted}"
    for device in ("cuda:", "cuda:-1", "gpu:0"):
        with pytest.raises(gs.InvalidArgument):
            gs.init_process_group("nccl", device=device)
    with pytest.raises(gs.BackendUnavailable, match="2 GPUs"):
        gs.init_process_group("nccl", device="cuda:2")


@pytest.mark.ranks(3, on=("fake",), environment={"FAKE_CUPY_DEVICES": "2"})
def test_a_rank_for_which_no_gpu_is_left_is_named(rank):
    with pytest.raises(gs.BackendUnavailable if rank == 2 else gs.RankFailed) as raised:
        gs.init_process_group("nccl")
    assert rank == 2 or raised.value.rank == 2


# -- What is refused before NCCL begins -------------------------------------------------------------------------------


@pytest.mark.ranks(1, on=("fake",))
@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"NCCL_COMM_BLOCKING": "0"}, "NCCL_COMM_BLOCKING"),  # CuPy cannot work with it
        ({"CUPY_ENABLE_UMP": "1"}, "CUPY_ENABLE_UMP"),  # asarray then gives views of host memory
        ({"FAKE_CUPY_VERSION": "13.6.0"}, "13.6.0"),
        ({"FAKE_CUPY_DEVICES": "0"}, "GPU"),
    ],
)
def test_what_nccl_cannot_work_with_is_refused_by_name(rank, variables, word):
    os.environ.update(variables)
    with pytest.raises(gs.BackendUnavailable, match=word):
        gs.init_process_group("nccl")
    assert not gs.is_initialized()


@pytest.mark.ranks(1, on=("fake",))
@pytest.mark.parametrize("missing", ["cupy", "libnccl.so.2", "NVRTC"])
def test_a_library_that_is_missing_is_named(rank, missing):
    import cupy.cuda
    from cupy.cuda import nccl, nvrtc

    def fail():
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")

    if missing == "cupy":
        sys.modules["cupy"] = None
    elif missing == "NVRTC":
        nvrtc.getVersion = fail
    else:
        absent = types.ModuleType("cupy.cuda.nccl")
        absent.available = False  # without it the module has nothing else
        sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = absent
        del nccl
    with pytest.raises(gs.BackendUnavailable, match="(?i)" + missing):
        gs.init_process_group("nccl")


def test_the_nccl_library_is_found_among_its_plugins(monkeypatch):
    maps = [
        "7f00-7f01 r-xp 0 08:01 1     /opt/amazon/lib/libnccl-net.so",
        "7f02-7f03 r-xp 0 08:01 2     /opt/amazon/lib/libnccl-tuner-ofi.so.2",
        "7f04-7f05 r-xp 0 08:01 3     /usr/lib/of nvidia/libnccl.so.2.32.3",
    ]
    monkeypatch.setattr(library, "open", lambda _: io.StringIO("\n".join(maps)), raising=False)
    assert library.library_path() == "/usr/lib/of nvidia/libnccl.so.2.32.3"
    maps.pop()
    assert library.library_path() == "an unknown place"
    assert library.last_error() == ""  # and nothing else of the library is asked


# -- Which arrays -----------------------------------------------------------------------------------------------------


class WithDLPack:
    """An array of a library that supports DLPack only."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


class WithInterface:
    """An array of a library that has CUDA's array interface only."""

    def __init__(self, memory, *, read_only=False):
        self.memory = memory
        interface = memory.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "data": (interface["data"][0], read_only)}


class ReadOnlyByInterface(WithInterface):
    def __init__(self, memory):
        super().__init__(memory, read_only=True)


class ReadOnlyByDLPack(WithDLPack):
    """An array that its library lets nobody write to, and says so as DLPack 1.0 does."""

    def __dlpack__(self, **options):
        capsule = self.memory.__dlpack__(**options)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        flags_at = 24  # after the version, the context and the deleter
        ctypes.c_uint64.from_address(pointer_of(capsule, b"dltensor_versioned") + flags_at).value |= 1
        return capsule


class LikeJax(WithDLPack):
    """An array as JAX has it: immutable, which its capsules, of before DLPack 1.0, do not say."""

    def __dlpack__(self, *, stream=None):
        return self.memory.__dlpack__(stream=stream)


@pytest.mark.ranks(on={"fake": (2,), "gpu": (1, 2)})
def test_arrays_with_cudas_interface_are_reduced_where_they_are(comm):
    """Those with DLPack: the contract, and tests/bucketing."""
    import cupy

    callback, n = gs.AllreduceCallback("sum", comm), comm.world_size
    for shape in ((5,), (4, 3)):
        foreign = WithInterface(cupy.full(shape, comm.rank + 1.0))
        assert comm.all_reduce(foreign) is foreign
        assert_all(foreign.memory, total(comm, 1))
        with callback.backward():
            future = callback("w", foreign)
        assert future.result() is foreign
        assert_all(foreign.memory, n * total(comm, 1))
        gs.bcast_list_([foreign, WithInterface(cupy.full(shape, float(comm.rank)))], communicator=comm)


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)})
def test_an_array_of_another_library_is_read_when_its_stream_has_made_it(comm):
    comm.barrier()
    array, producer = full(0), side_stream()
    with Obstacle(producer), producer:
        array += comm.rank
        comm.all_reduce(WithDLPack(array))
    assert_all(array, total(comm, 0), producer)


@pytest.mark.ranks(2, on=("fake", "gpu"))
@pytest.mark.parametrize("kind", [ReadOnlyByInterface, ReadOnlyByDLPack, LikeJax])
def test_what_is_read_only_is_read_and_never_written(comm, kind):
    import cupy

    jax = types.ModuleType("jax")
    jax.Array = LikeJax
    sys.modules["jax"] = jax
    try:
        array, out, n = kind(cupy.full((2, 3), comm.rank + 1.0)), cupy.zeros((2, 3)), comm.world_size
        for refused in (
            lambda: comm.all_reduce(array),
            lambda: comm.asynchronous.all_reduce(array),
            lambda: comm.all_reduce(out, out=array),
            lambda: comm.reduce(array, "sum", comm.rank),
        ):
            with pytest.raises(gs.InvalidArgument):
                refused()
        assert comm.all_reduce(array, out=out) is out
        assert_all(out, total(comm, 1))
        assert comm.all_gather(array).get()[::2, 0].tolist() == list(range(1, n + 1))
        callback = gs.AllreduceCallback("sum", comm)
        for others in ((), (cupy.full(4, comm.rank + 1.0),)):  # alone, and in a bucket with others
            with callback.backward():
                future = callback("r", array)
                for other in others:
                    callback("w", other)
            assert_all(future.result(), total(comm, 1))
        assert_all(array.memory, comm.rank + 1)
    finally:
        del sys.modules["jax"]


@pytest.mark.ranks(2, on=("fake",), environment=HANGS)
def test_arrays_of_another_gpu_are_refused_and_the_current_gpu_does_not_matter(comm):
    import cupy

    other = cupy.cuda.Device(2)
    here = full(1)
    with other:
        elsewhere = full(1)
        foreign = WithDLPack(elsewhere)
    for refused in (
        lambda: comm.all_reduce(elsewhere),
        lambda: comm.all_reduce(foreign),
        lambda: comm.all_reduce(here, out=elsewhere),
    ):
        with pytest.raises(gs.InvalidArgument):
            refused()
    with other:
        comm.all_reduce(here)
        comm.broadcast(here)
        comm.barrier()
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=4 * SIZE)
        callback("w", here)
        callback.flush()
        assert cupy.cuda.Device() == other
    assert_all(here, comm.world_size**2)

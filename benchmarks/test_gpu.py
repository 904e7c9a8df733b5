"""On a GPU: packing beside plain copies, a step of one rank beside DDP, and a step of two ranks that share the GPU.

make bench-gpu  # with the Python that has your CuPy; takes about 10 GB of the GPU's memory
"""

from __future__ import annotations

import os
import sys
import time
from math import prod

import numpy as np
import pytest

import gradsync as gs
import steps
import systems
from compare import contenders
from models import gradients_of, name_of
from systems import Absent

pytestmark = pytest.mark.gpu
BUCKETS = {"one bucket": 2**40, "10 MB buckets": 10 * 2**20}
FILLER_BYTES = 2**29  # several times any cache
MAX_FILLERS = 256
TINY = [("float32", (300, 7)), ("float32", (5,)), ("float32", (1000,))]  # to see that a row runs
# The ranks meet over shared memory, and a step goes over NCCL: so PyTorch loads the NCCL that it was built for.
ALONE = {"GRADSYNC_BACKEND": "shm"}
FIRST_GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
SHARING = ALONE | {"GRADSYNC_ALLOW_SHARED_GPU": "1", "CUDA_VISIBLE_DEVICES": FIRST_GPU}


@pytest.mark.parametrize("layout", BUCKETS)
@pytest.mark.parametrize("what", ["pack", "split"])
@contenders("gradsync", "memcpy")
def test_packing(compare, benchmark, what, model, layout) -> None:
    gradients = TINY if compare.disabled else gradients_of(model)
    sizes = [np.dtype(dtype).itemsize * prod(shape) for dtype, shape in gradients]
    buckets = in_buckets(sizes, BUCKETS[layout])
    filler_bytes = 0 if compare.disabled else FILLER_BYTES
    row = f"{what} {name_of(model)}, {layout}"
    team = compare(row, move, what, buckets, filler_bytes, rounds=31, ranks=1, environment=ALONE)
    compare.note(**team.ask("run", where)[0])
    if not compare.disabled:
        moved_bytes = 2 * sum(map(sum, buckets))  # read, and written
        compare.note(gigabytes_per_second=moved_bytes / 1e9 / benchmark.stats["median"])


@pytest.mark.parametrize("arrays", ["new", "kept"])
@contenders("gradsync", "DDP")
def test_step_of_one_rank(compare, model, arrays) -> None:
    gradients = TINY if compare.disabled else gradients_of(model)
    row = f"step of one rank, {arrays} arrays: {name_of(model)}"
    team = compare(row, step, gradients, arrays, rounds=31, ranks=1, environment=ALONE)
    compare.note(**team.ask("run", where)[0])


@contenders("gradsync")
def test_step_of_two_ranks_on_one_gpu(compare, model) -> None:
    """Their kernels take turns on the GPU: this shows that a step is right, and not how fast two GPUs are."""
    gradients = TINY if compare.disabled else gradients_of(model)
    row = f"step of two ranks on one GPU (right, not fast): {name_of(model)}"
    team = compare(row, step, gradients, "kept", rounds=7, ranks=2, environment=SHARING)
    compare.note(**team.ask("run", where)[0])


# -- In the rank: gradsync over NCCL. All private names are here: no public call packs without a collective, and a rank
# -- that is alone has nothing to pack.


def nccl() -> gs.Communicator:
    systems.comm()
    try:
        with gs.override_backend("nccl") as comm:
            return comm
    except gs.BackendUnavailable as error:
        raise Absent("NCCL " + str(error).partition("backend 'nccl' ")[2]) from None


def pack_also_alone(comm) -> None:
    assert hasattr(comm._backend, "force_packing"), "where one rank packs has another name now"
    comm._backend.force_packing = True


def where() -> dict[str, str]:
    if "torch" in sys.modules:
        import torch

        found = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        return {"backend": "nccl", "gpu": torch.cuda.get_device_name(0), **found}
    import cupy
    from cupy.cuda import nccl

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {"backend": "nccl", "gpu": name, "cupy": cupy.__version__, "nccl": str(nccl.get_version())}


# -- In the rank: copies and packing, by the clock of the GPU ----------------------------------------------------------


def in_buckets(sizes, threshold_bytes):
    """The sizes of the arrays in each bucket. What has a bucket of its own is not packed, and left out."""
    buckets, room_bytes = [], 0
    for size in sizes:
        if size > room_bytes:
            buckets.append([])
            room_bytes = threshold_bytes
        buckets[-1].append(size)
        room_bytes -= size
    return [bucket for bucket in buckets if len(bucket) > 1]


def move(contender, what, buckets, filler_bytes):
    nccl()
    import cupy

    from gradsync.communicators.nccl.pack import Packer

    packer = Packer()
    arrays = [[cupy.asarray(np.full(size, 1 + i % 250, np.uint8)) for i, size in enumerate(each)] for each in buckets]
    # Each array begins at a multiple of 16 bytes.
    flats, copies = ([cupy.zeros(sum(each) + 16 * len(each), np.uint8) for each in buckets] for _ in range(2))
    tables = [packer.table(each) for each in arrays]
    # A step makes each table once: to pack, not to split.
    moves = {
        "pack": lambda: [packer.pack(packer.table(each), flat) for each, flat in zip(arrays, flats, strict=True)],
        "split": lambda: [packer.split(*pair) for pair in zip(tables, flats, strict=True)],
        "copy": lambda: [
            copy.data.copy_from_device_async(flat.data, sum(each))
            for copy, flat, each in zip(copies, flats, buckets, strict=True)
        ],
    }
    moves["pack" if what == "split" else what]()
    for array in [array for each in arrays for array in each]:
        array.fill(0)
    moves["split"]()
    moves["copy"]()
    for each, flat, copy in zip(arrays, flats, copies, strict=True):
        assert (copy.get() == flat.get())[: sum(array.nbytes for array in each)].all(), "the copy did not arrive"
        for i, array in enumerate(each):
            assert (array.get() == 1 + i % 250).all(), f"array {i} did not come back from its bucket"
    return on_gpu_clock(moves["copy" if contender == "memcpy" else what], filler_bytes)


def on_gpu_clock(work, filler_bytes):
    """Times work between two events.

    An idle GPU is faster than the host that queues its work, and would be timed waiting for it. So copies keep it busy
    until all is queued: if the first event was over before, the time does not count, and there are more copies the next
    time. They also leave the caches full of something else, as a training step would.
    """
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    source, target = (cupy.zeros(filler_bytes, np.uint8) for _ in range(2))
    cupy.cuda.Device().synchronize()
    fillers = 1 if filler_bytes else 0

    def step() -> float:
        nonlocal fillers
        while True:
            with stream:
                for _ in range(fillers):
                    target.data.copy_from_device_async(source.data, filler_bytes)
                begin.record()
                work()
                end.record()
                is_late = fillers and begin.done
                end.synchronize()
            if not is_late:
                return cupy.cuda.get_elapsed_time(begin, end) / 1e3
            assert fillers < MAX_FILLERS, "the host takes too long to queue this"
            fillers *= 2

    return step


# -- In the rank: steps, by the clock of the host, from an idle GPU until it is idle again -----------------------------


def step(contender, gradients, which):
    return step_of_ddp(gradients, which) if contender == "DDP" else step_of_gradsync(gradients, which)


def step_of_gradsync(gradients, which):
    comm = nccl()
    import cupy

    if comm.world_size == 1:
        pack_also_alone(comm)
    sync = gs.AllreduceCallback("mean", comm, threshold_bytes="10 MB")
    arrays = [cupy.asarray(np.full(shape, 1 + i + comm.rank, dtype)) for i, (dtype, shape) in enumerate(gradients)]

    def step() -> float:
        nonlocal arrays
        if which == "new":
            arrays, old = [cupy.empty_like(array) for array in arrays], arrays  # elsewhere: the old ones are there
            for array, source in zip(arrays, old, strict=True):
                cupy.copyto(array, source)
        cupy.cuda.Device().synchronize()
        began = time.perf_counter()
        with sync.backward():
            futures = [sync(i, array) for i, array in enumerate(arrays)]
        arrays = [future.result() for future in futures]
        cupy.cuda.Device().synchronize()
        return time.perf_counter() - began

    step()
    for i, array in enumerate(arrays):  # all have the mean, which further steps leave as it is
        assert (array.get() == 1 + i + (comm.world_size - 1) / 2).all(), f"gradient {i} is not the mean of all ranks"
    return step


def step_of_ddp(gradients, which):
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise Absent(systems.NO_TORCH) from None
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise Absent("this PyTorch has no CUDA or no NCCL: pip install torch")
    device = torch.device("cuda", 0)
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    return steps.ddp(dist, gradients, which, device, torch.cuda.synchronize)

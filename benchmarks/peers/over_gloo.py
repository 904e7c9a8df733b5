"""PyTorch's contenders on one rank, over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from peers.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, RANKS, REDUCE_SCATTER, ROOT
from peers.contenders import DDP, DDP_START_UP, DDP_VIEWS, GLOO, GLOO_BUCKETS, local_backward, whole_backward
from peers.ddp import BackwardPasses
from peers.operation import NotOffered, Operation
from peers.workload import Workload

# DistributedDataParallel's defaults, of a step and at the start.
BUCKET_BYTES = 25 * 2**20
START_UP_BYTES = 250 * 2**20


class Gloo:
    """A rank of PyTorch's gloo process group, with one thread for PyTorch's own operators, as torchrun sets it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=self.rank, world_size=RANKS)
        self.barrier = dist.barrier
        self.close = dist.destroy_process_group
        self.versions = {"torch": str(torch.__version__)}

    def operations(self, workload: Workload, arrays: list[np.ndarray]) -> dict[str, Operation]:
        tensors = [torch.from_numpy(array) for array in arrays]
        if not workload.is_list:
            target = workload.make_target(arrays[0])
            run = _on_one(workload.collective, tensors[0], torch.from_numpy(target))
            return {GLOO: Operation(run, lambda: [target])}
        if workload.collective == BROADCAST:
            return {DDP_START_UP: Operation(lambda: _start_up(tensors), lambda: arrays)}
        return {
            **_ddp_operations(DDP, tensors, gradient_as_bucket_view=False),
            **_ddp_operations(DDP_VIEWS, tensors, gradient_as_bucket_view=True),
            GLOO_BUCKETS: Operation(_bucket_by_bucket(tensors), lambda: arrays),
        }


def _on_one(collective: str, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """Returns what runs a collective; gloo itself says of some, in some versions, that it has none."""
    calls: dict[str, Callable[[], object]] = {
        ALL_REDUCE: lambda: dist.all_reduce(source),
        ALL_GATHER: lambda: dist.all_gather_single(target, source),
        REDUCE_SCATTER: lambda: dist.reduce_scatter_single(target, source),
        BROADCAST: lambda: dist.broadcast(source, ROOT),
        ALL_TO_ALL: lambda: dist.all_to_all_single(target, source),
    }
    call = calls[collective]

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            if "support" in str(error):
                raise NotOffered(str(error)) from error
            raise

    return run


# -- DistributedDataParallel ---------------------------------------------------------------------------------


def _ddp_operations(name: str, gradients: list[torch.Tensor], **options: bool) -> dict[str, Operation]:
    passes = BackwardPasses(gradients, **options)
    forward, backward = passes.calls(synchronising=True)
    local_forward, local = passes.calls(synchronising=False)
    return {
        whole_backward(name): Operation(backward, lambda: [each.numpy() for each in passes.gradients()], forward),
        local_backward(name): Operation(local, None, local_forward),
    }


def _start_up(tensors: list[torch.Tensor]) -> None:
    """Does what DistributedDataParallel does with a model's parameters when it is made."""
    dist._broadcast_coalesced(dist.group.WORLD, tensors, START_UP_BYTES, ROOT)


# -- Written by hand -------------------------------------------------------------------------------------------------


def _bucket_by_bucket(tensors: list[torch.Tensor]) -> Any:
    """Flattens buckets with PyTorch's own functions; each is under way while the next one is flattened."""
    buckets = _buckets_of(tensors)

    def synchronise() -> None:
        under_way = []
        for bucket in buckets:
            flat = torch._utils._flatten_dense_tensors(bucket)
            under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in under_way:
            work.wait()
            flat.div_(RANKS)
            for tensor, reduced in zip(bucket, torch._utils._unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(reduced)

    return synchronise


def _buckets_of(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the tensors in buckets up to BUCKET_BYTES; a larger tensor is alone in its own."""
    buckets: list[list[torch.Tensor]] = []
    room_bytes = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room_bytes:
            buckets.append([])
            room_bytes = BUCKET_BYTES
        buckets[-1].append(tensor)
        room_bytes -= tensor.nbytes
    return buckets

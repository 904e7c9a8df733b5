"""PyTorch's torch.distributed on one rank: gloo on the CPU, NCCL beside GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXCHANGE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    ROOT,
    SCATTER,
)
from gradsync.bench.collectives.operation import Buffers, NotOffered
from gradsync.bench.collectives.values import Array

_REFUSALS = ("support", "not implemented", "Cannot use")  # as gloo and PyTorch say that there is no such thing
_OPS = {"sum": "SUM", "mean": "AVG", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}


class Torch:
    """See System.

    Args:
        backend: "gloo" or "nccl".
    """

    def __init__(self, backend: str) -> None:
        torch.set_num_threads(1)  # as torchrun sets it
        self.backend = backend
        self.rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._device = torch.device("cpu")
        if backend == "nccl":
            self._device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        dist.init_process_group(backend, init_method=os.environ["INIT_METHOD"], rank=self.rank, world_size=ranks)
        self.barrier = dist.barrier
        self.close = dist.destroy_process_group
        self.versions = {"torch": str(torch.__version__), "numpy": np.__version__}

    def empty(self, elements: int, dtype: str) -> Any:
        if dtype == "bfloat16":
            raise NotOffered("NumPy and PyTorch do not exchange bfloat16")
        return torch.zeros(elements, dtype=getattr(torch, dtype), device=self._device)

    def fill(self, target: Any, values: Array | int) -> None:
        if isinstance(values, int):
            target.fill_(values)
        else:
            target.copy_(torch.from_numpy(values))

    def to_host(self, array: Any) -> Array:
        host: Array = array.cpu().numpy()
        return host

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def operation(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        call = self._call(case, buffers)

        def run() -> None:
            try:
                call()
            except (RuntimeError, ValueError) as error:
                if any(words in str(error) for words in _REFUSALS):
                    raise NotOffered(str(error).splitlines()[0]) from error
                raise

        return run

    def _call(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        source, target = buffers.source, buffers.target
        if case.collective in (ALL_REDUCE, REDUCE):
            return self._reduction(case, source, target)
        if case.collective in (GATHER, SCATTER) and self.backend == "gloo":
            return self._parts_at_root(case, source, target)
        if case.collective == EXCHANGE:
            return lambda: self._exchange(source, target)
        if case.collective in (GATHER, SCATTER):
            raise NotOffered(f"not timed over {self.backend}")
        if case.collective == ALL_TO_ALL and source is target:
            raise NotOffered("torch.distributed has no all_to_all_single in place")
        return {
            REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(target, source, getattr(dist.ReduceOp, _OPS[case.op])),
            BROADCAST: lambda: dist.broadcast(source, ROOT),
            ALL_GATHER: lambda: dist.all_gather_into_tensor(target, source),
            ALL_TO_ALL: lambda: dist.all_to_all_single(target, source),
        }[case.collective]

    def _reduction(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """Both work in place only: what has another target copies first, as everybody has to."""
        op = getattr(dist.ReduceOp, _OPS[case.op])
        array = source if source is target or target is None else target

        def run() -> None:
            if array is not source:
                array.copy_(source)
            if case.collective == ALL_REDUCE:
                dist.all_reduce(array, op)
            else:
                dist.reduce(array, ROOT, op)

        return run

    def _parts_at_root(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        parts = source if case.collective == SCATTER else target
        views = None if self.rank != ROOT else list(parts.view(case.ranks, case.count).unbind())
        if case.collective == SCATTER:
            return lambda: dist.scatter(target, views, ROOT)
        return lambda: dist.gather(source, views, ROOT)

    def _exchange(self, source: Any, target: Any) -> None:
        ranks = dist.get_world_size()
        send = dist.P2POp(dist.isend, source, (self.rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, target, (self.rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

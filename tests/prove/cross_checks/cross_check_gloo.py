"""The cases of the cross-check through torch.distributed, over gloo."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cross_check_cases import Case, object_of, root_of

OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Gloo:
    """A rank of a gloo process group, which meets the others in the file that INIT_METHOD names."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init_method = os.environ["INIT_METHOD"]
        dist.init_process_group("gloo", init_method=init_method, rank=self.rank, world_size=self.world_size)
        self._root = root_of(self.world_size)
        self.close = dist.destroy_process_group

    def run(self, case: Case, source: np.ndarray) -> np.ndarray | None:
        """Returns what this rank gets of a case; None where it gets nothing."""
        is_bits = case.dtype == "bfloat16"
        given = torch.from_numpy(source.view(np.int16)).view(torch.bfloat16) if is_bits else torch.from_numpy(source)
        result = getattr(self, f"_{case.collective}")(given, case)
        if not isinstance(result, torch.Tensor):
            return result
        return result.view(torch.int16).numpy().view(np.uint16) if is_bits else result.numpy()

    def _parts(self, source: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        return [source.new_empty((rows, *source.shape[1:])) for rows in sizes]

    def _all_reduce(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        dist.all_reduce(source, OPERATORS[case.op])
        return source

    def _reduce(self, source: torch.Tensor, case: Case) -> torch.Tensor | None:
        dist.reduce(source, self._root, OPERATORS[case.op])
        return source if self.rank == self._root else None

    def _reduce_scatter(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        sizes = case.sizes(self.world_size)
        (target,) = self._parts(source, [sizes[self.rank]])
        dist.reduce_scatter(target, list(source.split(sizes)), OPERATORS[case.op])
        return target

    def _broadcast(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        dist.broadcast(source, self._root)
        return source

    def _all_gather(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        targets = self._parts(source, case.sizes(self.world_size))
        dist.all_gather(targets, source)
        return torch.cat(targets)

    def _gather(self, source: torch.Tensor, case: Case) -> torch.Tensor | None:
        targets = self._parts(source, case.sizes(self.world_size)) if self.rank == self._root else None
        dist.gather(source, targets, self._root)
        return None if targets is None else torch.cat(targets)

    def _scatter(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        sizes = case.sizes(self.world_size)
        (target,) = self._parts(source, [sizes[self.rank]])
        dist.scatter(target, list(source.split(sizes)) if self.rank == self._root else None, self._root)
        return target

    def _all_to_all(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        send_sizes, recv_sizes = (of(self.rank, self.world_size) for of in (case.sizes_from, case.sizes_to))
        (target,) = self._parts(source, [sum(recv_sizes)])
        dist.all_to_all_single(target, source, recv_sizes, send_sizes)
        return target

    def _send_recv(self, source: torch.Tensor, case: Case) -> torch.Tensor | None:
        if self.rank == 0:
            dist.send(source, self.world_size - 1)
        if self.rank < self.world_size - 1:
            return None
        target = torch.empty_like(source)
        dist.recv(target, 0)
        return target

    def _exchange(self, source: torch.Tensor, case: Case) -> torch.Tensor:
        target = torch.empty_like(source)
        sending = dist.isend(source, (self.rank + 1) % self.world_size)
        dist.recv(target, (self.rank - 1) % self.world_size)
        sending.wait()
        return target

    def _objects_all_gather(self, source: torch.Tensor, case: Case) -> Any:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, object_of(self.rank))
        return gathered

    def _objects_gather(self, source: torch.Tensor, case: Case) -> Any:
        gathered: list[Any] | None = [None] * self.world_size if self.rank == self._root else None
        dist.gather_object(object_of(self.rank), gathered, self._root)
        return gathered

    def _objects_broadcast(self, source: torch.Tensor, case: Case) -> Any:
        objects = [object_of(self.rank)]
        dist.broadcast_object_list(objects, self._root)
        return objects[0]

    def _objects_scatter(self, source: torch.Tensor, case: Case) -> Any:
        scattered: list[Any] = [None]
        given = [object_of(rank) for rank in range(self.world_size)] if self.rank == self._root else None
        dist.scatter_object_list(scattered, given, self._root)
        return scattered[0]

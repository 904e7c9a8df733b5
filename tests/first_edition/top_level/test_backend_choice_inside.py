"""Which backend ranks take, from what each of them could use; and that all take the same one."""

from __future__ import annotations

import pytest

import gradsync as gs
from gradsync.backend_choice import suitable_backend
from gradsync.environment import RankEnvironment

A, B = "gpu host boot 0000:01:00.0", "gpu host boot 0000:02:00.0"
NONE = "no gpu: no GPU is visible"


def place(world_size: int, local_world_size: int) -> RankEnvironment:
    return RankEnvironment(0, world_size, 0, local_world_size)


@pytest.mark.parametrize(
    ("offers", "shared", "backend", "reason"),
    [
        ([A, B], False, "nccl", "each rank has a GPU"),
        ([A], False, "nccl", "each rank has a GPU"),
        ([A, A], False, "shm", "2 ranks for 1 visible GPUs"),
        ([A, A], True, "nccl", "each rank has a GPU"),
        ([NONE, NONE], False, "shm", "no GPU is visible"),
        ([A, NONE], False, "shm", "rank 1: no GPU is visible"),
        ([A, "no gpu: local rank 1 has no GPU of its own"], False, "shm", "rank 1: local rank 1 has no GPU of its own"),
        ([NONE], False, "local", "one rank; no GPU is visible"),
    ],
)
def test_auto_takes_what_all_ranks_can_use(offers: list[str], shared: bool, backend: str, reason: str) -> None:
    n = len(offers)
    chosen, why = suitable_backend(offers, place(n, n), allow_shared_gpu=shared)
    assert chosen == backend
    assert why.endswith(reason)


def test_across_hosts_every_rank_needs_a_gpu() -> None:
    assert suitable_backend([A, B], place(2, 1), allow_shared_gpu=False)[0] == "nccl"
    with pytest.raises(gs.BackendUnavailable, match="2 ranks with 1 on this host.*rank 1: no GPU"):
        suitable_backend([A, NONE], place(2, 1), allow_shared_gpu=False)
